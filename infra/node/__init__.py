"""What runs on a node: the actions that the head requests, processes, ports, folders and shipped code.

``python -m infra.node ACTION`` starts one. Standard library only, so that actions start quickly and need nothing
installed. Not here: decisions (``infra.head``), and what a rank computes (``t5train.train``).
"""

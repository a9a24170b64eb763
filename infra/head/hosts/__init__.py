"""The hosts of a hostfile, and the way to them: ssh connections, requests to their nodes, and shipped code.

Not here: which of the hosts train (``infra.head.host_selection``), and what a node does when it is asked
(``infra.node``).
"""

"""Reads hostfiles, and connects to hosts: ssh, requests to ``infra.node``, and shipped code.

Not here: which of the hosts train (``infra.head.host_selection``), and how a node handles requests (``infra.node``).
"""

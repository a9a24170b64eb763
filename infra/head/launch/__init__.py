"""Starts, supervises and ends ranks, on this machine and on hosts, and finds out why an attempt failed.

Not here: the guards, which start and end each process on a node (``infra.node.attempts``).
"""

"""Starts, supervises and ends ranks, on this machine and on hosts, and finds out why an attempt failed.

Not here: ending a process (``infra.node.attempts``).
"""

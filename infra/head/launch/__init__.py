"""Ranks started, supervised and ended, on this machine and on hosts; why an attempt failed.

Not here: ending a process (``infra.node.attempts``).
"""

"""Checks the run and its hosts before a launch, so that all problems are reported before any work starts.

Each node collects its own facts. Pure functions on the head evaluate the facts of all nodes (``rendezvous``,
``checklist``). A small all-reduce over all ranks comes last (``all_reduce_check``). Not here: collecting facts
(``infra.node.inspection``).
"""

"""Checks of the run and its hosts before a launch, so that every problem is reported before anything waits for it.

Each node collects its own facts. Pure functions on the head evaluate the facts of all nodes (``rendezvous``,
``checklist``). A small all-reduce over all ranks comes last (``all_reduce_check``). Not here: collecting facts
(``infra.node.inspection``).
"""

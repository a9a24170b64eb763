"""Moves files of a run between the head and nodes that share no storage: gathering, sync, recovery, provisioning.

The head's folder of the run has the same content as on shared storage. Before ranks start, the files that they begin
from are copied to their nodes. While ranks run, each finished checkpoint is gathered. At the end, the other results are
collected. Not here: a node's own part (``infra.node.storage``).
"""

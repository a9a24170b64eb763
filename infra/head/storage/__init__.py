"""The files of a run between the head and nodes, for hosts that share no storage: gather, sync, recovery, provisioning.

The head's folder of the run has the same content as on shared storage. Before ranks start, the files they begin from
are brought to their nodes. While they run, each finished checkpoint is gathered; at the end, their other results are.
Not here: a node's own part (``infra.node.storage``).
"""

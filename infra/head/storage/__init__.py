"""A run over hosts that share no storage: what ``infra.node.storage`` does for it, and when.

The head's folder of the run has the same content as on shared storage. Before ranks start, the files they begin from
are brought to their nodes. While they run, each finished checkpoint is gathered; at the end, their other results are.
"""

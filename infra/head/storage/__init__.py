"""A run over hosts that share no storage: what it has done by ``infra.node.storage``, and when.

The head's folder of the run is what it would be on shared storage. Before ranks start, what they begin from is brought
to their nodes; while they are at work, each finished checkpoint is gathered; at the end, what they have left.
"""

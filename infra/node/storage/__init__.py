"""This node's own disk, and how files move between it, other nodes and the head.

All transfers use one protocol (``file_channel``): one side requests a range of a file by name, and the other sends it.
To gather, the head requests files from nodes. To restore, a node requests files from the head. To stage, each node of a
chain requests files from the one before it. Not here: which files go where (``infra.head.storage``).
"""

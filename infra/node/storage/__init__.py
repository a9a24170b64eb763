"""Files on the disks of hosts that share no storage, and how these files move between hosts and the head.

All transfers use one protocol (``file_channel``): one side requests a range of a file by name, and the other sends it.
To gather, the head requests files from nodes. To restore, a node requests files from the head. To stage, each node of a
chain requests files from the one before it.
"""

"""What hosts that share no storage keep on disks of their own, and how it moves between them and the head.

One protocol does all of it (``wire``): one side asks for a range of a file by name, the other sends it. A gather is the
head asking nodes; a restore is a node asking the head; staging is a chain in which each node asks the one before it.
"""

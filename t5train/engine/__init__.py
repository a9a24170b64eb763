"""The DeepSpeed engine: its configuration, passes, optimizer, partitions, collectives and memory estimate.

Not here: its files (``t5train.checkpoint``), and the program that drives it (``t5train.train``).
"""

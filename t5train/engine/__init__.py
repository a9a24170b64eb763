"""The DeepSpeed engine: its configuration, passes, optimizer, partitions, collectives and memory estimate.

For its files see ``t5train.checkpoint``, for the program that drives it ``t5train.train``.
"""

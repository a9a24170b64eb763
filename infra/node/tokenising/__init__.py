"""The worker of Dask on a host that helps to tokenise, and what it agrees on with the scheduler on the head.

Not here: how a shard is made (``t5train.data``), and the scheduler (``infra.head.tokenising``).
"""

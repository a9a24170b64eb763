"""Tokenises on all hosts of a run with Dask: the scheduler on the head, the hosts' workers, and their jobs.

Not here: what a job is (``t5train.data.shards``), and the workers themselves (``infra.node.stages``).
"""

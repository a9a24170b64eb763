"""Copies of a run's checkpoints in a bucket, from which another head can continue the run if its machines are lost.

Not here: sending and proving objects (``t5train.release.object_store``), and when copies are made (``infra.head``).
"""

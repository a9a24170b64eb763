"""The records of stages (``manifest.json``), their identities, digests, and the witness and metrics of training.

Not here: comparing a published folder with them (``t5train.release``).
"""

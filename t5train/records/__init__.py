"""The records of stages (``manifest.json``), their identities, digests, and the witness of a training run.

Not here: comparing a published folder with them (``t5train.release``).
"""

"""The records of stages (``manifest.json``), their identities, digests and locations, the witness and the metrics.

Not here: comparing a published folder with them (``t5train.release``).
"""

"""What stages leave: their records (``manifest.json``), identities, digests, and the witness of a training.

Not here: comparing a published folder with them (``t5train.release``).
"""

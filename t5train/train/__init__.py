"""The program of every rank: the training loop, validation, sanity checks, learning rate, and recording the witness.

Not here: forward and backward passes (``t5train.engine``), and starting ranks (``infra.head.launch``).
"""

"""Export, model card, certificate and certification, verification, and publication.

Not here: weights (``t5train.checkpoint.consolidate``).
"""

"""Export, model card, certificate and certification, verification, publication, and use of a published folder.

Not here: weights (``t5train.checkpoint.consolidate``).
"""

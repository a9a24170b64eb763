"""Export, model card, certificate and certification, verification, and publication.

For weights see ``t5train.checkpoint.consolidate``.
"""

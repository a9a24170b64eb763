"""Pairs of source and target to fine-tune on: from files to rows of token ids.

Not here: the settings (``t5train.spec.pairs_spec``).
"""

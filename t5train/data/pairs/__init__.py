"""From files of pairs to batches: reading and splitting pairs, packing them into rows, and the ranks' loader.

Not here: the settings (``t5train.spec.pairs_spec``), and pre-training's samples (``t5train.data.samples``).
"""

"""What a run trains on and is measured on, for the training loop: text, or pairs of texts.

Not here: reading samples (``t5train.data``), and the loop itself (``t5train.train.loop``).
"""

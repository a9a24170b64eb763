"""A model and a text: what it writes into gaps, and its loss on masked text.

Not here: predictions for the rows of a file (``t5train.inference.predict``).
"""

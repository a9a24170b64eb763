"""What is wrong with passages: copies of others, near-duplicates, and what training text shares with held-out text.

Not here: the rows and segments of a text (``t5train.data.segments``), and counts that reading it gives at no cost
(``t5train.data.passages``).
"""

"""Scores of predictions beside their references, as sacrebleu and rouge-score give them.

Not here: predictions themselves (``t5train.inference.predict``), losses of a model on text
(``t5train.inference.text``), and how scores are shown (``t5train.report``).
"""

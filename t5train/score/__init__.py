"""Scores of predictions beside their references, as sacrebleu and rouge-score give them.

Not here: predictions themselves (``t5train.predict``), losses of a model on text (``t5train.release.inference``), and
how scores are shown (``t5train.report``).
"""

"""Prediction: what a T5 writes for each row of a file, on one or many devices.

Not here: how good the predictions are (``t5train.score``), and what a model writes into the gaps of a single text
(``t5train.release.inference``).
"""

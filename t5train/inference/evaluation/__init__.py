"""Evaluation of an export on held-out pairs: the stage that predicts and measures, and the check of its metrics.

Not here: how to predict (``t5train.inference.predict``) and to score (``t5train.inference.score``), and how losses are
measured while a run trains (``t5train.train.validation``).
"""

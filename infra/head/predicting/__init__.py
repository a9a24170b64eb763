"""Predicts on the hosts of a hostfile: which device they have, what is copied to them, and who predicts which part.

Not here: what a part is (``t5train.inference.predict``), and how a host predicts it (``infra.node.stages.predictor``).
"""

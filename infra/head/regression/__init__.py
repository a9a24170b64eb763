"""Nights of the regression: running cases beside the peer, and removing old nights here and on hosts.

Not here: the cases, baselines and findings, which are data and pure functions (t5train.regression).
"""

"""Serving: a model behind HTTP, with a page to try it.

Not here: how a batch is decoded (``t5train.predict``), what a model writes into the gaps of a text
(``t5train.release.inference``), and the command with its key and address (``flows.cli``).
"""

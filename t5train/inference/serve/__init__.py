"""Serving: a model behind HTTP, with a page to try it.

Not here: how a batch is decoded (``t5train.inference.predict``), what a model writes into the gaps of a text
(``t5train.inference.text``), and the command with its key and address (``flows.cli``).
"""

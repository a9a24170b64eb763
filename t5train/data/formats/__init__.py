"""Formats of text files: compressed ones, and those that take more than a line per passage.

Not here: choosing the format of a file, and files with a passage per line (``t5train.data.readers``).
"""

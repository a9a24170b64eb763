"""Formats of text files that take more than a line per passage: Parquet, and dumps of Wikipedia.

Not here: choosing the format of a file, and files with a passage per line (``t5train.data.readers``).
"""

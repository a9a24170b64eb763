"""Code in C++ for what takes the most time with text: the segmenter of words, and the reader of JSON lines.

Not here: what decides whether it is used, and does the same without it (``t5train.data.vocabulary``,
``t5train.data.readers``).
"""

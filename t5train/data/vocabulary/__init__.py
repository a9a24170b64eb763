"""The vocabulary: the stage tokenizer, and the conversion of text to ids.

Not here: reading text, and files of ids (``t5train.data``), or the comparison of a published tokenizer with training
(``t5train.release``).
"""

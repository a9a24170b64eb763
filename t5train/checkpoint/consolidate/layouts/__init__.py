"""The layouts that DeepSpeed writes: telling them apart, and where each has its weights and masters.

Not here: writing the result (``tensor_writer``).
"""

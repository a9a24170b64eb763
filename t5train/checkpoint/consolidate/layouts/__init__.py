"""The layouts that DeepSpeed writes: how to detect them, and where each has its weights and masters.

Not here: writing the result (``tensor_writer``).
"""

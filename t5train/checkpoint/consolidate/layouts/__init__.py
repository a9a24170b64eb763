"""The layouts that DeepSpeed writes: how to detect them, and where each stores its weights and fp32 masters.

Not here: writing the result (``tensor_writer``).
"""

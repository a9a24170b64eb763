"""The T5 module with Hugging Face's parameter names, its shapes and parameters, and the model a run continues from.

Not here: what trains it (``t5train.engine``), and its export (``t5train.release``).
"""

"""Convert a DeepSpeed checkpoint to fp32 safetensors: open it, plan what to read from which file, and write tensors.

Not here: which file holds which tensors (``layouts``).
"""

from t5train.checkpoint.consolidate.consolidation import consolidate

__all__ = ["consolidate"]

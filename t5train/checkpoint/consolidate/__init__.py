"""DeepSpeed checkpoint to fp32 safetensors: opening it, planning what is read from where, and writing tensors.

Not here: which file has what (``layouts``).
"""

from t5train.checkpoint.consolidate.consolidation import consolidate

__all__ = ["consolidate"]

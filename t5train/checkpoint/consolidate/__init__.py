"""DeepSpeed checkpoint to fp32 safetensors."""

from t5train.checkpoint.consolidate.consolidation import consolidate

__all__ = ["consolidate"]

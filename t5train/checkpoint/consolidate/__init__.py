"""Convert a DeepSpeed checkpoint to fp32 safetensors: open it, plan what to read from which file, and write tensors.

``layouts`` detects the layout. Each layout reads the module's weights and the optimizer's masters by its own rules:
``module_states``, ``zero012``, ``zero3``, ``experts``, ``expert_masters`` and ``pipeline``. Not here: resharding for a
run (``t5train.checkpoint.reshard``).
"""

from t5train.checkpoint.consolidate.consolidation import consolidate

__all__ = ["consolidate"]

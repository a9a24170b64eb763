"""Imports and computes what each trial, and each Python that it starts, would otherwise have to do itself."""

from importlib import import_module

from deepspeed.accelerator import get_accelerator
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from t5train.records.identity import current_provenance

_IMPORTED = [
    *("deepspeed", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"),
    *("transformers.models.t5.modeling_t5", "transformers.models.t5.tokenization_t5", "transformers.models.mt5"),
    *("transformers.generation",),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "safetensors.torch"),
    *(
        "t5train.train.loop",
        "t5train.checkpoint.resume",
        "t5train.checkpoint.consolidate",
        "t5train.release.export",
        "t5train.inference.evaluation.certifier",
    ),
    *(
        "t5train.release.publication",
        "t5train.records.stage_records",
        "fsspec.implementations.local",
        "flows.cli.operate.removal_commands",
    ),
    *("infra.head.storage.garbage_collection", "infra.head.storage.run_storage", "infra.head.storage.checkpoint_sync"),
]

for module in _IMPORTED:
    import_module(module)
current_provenance()
get_checkpoint_conversion_mapping("t5")  # compiles a thousand patterns
get_accelerator().create_op_builder("ShareMemCommBuilder").load()

"""RunSpec to DeepSpeed's configuration."""

from typing import Any

from t5train.spec import LayoutSpec, RunSpec

BUCKET_ELEMENTS = 50_000_000
_PARTITIONED = {
    "sub_group_size": 100_000_000,  # elements the optimizer moves at a time, and so what it holds beside them
    "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    "stage3_param_persistence_threshold": 10_000,  # norms and position biases stay whole
}


def deepspeed_config(spec: RunSpec) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``; pure, so that it can be shown and kept in golden files."""
    return {
        "train_batch_size": spec.optimizer.global_batch_sequences,
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch_sequences,
        "gradient_accumulation_steps": spec.gradient_accumulation,
        "gradient_clipping": spec.optimizer.gradient_clip,
        "zero_optimization": _zero(spec.layout),
        # The optimizer is ours, in host memory too: it must know which elements of a flat partition are which tensor's.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(spec),
        # The tag is agreed on by all ranks before it is used.
        "checkpoint": {"tag_validation": "Fail"},
        "steps_per_print": 1 << 60,
    }


def _zero(layout: LayoutSpec) -> dict[str, Any]:
    host_memory = {"device": "cpu", "pin_memory": layout.pin_memory}
    return {
        "stage": layout.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        **({"offload_optimizer": host_memory} if layout.offload != "none" else {}),
        **({"offload_param": host_memory} if layout.offload == "all" else {}),
        **(_PARTITIONED if layout.zero_stage == 3 else {}),
    }


def _precision(spec: RunSpec) -> dict[str, Any]:
    match spec.optimizer.precision:
        case "fp32":
            return {}
        case "bf16":
            return {"bf16": {"enabled": True}}
        case "fp16":
            return {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": spec.optimizer.initial_scale_power,
                    "loss_scale_window": 1000,
                    "hysteresis": 2,
                    "min_loss_scale": 1,
                }
            }

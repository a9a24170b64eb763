"""RunSpec to DeepSpeed's configuration."""

from typing import Any

from t5train.model.model_shape import RELATIVE_BUCKETS, T5Shape
from t5train.spec import LayoutSpec, RunSpec

BUCKET_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 100_000_000
LIVE_ELEMENTS = 3_000_000_000


def deepspeed_config(spec: RunSpec, shape: T5Shape, node_local: bool = False) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``; pure, so that it can be shown and kept in golden files.

    ``node_local``: every node saves to a disk of its own.
    """
    return {
        "train_batch_size": spec.optimizer.global_batch_sequences,
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch_sequences,
        "gradient_accumulation_steps": spec.gradient_accumulation,
        "gradient_clipping": spec.optimizer.gradient_clip,
        "zero_optimization": _zero(spec.layout, shape),
        # The optimizer is ours, in host memory too: it must know which elements of a flat partition are which tensor's.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(spec),
        # At ZeRO 0 and 1 t5train.engine.gradient_accumulation does so: at ZeRO 1 DeepSpeed would take another optimizer
        # for it.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if spec.layout.zero_stage > 1 and sums_passes(spec) else {}),
        # The tag is agreed on by all ranks before it is used.
        "checkpoint": {"tag_validation": "Fail", **({"use_node_local_storage": True} if node_local else {})},
        "steps_per_print": 1 << 60,
    }


def sums_passes(spec: RunSpec) -> bool:
    """Whether a step adds up 16-bit gradients of several passes, which is done in fp32."""
    return spec.optimizer.precision != "fp32" and spec.gradient_accumulation > 1


def _zero(layout: LayoutSpec, shape: T5Shape) -> dict[str, Any]:
    host_memory = {"device": "cpu", "pin_memory": layout.pin_memory}
    return {
        "stage": layout.zero_stage,
        "contiguous_gradients": True,
        # At ZeRO 3 it is what fetches parameters while others are computed with.
        "overlap_comm": layout.zero_stage == 3,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        **({"offload_optimizer": host_memory} if layout.offload != "none" else {}),
        **({"offload_param": host_memory} if layout.offload == "all" else {}),
        **(_partitioned(shape) if layout.zero_stage == 3 else {}),
    }


def _partitioned(shape: T5Shape) -> dict[str, int]:
    """What is fetched, kept and moved at a time where parameters are cut up, in elements."""
    decoder_block = 8 * shape.d_model * shape.inner + (3 if shape.gated else 2) * shape.d_model * shape.d_ff
    return {
        # The optimizer holds a part of so many beside the masters, and starts anew at each.
        "sub_group_size": SUB_GROUP_ELEMENTS,
        # One block ahead: it is fetched while the one before is computed with.
        "stage3_prefetch_bucket_size": decoder_block,
        # Norms and position biases stay whole: too small to be worth fetching.
        "stage3_param_persistence_threshold": max(shape.d_model, RELATIVE_BUCKETS * shape.num_heads),
        # 6 GB in 16 bits. Less would leave the accelerator empty and fetch the same parameters again; more would have
        # the whole of T5-11B come back on it.
        "stage3_max_live_parameters": LIVE_ELEMENTS,
        "stage3_max_reuse_distance": LIVE_ELEMENTS,
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

"""Converts a RunSpec to DeepSpeed's configuration."""

from typing import Any

from t5train.model.model_shape import RELATIVE_BUCKETS, T5Shape
from t5train.spec import LayoutSpec, RunSpec

BUCKET_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 100_000_000
LIVE_ELEMENTS = 3_000_000_000


def deepspeed_config(spec: RunSpec, shape: T5Shape, node_local: bool = False) -> dict[str, Any]:
    """Return the configuration for ``deepspeed.initialize``. A pure function, so that golden files can hold the result.

    ``node_local``: every node saves checkpoints to its own disk.
    """
    return {
        "train_batch_size": spec.optimizer.global_batch_sequences,
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch_sequences,
        "gradient_accumulation_steps": spec.gradient_accumulation,
        "gradient_clipping": spec.optimizer.gradient_clip,
        "zero_optimization": _zero(spec.layout, shape),
        # We pass our own optimizer, also for host memory: it must know which tensor each element of a flat partition is
        # from.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(spec),
        # Sum gradients in fp32. At ZeRO 0 and 1, t5train.engine.gradient_accumulation does this, because at ZeRO 1
        # DeepSpeed would use another optimizer for it.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if spec.layout.zero_stage > 1 and sums_passes(spec) else {}),
        # All ranks agree on the tag before it is used.
        "checkpoint": {"tag_validation": "Fail", **({"use_node_local_storage": True} if node_local else {})},
        "steps_per_print": 1 << 60,
        # It would wait for the accelerator twice per step.
        "timers": {"throughput": {"enabled": False}},
    }


def sums_passes(spec: RunSpec) -> bool:
    """Return whether a step sums 16-bit gradients of several passes. They must be summed in fp32."""
    return spec.optimizer.precision != "fp32" and spec.gradient_accumulation > 1


def decoder_block_elements(shape: T5Shape) -> int:
    """Return the elements of the matrices of a decoder block, the largest kind of block of a dense model."""
    return 8 * shape.d_model * shape.inner + (3 if shape.gated else 2) * shape.d_model * shape.d_ff


def _zero(layout: LayoutSpec, shape: T5Shape) -> dict[str, Any]:
    host_memory = {"device": "cpu", "pin_memory": layout.pin_memory}
    return {
        "stage": layout.zero_stage,
        "contiguous_gradients": True,
        # At ZeRO 3 this prefetches parameters while others are in use.
        "overlap_comm": layout.zero_stage == 3,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        **({"offload_optimizer": host_memory} if layout.offload != "none" else {}),
        **({"offload_param": host_memory} if layout.offload == "all" else {}),
        **(_partitioned(shape) if layout.zero_stage == 3 else {}),
    }


def _partitioned(shape: T5Shape) -> dict[str, Any]:
    """Settings for ZeRO 3, which partitions parameters: how many elements to fetch, keep and update at a time."""
    return {
        # The optimizer updates sub-groups of this size one by one, with temporary memory for one of them.
        "sub_group_size": SUB_GROUP_ELEMENTS,
        # One block ahead: it is fetched while the previous one is in use.
        "stage3_prefetch_bucket_size": decoder_block_elements(shape),
        # Norms and position biases are not partitioned: they are too small to be worth fetching.
        "stage3_param_persistence_threshold": max(shape.d_model, RELATIVE_BUCKETS * shape.num_heads),
        # 6 GB in 16 bits. With less, accelerator memory would stay unused and the same parameters would be fetched
        # again; with more, all of T5-11B would end up on the accelerator.
        "stage3_max_live_parameters": LIVE_ELEMENTS,
        "stage3_max_reuse_distance": LIVE_ELEMENTS,
        # DeepSpeed's own linear layer does not keep views of weights, which it would free. Those of blocks stay valid
        # (t5train.engine.gathered_blocks), and torch's layer is faster.
        "memory_efficient_linear": False,
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

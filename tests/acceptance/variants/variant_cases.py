"""A table of the variants to measure: their sizes, and their numbers of accelerators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATE = {"optimizer.peak_learning_rate": 0.01}
# A measurement needs only one checkpoint, at the end, and a short validation.
BRIEF = {"storage.checkpoint_every_steps": 1_000_000, "storage.validate_sequences": 64, "storage.keep_last": 1}
# Gradients that overflow whatever the loss scale is.
PROVOKED = {
    "optimizer.peak_learning_rate": 1.0,
    "optimizer.gradient_clip": 0,
    "optimizer.initial_scale_power": 32,
    "optimizer.warmup_steps": 10,
}
# Small enough to try this program on two cores.
TINY: Mapping[str, Any] = {
    "model.preset": "smoke",
    "model.compile": False,
    "objective.input_tokens": 64,
    "optimizer.num_steps": 10,
    "optimizer.warmup_steps": 2,
    "optimizer.global_batch_sequences": 16,
    "layout.micro_batch_sequences": 2,
    "cluster.accelerator": "cpu",
}
TINY_PROVOKED_STEPS = 60
CLEAR_ERRORS = ("TooManySkippedSteps", "NonFiniteLoss")


@dataclass(frozen=True)
class Case:
    """One run: a recipe and the settings that it changes."""

    name: str
    recipe: str
    ranks: int
    precision: str
    steps: int
    batch: tuple[int, int]
    """Sequences per step of all ranks, and per pass of one rank."""
    seconds: int
    """Approximate seconds on H200s, from the start of training to the certificate."""
    peer: tuple[str, float] | None = None
    """Another program that was measured on the same number of H200s at this size, and its tokens/s."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    must_fail: bool = False
    """Whether it must end with one of CLEAR_ERRORS."""
    host_gigabytes: int = 0
    """Host memory that it needs, in GB."""
    disk_gigabytes: int = 5
    """Disk space for its checkpoint and weights, in GB."""

    def all_settings(self, *, tiny: bool) -> dict[str, Any]:
        """Every ``part.key`` to set. With ``tiny``, the case keeps its recipe, ranks, layout and precision."""
        total, micro = self.batch
        return {
            **RATE,
            **BRIEF,
            "optimizer.num_steps": self.steps,
            "optimizer.warmup_steps": self.steps // 4,
            "optimizer.global_batch_sequences": total,
            "optimizer.precision": self.precision,
            "layout.micro_batch_sequences": micro,
            "cluster.ranks": self.ranks,
            **self.settings,
            **(TINY if tiny else {}),
            **({"optimizer.num_steps": TINY_PROVOKED_STEPS} if tiny and self.must_fail else {}),
        }


EAGER = {"model.compile": False}
SPREAD_OVER_2 = {**EAGER, "layout.expert_parallel_size": 2}

CASES = (
    Case(
        "moe-4", "moe", 4, "bf16", 200, (512, 128), 210, ("DeepSpeed MoE layer, not compiled", 565e3),
        {"layout.expert_parallel_size": 4}, disk_gigabytes=25,
    ),
    Case("pipeline-4", "pipeline", 4, "bf16", 200, (256, 16), 200, settings=EAGER),
    Case("zero3-4", "zero3", 4, "bf16", 200, (256, 64), 210, settings=EAGER),
    Case(
        "zero3_no_offload-4", "zero3", 4, "bf16", 200, (256, 64), 150,
        settings={**EAGER, "layout.offload": "none", "layout.pin_memory": False},
    ),
    Case("zero2_offload-4", "zero2_offload", 4, "bf16", 200, (256, 64), 140, settings=EAGER),
    Case("zero1_offload-4", "zero1_offload", 4, "bf16", 200, (256, 64), 150, settings=EAGER),
    Case("zero2-4", "base", 4, "bf16", 200, (512, 128), 150, ("DeepSpeed, Hugging Face T5, compiled", 1502e3)),
    Case("zero2-1", "base", 1, "bf16", 200, (128, 128), 210, ("Hugging Face Trainer and DeepSpeed", 181e3)),
    Case("large-1", "large", 1, "bf16", 50, (128, 64), 240, disk_gigabytes=18),
    Case("large-4", "large", 4, "bf16", 50, (256, 64), 240, disk_gigabytes=18),
    Case("t5_3b_on_gpu-1", "t5_3b", 1, "bf16", 20, (128, 16), 500, host_gigabytes=30, disk_gigabytes=63),
    # Four GPUs divide masters and moments, which leaves room for 32 sequences.
    Case("t5_3b_on_gpu-4", "t5_3b", 4, "bf16", 20, (128, 32), 500, host_gigabytes=30, disk_gigabytes=63),
    Case(
        "t5_3b-1", "t5_3b_one_gpu", 1, "bf16", 20, (128, 128), 620, ("DeepSpeed ZeRO 3, CPU optimizer", 4.3e3),
        host_gigabytes=75, disk_gigabytes=126,
    ),
    Case("t5_11b-1", "t5_11b_one_gpu", 1, "bf16", 5, (64, 64), 2400, host_gigabytes=290, disk_gigabytes=190),
    # Not measured yet: the seconds are a guess.
    Case("zero2-8", "base", 8, "bf16", 200, (1024, 128), 200),
    Case("large-8", "large", 8, "bf16", 50, (512, 64), 240, disk_gigabytes=18),
    Case("t5_3b_on_gpu-8", "t5_3b", 8, "bf16", 20, (256, 32), 500, host_gigabytes=30, disk_gigabytes=63),
    Case(
        "t5_3b_zero3-8", "t5_3b", 8, "bf16", 20, (128, 16), 500,
        settings={**EAGER, "layout.zero_stage": 3}, host_gigabytes=30, disk_gigabytes=63,
    ),
    Case(
        "moe-8", "moe", 8, "bf16", 200, (512, 64), 210,
        settings={"layout.expert_parallel_size": 8}, disk_gigabytes=25,
    ),
    Case("pipeline-8", "pipeline", 8, "bf16", 200, (512, 16), 200, settings={"layout.pipeline_stages": 4}),
    Case("zero2-fp16-2", "base", 2, "fp16", 50, (64, 32), 110, settings=EAGER),
    Case("moe-fp16-2", "moe", 2, "fp16", 50, (64, 32), 140, settings=SPREAD_OVER_2, disk_gigabytes=25),
    Case("pipeline-fp16-2", "pipeline", 2, "fp16", 50, (64, 16), 120, settings=EAGER),
    Case("zero3-fp16-2", "zero3", 2, "fp16", 50, (64, 32), 170, settings=EAGER),
    Case("zero2_offload-fp16-2", "zero2_offload", 2, "fp16", 50, (64, 32), 130, settings=EAGER),
    Case("zero1_offload-fp16-2", "zero1_offload", 2, "fp16", 50, (64, 32), 120, settings=EAGER),
    Case(
        "fp16-provoked", "small", 2, "fp16", 200, (64, 32), 50, settings={**EAGER, **PROVOKED}, must_fail=True
    ),
    Case(
        "moe-fp16-provoked", "moe", 2, "fp16", 200, (64, 32), 50,
        settings={**SPREAD_OVER_2, **PROVOKED, "model.preset": "small"}, must_fail=True,
    ),
)  # fmt: skip

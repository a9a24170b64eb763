"""Settings of the optimizer, and of how the model is laid out over ranks."""

from typing import Literal

from pydantic import Field

from t5train.spec.overrides import SpecPart, check


class OptimizerSpec(SpecPart):
    """How weights are updated, and in which precision."""

    kind: Literal["adamw-rms", "adamw"] = Field(
        "adamw-rms",
        title="Kind",
        description="adamw-rms: AdamW with each tensor's step relative to its RMS, which T5 needs. adamw: plain AdamW",
    )
    peak_learning_rate: float = Field(
        0.01,
        gt=0,
        le=1,
        title="Peak rate",
        description="Learning rate after the warm-up; with adamw-rms relative to the RMS of each tensor",
    )
    warmup_steps: int = Field(
        1000,
        ge=0,
        title="Warm-up steps",
        description="Steps in which the learning rate rises linearly; fewer than num_steps",
    )
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = Field(
        "cosine", title="Schedule", description="Learning rate after the warm-up"
    )
    final_learning_rate: float = Field(
        1e-5, ge=0, le=1, title="Final rate", description="Learning rate at the end of the cosine; not above the peak"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1,
        title="Weight decay",
        description="Decoupled weight decay; norms and position biases are exempt",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        title="Betas",
        description="Decay rates of Adam's first and second moment",
    )
    epsilon: float = Field(1e-8, gt=0, title="Epsilon", description="Adam's epsilon, added to the denominator")
    gradient_clip: float = Field(
        1.0,
        ge=0,
        title="Gradient clip",
        description="Norm to which larger gradients are scaled down. 0: no clipping",
    )
    global_batch_sequences: int = Field(
        128,
        ge=1,
        title="Global batch",
        description="Sequences per optimizer step over all ranks; a multiple of layout.micro_batch_sequences x "
        "cluster.ranks / layout.pipeline_stages",
    )
    num_steps: int = Field(65536, ge=1, title="Steps", description="Optimizer steps of the whole run")
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        title="Seed",
        description="Decides initial weights, and the order and masked spans of samples",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16",
        title="Precision",
        description="Arithmetic of training; masters and moments are always fp32. fp16 needs a GPU or a CPU with "
        "AVX512-FP16, and ZeRO 1 to 3",
    )
    initial_scale_power: int = Field(
        16,
        ge=0,
        le=32,
        title="fp16 scale",
        description="First loss scale of fp16, as a power of two",
    )

    @check
    def _schedule_is_possible(self) -> None:
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.warmup_steps}: it must be below optimizer.num_steps "
                f"({self.num_steps}). Set both, for instance optimizer.warmup_steps={self.num_steps // 10}"
            )
        if self.final_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"optimizer.final_learning_rate is {self.final_learning_rate}: it must not exceed "
                f"optimizer.peak_learning_rate ({self.peak_learning_rate})"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}: both must be at least 0 and below 1")


class LayoutSpec(SpecPart):
    """How the state of training is spread over ranks."""

    execution = frozenset(
        {"zero_stage", "offload", "pin_memory", "pipeline_stages", "expert_parallel_size", "micro_batch_sequences"}
    )

    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        title="ZeRO stage",
        description="What DeepSpeed's ZeRO partitions over ranks. 0: nothing; 1: optimizer state; 2: gradients, "
        "too; 3: parameters, too",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        title="Offload",
        description="What is kept in host memory. optimizer: masters and moments (ZeRO 1 to 3); all: parameters, "
        "too (ZeRO 3)",
    )
    pin_memory: bool = Field(
        False,
        title="Pin memory",
        description="Offload to page-locked memory, which is faster to copy",
    )
    pipeline_stages: int = Field(
        1,
        ge=1,
        title="Pipeline stages",
        description="Ranks that the layers of each model are spread over; must divide cluster.ranks. 1: no "
        "pipeline; more need ZeRO 1",
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        title="Expert parallelism",
        description="Ranks that the experts of a layer are spread over; must divide model.moe.num_experts and "
        "cluster.ranks",
    )
    micro_batch_sequences: int = Field(
        8,
        ge=1,
        title="Micro-batch",
        description="Sequences per rank and pass; larger ones are faster, and take more memory",
    )

    @check
    def _only_what_is_cut_up_is_offloaded(self) -> None:
        if self.zero_stage < {"none": 0, "optimizer": 1, "all": 3}[self.offload]:
            raise ValueError(
                f"layout.offload is {self.offload!r} and layout.zero_stage {self.zero_stage}: 'optimizer' needs ZeRO 1 "
                "or more, 'all' needs ZeRO 3"
            )

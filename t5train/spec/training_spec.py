"""Settings of training: objective, optimizer, adapters, what is evaluated, and the layout of the model over ranks."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from t5train.spec.settings import SpecPart, check, nearest

MIXING = ("mixing_temperature", "mixing_limit", "mixing_weights")
"""The settings of ``objective`` and ``pairs`` that count for mixtures only."""
LOSS_TERMS = ("label_smoothing", "z_loss")
"""The settings of ``optimizer`` that add to the cross-entropy in the loss of fine-tuning."""


MixingTemperature = Annotated[float, Field(ge=1, le=1000)]
MixingLimit = Annotated[int, Field(ge=1)] | None
MixingWeights = tuple[Annotated[float, Field(gt=0, le=1e9, description="positive numbers")], ...] | None


class MixingSpec(SpecPart):
    """How much of each part of a mixture is trained on. Each kind of mixture describes the settings in its words."""

    part: ClassVar[str]
    """The name of the part of a RunSpec, as errors show it."""

    if TYPE_CHECKING:  # a kind of mixture declares them at their place among its settings
        mixing_temperature: MixingTemperature
        mixing_limit: MixingLimit
        mixing_weights: MixingWeights

    @field_validator("mixing_weights", mode="before", check_fields=False)
    @classmethod
    def _weights_may_be_one_text(cls, given: Any) -> Any:
        return [each.strip() for each in given.split(",")] if isinstance(given, str) else given

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. Those of mixtures count only where they are set."""
        default = type(self).model_fields
        unset = [name for name in MIXING if getattr(self, name) == default[name].default]
        return {name: value for name, value in super().identity().items() if name not in unset}

    def require_mixture(self, count: int, kind: str, more: str, named: str) -> None:
        """Raise ValueError if rates are set for a single text or task, or if not each of ``count`` has a weight."""
        chosen = [f"{self.part}.{name}" for name in MIXING if name in self.identity()]
        if count == 1 and chosen:
            raise ValueError(
                f"{chosen[0]} is set, but there is one {kind}: name more {more}, or leave {' and '.join(chosen)} out"
            )
        if self.mixing_weights is not None and len(self.mixing_weights) != count:
            raise ValueError(
                f"{self.part}.mixing_weights has {len(self.mixing_weights)} numbers, but there are {count} {kind}s "
                f"({named}): give one for each"
            )

    @check
    def _rates_are_decided_once(self) -> None:
        others = {"mixing_temperature": self.mixing_temperature, "mixing_limit": self.mixing_limit}
        given = [f"{self.part}.{name} is {value}" for name, value in others.items() if value not in (None, 1)]
        if self.mixing_weights is not None and given:
            weights = ",".join(f"{weight:g}" for weight in self.mixing_weights)
            raise ValueError(
                f"{self.part}.mixing_weights is {weights}, but {' and '.join(given)}: weights are the rates "
                "themselves, so leave the others out, or the weights"
            )


class ObjectiveSpec(MixingSpec):
    """T5 span corruption (Raffel et al. 2020, section 3.1.4)."""

    part = "objective"

    noise_density: float = Field(0.15, gt=0, lt=0.5, description="Share of the tokens that are masked")
    mean_span_tokens: float = Field(3.0, ge=1, le=20, description="Mean length of a masked span, in tokens")
    input_tokens: int = Field(
        512,
        ge=16,
        le=16384,
        description="Length of the encoder's input in tokens, EOS included; the decoder's length follows from it",
    )
    mixing_temperature: MixingTemperature = Field(
        1.0,
        description="With corpus.mixed_with: texts are trained on in proportion to min(samples, "
        "mixing_limit)^(1/T). 1: by size; more: small texts more often. Not with mixing_weights",
    )
    mixing_limit: MixingLimit = Field(
        None,
        description="With corpus.mixed_with: largest number of samples that counts as the size of a text. null: no "
        "limit. Not with mixing_weights",
    )
    mixing_weights: MixingWeights = Field(
        None,
        description="With corpus.mixed_with: weights of corpus.source and of each text in mixed_with, such as "
        "0.7,0.3. Only their ratios count. null: by size",
    )


class OptimizerSpec(SpecPart):
    """How weights are updated, and in which precision."""

    kind: Literal["adamw-rms", "adamw"] = Field(
        "adamw-rms",
        description="adamw-rms: AdamW with each tensor's step relative to its RMS, which T5 needs. adamw: plain AdamW",
    )
    peak_learning_rate: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Learning rate after the warm-up; with adamw-rms relative to the RMS of each tensor",
    )
    warmup_steps: int = Field(
        1000,
        ge=0,
        description="Steps in which the learning rate rises linearly; fewer than num_steps",
    )
    schedule: Literal["inverse-sqrt", "cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate after the warm-up"
    )
    final_learning_rate: float = Field(
        1e-5, ge=0, le=1, description="Learning rate at the end of a cosine or linear schedule; not above the peak"
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1, description="Decoupled weight decay; norms and position biases are exempt"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay rates of Adam's first and second moment")
    epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon, added to the denominator")
    gradient_clip: float = Field(
        1.0,
        ge=0,
        description="Norm to which larger gradients are scaled down. 0: no clipping",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of a target token's probability that is spread over the vocabulary, in fine-tuning. 0: none",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight of the squared log of the softmax's denominator in the loss of fine-tuning. 0: none",
    )
    global_batch_sequences: int = Field(
        128,
        ge=1,
        description="Sequences per optimizer step over all ranks; a multiple of layout.micro_batch_sequences x "
        "cluster.ranks / layout.pipeline_stages",
    )
    num_steps: int = Field(65536, ge=1, description="Optimizer steps of the whole run")
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Decides initial weights, and the order and masked spans of samples",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16",
        description="Arithmetic of training; masters and moments are always fp32. fp16 needs a GPU or a CPU with "
        "AVX512-FP16, and ZeRO 1 to 3",
    )
    initial_scale_power: int = Field(16, ge=0, le=32, description="First loss scale of fp16, as a power of two")

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. The terms of the loss count only where they are set, as they are new."""
        unset = [name for name in LOSS_TERMS if not getattr(self, name)]
        return {name: value for name, value in super().identity().items() if name not in unset}

    @check
    def _schedule_is_possible(self) -> None:
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.warmup_steps}: it must be below optimizer.num_steps "
                f"({self.num_steps}). Set both, for instance optimizer.warmup_steps={self.num_steps // 10}"
            )
        if self.schedule in {"cosine", "linear"} and self.final_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"optimizer.final_learning_rate is {self.final_learning_rate}: it must not exceed "
                f"optimizer.peak_learning_rate ({self.peak_learning_rate})"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}: both must be at least 0 and below 1")


class LayoutSpec(SpecPart):
    """How the state of training is spread over ranks."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="What DeepSpeed's ZeRO partitions over ranks. 0: nothing; 1: optimizer state; 2: gradients, "
        "too; 3: parameters, too",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What is kept in host memory. optimizer: masters and moments (ZeRO 1 to 3); all: parameters, "
        "too (ZeRO 3)",
    )
    pin_memory: bool = Field(False, description="Offload to page-locked memory, which is faster to copy")
    pipeline_stages: int = Field(
        1,
        ge=1,
        description="Ranks that the layers of each model are spread over; must divide cluster.ranks. 1: no "
        "pipeline; more need ZeRO 1",
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks that the experts of a layer are spread over; must divide model.moe.num_experts and "
        "cluster.ranks",
    )
    micro_batch_sequences: int = Field(
        8, ge=1, description="Sequences per rank and pass; larger ones are faster, and take more memory"
    )

    @check
    def _only_what_is_cut_up_is_offloaded(self) -> None:
        if self.zero_stage < {"none": 0, "optimizer": 1, "all": 3}[self.offload]:
            raise ValueError(
                f"layout.offload is {self.offload!r} and layout.zero_stage {self.zero_stage}: 'optimizer' needs ZeRO 1 "
                "or more, 'all' needs ZeRO 3"
            )


LORA_TARGETS = ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo")
"""The projections of a T5 that can have adapters, as Hugging Face and PEFT name them."""
LoraTarget = Literal["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]


class LoraSpec(SpecPart):
    """LoRA: adapters of low rank are trained on pairs, and the start model stays as it is."""

    rank: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Rank of the adapters. Needs optimizer.kind=adamw, because one factor of each adapter starts at "
        "zero, and steps relative to its RMS would be tiny; a rate of 0.0003 is usual. null: no LoRA, all weights are "
        "trained",
    )
    alpha: float = Field(
        16.0, gt=0, le=1e6, description="The product of an adapter's factors is scaled by alpha / rank"
    )
    targets: tuple[LoraTarget, ...] = Field(
        ("q", "v"),
        min_length=1,
        description="Projections that have adapters, by their names in Hugging Face's T5. wi is of models with ReLU, "
        "wi_0 and wi_1 of those with gated GELU",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of an adapter's inputs that are dropped in training")

    @field_validator("targets", mode="before")
    @classmethod
    def _targets_are_projections(cls, given: Any) -> Any:
        names = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
        for name in names if isinstance(names, list | tuple) else ():
            if name not in LORA_TARGETS:
                raise ValueError(
                    f"finetune.lora.targets has {name!r}: name projections of a T5, which are "
                    f"{', '.join(LORA_TARGETS)}{nearest(str(name), list(LORA_TARGETS))}"
                )
            if names.count(name) > 1:
                raise ValueError(f"finetune.lora.targets has {name!r} more than once: name each projection once")
        return names

    @check
    def _settings_have_a_use(self) -> None:
        fields = type(self).model_fields
        given = [name for name in fields if getattr(self, name) != fields[name].default]
        if given and self.rank is None:
            raise ValueError(
                f"finetune.lora.{given[0]} is set, but finetune.lora.rank is not: set it, for instance to 16, or leave "
                f"finetune.lora.{given[0]} out"
            )

    @property
    def scaling(self) -> float:
        """What the product of an adapter's factors is multiplied by; 0 without LoRA."""
        return self.alpha / self.rank if self.rank else 0.0

    def identity(self) -> dict[str, Any]:
        """Return the identity settings; none without LoRA."""
        return super().identity() if self.rank else {}


class FinetuneSpec(SpecPart):
    """What fine-tuning on pairs trains."""

    lora: LoraSpec = LoraSpec()

    def identity(self) -> dict[str, Any]:
        """Return the identity settings; none if all weights are trained."""
        lora = self.lora.identity()
        return {"lora": lora} if lora else {}

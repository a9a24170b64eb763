"""Settings of LoRA: which adapters are trained in place of a model's own weights (Hu et al. 2021)."""

from typing import Any, Literal

from pydantic import Field, field_validator

from t5train.spec.settings import SpecPart, check, nearest

TARGETS = ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo")
"""The projections of a T5 that can have adapters, as Hugging Face and PEFT name them."""
Target = Literal["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]


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
    targets: tuple[Target, ...] = Field(
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
            if name not in TARGETS:
                raise ValueError(
                    f"finetune.lora.targets has {name!r}: name projections of a T5, which are "
                    f"{', '.join(TARGETS)}{nearest(str(name), list(TARGETS))}"
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

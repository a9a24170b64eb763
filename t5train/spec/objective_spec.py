"""Settings of the training objective: what is masked, and how much each text of a mixture is trained on."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from t5train.spec.overrides import SpecPart, check

MIXING = ("mixing_temperature", "mixing_limit", "mixing_weights")
"""The settings of ``objective`` that count for mixtures only."""


class ObjectiveSpec(SpecPart):
    """T5 span corruption (Raffel et al. 2020, section 3.1.4)."""

    noise_density: float = Field(
        0.15, gt=0, lt=0.5, title="Noise density", description="Share of the tokens that are masked"
    )
    mean_span_tokens: float = Field(
        3.0, ge=1, le=20, title="Mean span", description="Mean length of a masked span, in tokens"
    )
    input_tokens: int = Field(
        512,
        ge=16,
        le=16384,
        title="Input tokens",
        description="Length of the encoder's input in tokens, EOS included; the decoder's length follows from it",
    )
    mixing_temperature: float = Field(
        1.0,
        ge=1,
        le=1000,
        title="Mixing temperature",
        description="With corpus.mixed_with: texts are trained on in proportion to min(samples, "
        "mixing_limit)^(1/T). 1: by size; more: small texts more often. Not with mixing_weights",
    )
    mixing_limit: int | None = Field(
        None,
        ge=1,
        title="Mixing limit",
        description="With corpus.mixed_with: largest number of samples that counts as the size of a text. null: no "
        "limit. Not with mixing_weights",
    )
    mixing_weights: tuple[Annotated[float, Field(gt=0, le=1e9, description="positive numbers")], ...] | None = Field(
        None,
        title="Mixing weights",
        description="With corpus.mixed_with: weights of corpus.source and of each text in mixed_with, such as "
        "0.7,0.3. Only their ratios count. null: by size",
    )

    @field_validator("mixing_weights", mode="before")
    @classmethod
    def _weights_may_be_one_text(cls, given: Any) -> Any:
        return [each.strip() for each in given.split(",")] if isinstance(given, str) else given

    @check
    def _rates_are_decided_once(self) -> None:
        others = {"mixing_temperature": self.mixing_temperature, "mixing_limit": self.mixing_limit}
        given = [f"objective.{name} is {value}" for name, value in others.items() if value not in (None, 1)]
        if self.mixing_weights is not None and given:
            weights = ",".join(f"{weight:g}" for weight in self.mixing_weights)
            raise ValueError(
                f"objective.mixing_weights is {weights}, but {' and '.join(given)}: weights are the rates themselves, "
                "so leave the others out, or the weights"
            )

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. Those of mixtures count only where they are set, as they are new."""
        default = type(self).model_fields
        unset = [name for name in MIXING if getattr(self, name) == default[name].default]
        return {name: value for name, value in super().identity().items() if name not in unset}

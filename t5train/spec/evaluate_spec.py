"""Settings of evaluation: what a run's validations decide, and how held-out pairs are predicted after the export."""

from typing import Any, Literal

from pydantic import Field

from t5train.records.best_so_far import BestSoFar
from t5train.records.metrics import GENERATED
from t5train.spec.settings import SpecPart, check
from t5train.spec.storage_spec import HomePath

Metric = Literal[
    "validation_loss",
    "validation_token_accuracy",
    "validation_exact_match",
    "validation_bleu",
    "validation_chrf",
    "validation_rougeL",
    "validation_generated_exact_match",
]
_OF_GENERATED = ("best_pairs", "pause_share")
_DECODING = ("num_beams", "max_new_tokens", "length_penalty")
PREDICTION = ("max_pairs", *_DECODING)
"""The settings of predictions, which only runs on pairs make. They do not change the model."""


class EvaluateSpec(SpecPart):
    """Which checkpoint is the result of a run, when training stops early, and what the result is measured on."""

    execution = frozenset((*PREDICTION, "pause_share", "hostfile"))

    best_metric: Metric | None = Field(
        None,
        description="Metric of validations by which the best checkpoint is chosen, which is then the run's result; of "
        "equal ones it is the earlier. Every validation then also saves a checkpoint. Text has validation_loss only. "
        "The last four are scores of text that the model generates in a pause of training (evaluate.best_pairs). "
        "null: the last checkpoint is the result",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop training after so many validations in a row without a better evaluate.best_metric. null: "
        "train to the last step",
    )
    best_pairs: int = Field(
        100,
        ge=1,
        description="With an evaluate.best_metric of generated text, each validation predicts so many validation "
        "pairs, drawn from the whole split, as evaluate.num_beams, max_new_tokens and length_penalty say: these are "
        "then part of the run's identity, too. With storage.validate_every_steps, it bounds how long training pauses",
    )
    pause_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of training's time that these predictions may take. If they take more, a warning says how "
        "many pairs would not. All are made, as the best checkpoint would otherwise depend on how fast a machine is",
    )

    max_pairs: int = Field(
        1000,
        ge=0,
        description="After the export of a run on pairs, predict at most so many pairs of each of validation and test, "
        "in equal parts of the tasks, chosen by a hash of their source. 0: predict none",
    )
    num_beams: int = Field(1, ge=1, le=64, description="Beams of these predictions. 1: greedy")
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description="At most so many tokens for each of these predictions. null: a quarter more than the longest of "
        "their references has",
    )
    length_penalty: float = Field(
        1.0, description="With several beams: above 1, longer predictions are preferred; below 1, shorter ones"
    )

    hostfile: HomePath | None = Field(
        None,
        description="File of the hosts that predict these pairs, with a process for each slot; they need not be those "
        "that train. null: this machine predicts",
    )

    @check
    def _patience_has_a_metric(self) -> None:
        if self.patience is not None and self.best_metric is None:
            raise ValueError(
                f"evaluate.patience is {self.patience}, but evaluate.best_metric is not set: set it, for instance to "
                "validation_loss, or leave evaluate.patience out"
            )

    @check
    def _best_pairs_are_predicted(self) -> None:
        fields = type(self).model_fields
        given = [name for name in _OF_GENERATED if getattr(self, name) != fields[name].default]
        if given and not self.generates:
            raise ValueError(
                f"evaluate.{given[0]} is {getattr(self, given[0])}, but evaluate.best_metric is not a score of "
                f"generated text: set it, for instance to validation_chrf, or leave evaluate.{given[0]} out"
            )

    def identity(self) -> dict[str, Any]:
        """Return the identity settings: those that are set. How text is generated counts if it decides."""
        deciding = super().identity() | {name: getattr(self, name) for name in _DECODING}
        unused = () if self.generates else ("best_pairs", *_DECODING)
        return {name: value for name, value in deciding.items() if value is not None and name not in unused}

    @property
    def generates(self) -> bool:
        """Whether the best checkpoint is chosen by a score of generated text."""
        return self.best_metric in GENERATED

    @property
    def is_higher_better(self) -> bool:
        """Whether a larger value of the metric is better."""
        return self.best_metric != "validation_loss"

    def ends_training(self, best: BestSoFar) -> bool:
        """Whether training stops because the metric has not improved for too long."""
        return self.patience is not None and best.validations_since >= self.patience

"""Settings of what a run records for people to watch: metrics beside ``metrics.jsonl``, and profiler traces."""

import re
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from t5train.spec.settings import SpecPart


class MonitorSpec(SpecPart):
    """Where metrics go besides metrics.jsonl and TensorBoard's folder, which are always written."""

    csv: bool = Field(False, description="Also write the metrics to metrics.csv in the run's folder, for spreadsheets")
    wandb: bool = Field(False, description="Also write the metrics to Weights & Biases")
    wandb_mode: Literal["online", "offline"] = Field(
        "online",
        description="online: send metrics while training runs, with the API key in WANDB_API_KEY or ~/.netrc. "
        "offline: write them for `wandb sync`",
    )
    wandb_project: str = Field("t5-pretrain", description="Project of Weights & Biases that the run belongs to")

    @field_validator("wandb_project")
    @classmethod
    def _project_can_exist(cls, name: str) -> str:
        if not re.fullmatch(r"[^/\\#?%:\s]([^/\\#?%:\n]{0,126}[^/\\#?%:\s])?", name):
            raise ValueError(
                f"monitor.wandb_project is {name!r}: W&B takes 1 to 128 characters without / \\ # ? % : and without "
                "spaces at the ends. Choose another name, such as t5-pretrain"
            )
        return name


class Steps(NamedTuple):
    """A range of steps; both ends are included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


MOST_PROFILED_STEPS = 50
"""A trace of more steps takes gigabytes of memory until it is written."""


class ProfileSpec(SpecPart):
    """Which steps rank 0 records with PyTorch's profiler."""

    steps: str | None = Field(
        None,
        description="Steps of which to record a profiler trace: FIRST:LAST, both included, at most "
        f"{MOST_PROFILED_STEPS}. null: none",
    )

    @field_validator("steps")
    @classmethod
    def _steps_are_a_range(cls, text: str | None) -> str | None:
        if text is None:
            return None
        form = "write FIRST:LAST, both included, such as 10:13 for the four steps 10, 11, 12 and 13"
        if not re.fullmatch("[0-9]{1,9}:[0-9]{1,9}", text):
            raise ValueError(f"profile.steps is {text!r}, which is not a range of steps: {form}")
        first, last = map(int, text.split(":"))
        if first < 1:
            raise ValueError(f"profile.steps is {text!r}: the first step of a run is 1; set profile.steps=1:{last}")
        if last < first:
            raise ValueError(f"profile.steps is {text!r}: the last step must not be before the first one; {form}")
        if last - first >= MOST_PROFILED_STEPS:
            raise ValueError(
                f"profile.steps is {text!r}, which are {last - first + 1} steps: a trace may have at most "
                f"{MOST_PROFILED_STEPS}, because it is kept in memory until it is written. Set profile.steps={first}:"
                f"{first + MOST_PROFILED_STEPS - 1} or fewer"
            )
        return text

    @property
    def range(self) -> Steps | None:
        """The steps to record; None for none."""
        return None if self.steps is None else Steps(*map(int, self.steps.split(":")))

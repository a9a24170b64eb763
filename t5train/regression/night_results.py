"""What was measured in a night: results of each case, and findings. Written to the night's ``results.json``."""

import statistics
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t5train.errors import RegressionError
from t5train.files.atomic import write_json

RESULTS = "results.json"
CPU_DEVICE = "cpu"
Point = tuple[str, float]
"""A loss, such as ("loss of step 3", 4.56)."""


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Recorded):
    """A quantity that was measured several times in a night."""

    unit: Literal["peer", "bytes"]
    """``peer``: a multiple of what a step of the peer takes, measured just before and after."""
    minimum: float
    """The smallest relative growth that counts, however little repeats differ."""
    values: list[float] = Field(min_length=1)

    @property
    def median(self) -> float:
        """The night's value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The difference of the largest and the smallest repeat, relative to the median."""
        return (max(self.values) - min(self.values)) / self.median


class CaseResult(_Recorded):
    """What one case gave in a night."""

    case: str
    machine: dict[str, str]
    """Hardware and versions; see t5train.regression.baselines.machine_key."""
    settings: dict[str, Any]
    """Everything that its losses depend on, and the layout."""
    same_model: str | None
    device: str
    """DeepSpeed's name for the kind of device that ranks computed on."""
    curves: list[list[Point]]
    """The losses of each repeat, in the order of steps."""
    measured: dict[str, Measured]
    problems: list[str]
    """What failed regardless of any baseline: sentences without the case's name."""
    seconds: float


About = Literal["failure", "settings", "loss", "variants", "time", "memory"]


class Finding(_Recorded):
    """Something that got worse."""

    case: str
    about: About
    sentence: str


class Compared(_Recorded):
    """A measured quantity beside its baseline."""

    tonight: float
    baseline: float | None
    allowed: float
    """The relative growth that is allowed."""


class NightResult(_Recorded):
    """The content of ``results.json``."""

    schema_version: Literal[1] = 1
    night: str
    git_commit: str | None
    seconds: float
    results: list[CaseResult]
    compared: dict[str, dict[str, Compared]]
    """By case and quantity."""
    findings: list[Finding]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing got worse."""
        return not self.findings

    def write(self, folder: Path) -> None:
        """Write ``results.json``."""
        write_json(folder / RESULTS, self.model_dump(mode="json"))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the results of a night. Raises RegressionError if the night did not end, or its file is damaged."""
        path = folder / RESULTS
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise RegressionError(
                f"{path} does not exist: that night did not end. Choose another one with --night, or run a new one"
            ) from None
        except ValidationError as error:
            raise RegressionError(
                f"{path} is damaged or of another version ({error.errors()[0]['msg']}): choose another night"
            ) from error

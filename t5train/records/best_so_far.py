"""Which checkpoint of a run is the best so far, judged by a metric of its validations."""

import math
from typing import Self

from pydantic import BaseModel, ConfigDict


class BestSoFar(BaseModel):
    """The best of the validated steps so far, and how many validations there were since.

    Without a validation that gave a number, there is no best step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int | None = None
    value: float | None = None
    validations_since: int = 0

    def after(self, step: int, value: float | None, is_higher_better: bool) -> Self:
        """Return what is the best after one more validation. Of equal values the earlier is best, and NaN never is."""
        sign = 1 if is_higher_better else -1
        if value is None or math.isnan(value) or (self.value is not None and sign * value <= sign * self.value):
            return self.model_copy(update={"validations_since": self.validations_since + 1})
        return type(self)(step=step, value=value)

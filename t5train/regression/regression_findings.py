"""Compares a case with its baseline, and cases with each other. What got worse becomes a finding: one sentence.

A quantity may grow by ``allowed``: its minimum, or ``SPREADS`` times the spread of its repeats, in the baseline or
tonight, whichever is largest. Losses may change by ``allowed`` in either direction, because any change of a loss curve
shows that something else was computed.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from t5train.host_resources import format_bytes
from t5train.records.identity import differences
from t5train.regression.night_results import CPU_DEVICE, About, CaseResult, Compared, Finding, Measured, Point
from t5train.regression.regression_cases import AGREEMENT

SPREADS = 1.5
CPU_LOSS_TOLERANCE = 1e-5
"""Relative change of a loss that is allowed on the CPU, where the same code gives the same bits."""
ACCELERATOR_LOSS_TOLERANCE = 1e-2
STEP, STEP_CPU, HOST_MEMORY, ACCELERATOR_MEMORY = "step", "step, CPU", "host memory", "accelerator memory"
_SHOWN_CHANGES = 3


def compare(tonight: CaseResult, baseline: CaseResult | None) -> list[Finding]:
    """Return everything that got worse in a case; without a baseline, only what failed."""
    found = [Finding(case=tonight.case, about="failure", sentence=_of(tonight, each)) for each in tonight.problems]
    if baseline is None or not tonight.curves:
        return found
    if changed := differences(baseline.settings, tonight.settings):
        shown = "; ".join(changed[:_SHOWN_CHANGES]) + ("; ..." if len(changed) > _SHOWN_CHANGES else "")
        found.append(_finding(tonight, "settings", f"the settings are not the baseline's: {shown}"))
    return [*found, *_losses(tonight, baseline), *grown(tonight, baseline)]


def grown(tonight: CaseResult, baseline: CaseResult) -> list[Finding]:
    """Return the quantities that grew by more than is allowed."""
    return [
        _finding(tonight, "time" if measured.unit == "peer" else "memory", _growth(name, measured, against))
        for name, measured in tonight.measured.items()
        if (against := baseline.measured.get(name)) is not None and _is_worse(measured, against)
    ]


def compared(tonight: CaseResult, baseline: CaseResult | None) -> dict[str, Compared]:
    """Return every quantity beside its baseline."""
    found = {}
    for name, measured in tonight.measured.items():
        against = baseline.measured.get(name) if baseline else None
        allowed = allowed_growth(measured, against or measured)
        found[name] = Compared(tonight=measured.median, baseline=against and against.median, allowed=allowed)
    return found


def allowed_growth(tonight: Measured, baseline: Measured) -> float:
    """Return the relative growth that is allowed."""
    return max(tonight.minimum, SPREADS * tonight.spread, SPREADS * baseline.spread)


def disagreements(results: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield the cases whose loss curves differ from that of the first case that trains the same model."""
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.same_model is not None and result.curves:
            groups.setdefault(result.same_model, []).append(result)
    for group in groups.values():
        first = group[0]
        for other in group[1:]:
            if (worst := largest_change(other.curves[0], first.curves[0])) and worst.change > AGREEMENT:
                yield _finding(
                    other,
                    "variants",
                    f"the {worst.label} is {worst.value:.6f}, but {worst.before:.6f} in {first.case}, which trains the "
                    f"same model: they differ by {worst.change:.1e}; allowed {AGREEMENT:.0e}",
                )


class Change(NamedTuple):
    """A loss that changed."""

    label: str
    value: float
    before: float

    @property
    def change(self) -> float:
        """The relative difference; infinite if one of the losses is not a number."""
        change = abs(self.value / self.before - 1)
        return math.inf if math.isnan(change) else change


def largest_change(curve: Sequence[Point], before: Sequence[Point]) -> Change | None:
    """Return the loss that changed most, of those that both curves have; None if they have none in common."""
    return max(_changes(curve, before), key=lambda each: each.change, default=None)


def curve_spread(result: CaseResult) -> float:
    """Return the largest change of a loss between two repeats of a night."""
    changes = [largest_change(one, other) for one, other in pairwise(result.curves)]
    return max((each.change for each in changes if each is not None), default=0.0)


def _losses(tonight: CaseResult, baseline: CaseResult) -> Iterator[Finding]:
    """Yield a finding for the loss that changed most, and for losses that only one of the curves has."""
    least = CPU_LOSS_TOLERANCE if tonight.device == CPU_DEVICE else ACCELERATOR_LOSS_TOLERANCE
    allowed = max(least, SPREADS * curve_spread(tonight), SPREADS * curve_spread(baseline))
    curve, before = tonight.curves[0], baseline.curves[0]
    if missing := [label for label, _ in before if label not in dict(curve)]:
        yield _finding(tonight, "loss", f"the {missing[0]} is missing, and so are {len(missing) - 1} others")
    worst = largest_change(curve, before)
    if worst is None or not worst.change > allowed:
        return
    first = next(each for each in _changes(curve, before) if each.change > allowed)
    yield _finding(
        tonight,
        "loss",
        f"the {first.label} is {first.value:.6f}, but {first.before:.6f} in the baseline: they differ by "
        f"{first.change:.1e}, later losses by up to {worst.change:.1e}; allowed {allowed:.0e}",
    )


def _changes(curve: Sequence[Point], before: Sequence[Point]) -> list[Change]:
    known = dict(before)
    return [Change(label, value, known[label]) for label, value in curve if label in known]


def _is_worse(tonight: Measured, baseline: Measured) -> bool:
    return tonight.median > baseline.median * (1 + allowed_growth(tonight, baseline))


def _growth(name: str, tonight: Measured, baseline: Measured) -> str:
    growth = tonight.median / baseline.median - 1
    said, before = _value(name, tonight), _amount(baseline)
    return f"{said}, {growth:.0%} above the baseline's {before}; allowed {allowed_growth(tonight, baseline):.0%}"


def _value(name: str, measured: Measured) -> str:
    amount = _amount(measured)
    match name:
        case "step":
            return f"a step takes {amount} times the peer's"
        case "step, CPU":
            return f"a step takes {amount} times the CPU time of the peer's"
        case "host memory":
            return f"a rank's peak host memory is {amount}"
        case "accelerator memory":
            return f"a rank's peak memory on its accelerator is {amount}"
        case _:
            return f"{name} takes the CPU time of {amount} steps of the peer"


def _amount(measured: Measured) -> str:
    return f"{measured.median:.2f}" if measured.unit == "peer" else format_bytes(int(measured.median))


def _finding(result: CaseResult, about: About, sentence: str) -> Finding:
    return Finding(case=result.case, about=about, sentence=_of(result, sentence))


def _of(result: CaseResult, sentence: str) -> str:
    return f"{result.case}: {sentence}"

"""Compares a case with its baseline, and cases with each other. What got worse becomes a finding: one sentence.

A quantity may grow by ``allowed``: its minimum, or ``SPREADS`` times the spread of its repeats, in the baseline or
tonight, whichever is largest. Losses may change by ``allowed`` in either direction, because any change of a loss curve
shows that something else was computed. A quantity whose repeats would allow more than ``WIDEST`` is a finding of its
own: nothing was checked.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from t5train.quantities import format_bytes
from t5train.records.identity import differences
from t5train.regression.baselines import changed_versions
from t5train.regression.night_results import CPU_DEVICE, About, CaseResult, Compared, Finding, Measured, Point
from t5train.regression.regression_cases import AGREEMENT

SPREADS = 1.5
CPU_LOSS_TOLERANCE = 1e-5
"""Relative change of a loss that is allowed on the CPU, where the same code gives the same bits."""
VERSIONS_LOSS_TOLERANCE = 1e-3
"""The same if versions changed: another torch rounds otherwise, and every step adds to the difference."""
ACCELERATOR_LOSS_TOLERANCE = 1e-2
WIDEST = 1.0
"""A check that allows this growth or more, such as a doubled time, is worthless."""
WIDEST_LOSSES = 5e-2
"""The same for a relative change of a loss; a doubled learning rate changes the losses of ``smoke`` by 0.1."""
STEP, STEP_CPU, HOST_MEMORY, ACCELERATOR_MEMORY = "step", "step, CPU", "host memory", "accelerator memory"
SAVING, VALIDATION, PEER = "saving", "validation", "peer"
WALL = ", wall"
"""Ends the name of a stage's wall time; without it, the name is that of its CPU time."""
_SHOWN_CHANGES = 3


def compare(tonight: CaseResult, baseline: CaseResult | None) -> list[Finding]:
    """Return everything that got worse in a case; without a baseline, only what failed or varies too much."""
    found = [_finding(tonight, "failure", each) for each in tonight.problems]
    if baseline is None or not tonight.curves:
        return [*found, *unsteady(tonight)]
    if changed := differences(baseline.settings, tonight.settings):
        shown = "; ".join(changed[:_SHOWN_CHANGES]) + ("; ..." if len(changed) > _SHOWN_CHANGES else "")
        found.append(_finding(tonight, "settings", f"the settings are not the baseline's: {shown}"))
    worse = [*_losses(tonight, baseline), *grown(tonight, baseline)]
    if changed := changed_versions(baseline.machine, tonight.machine):
        worse = [each.model_copy(update={"sentence": f"{each.sentence} ({'; '.join(changed)})"}) for each in worse]
    return [*found, *worse, *_not_checked(tonight, baseline)]


def grown(tonight: CaseResult, baseline: CaseResult) -> Iterator[Finding]:
    """Yield the quantities that grew by more than is allowed."""
    for name, measured in tonight.measured.items():
        if (against := baseline.measured.get(name)) is None:
            continue
        growth, allowed = measured.median / against.median - 1, allowed_growth(measured, against)
        if growth > allowed:
            said = f"{_value(name, measured)}, {growth:.0%} above the baseline's {_text(measured, against.median)}"
            yield _finding(tonight, _about(measured), f"{said}; allowed {allowed:.0%}")


def _not_checked(tonight: CaseResult, baseline: CaseResult) -> Iterator[Finding]:
    """Yield the quantities that only the baseline has, and those that vary too much to be compared."""
    for name, measured in baseline.measured.items():
        if name not in tonight.measured:
            said = f"{name} is in the baseline, but was not measured, so it was not checked"
            yield _finding(tonight, _about(measured), said)
    yield from unsteady(tonight)
    for about, said in _varying(baseline):  # an earlier version may have recorded it
        advice = "Accept a night on a quiet machine (`regression accept`)"
        yield _finding(tonight, about, f"in the baseline, {said}. {advice}")


def unsteady(result: CaseResult) -> list[Finding]:
    """Return the quantities, and the losses, whose repeats differ so much that comparing them would be worthless."""
    return [
        _finding(result, about, f"{said}. Run the night again while the machine does nothing else")
        for about, said in _varying(result)
    ]


def _varying(result: CaseResult) -> Iterator[tuple[About, str]]:
    for name, measured in result.measured.items():
        if (allowed := SPREADS * measured.spread) >= WIDEST:
            low, high = _text(measured, min(measured.values)), _text(measured, max(measured.values))
            said = (
                f"{name} varies from {low} to {high} between repeats, so that growth by {allowed:.0%} would be allowed"
            )
            yield _about(measured), f"{said}; a check needs less than {WIDEST:.0%}"
    if (allowed := SPREADS * curve_spread(result)) >= WIDEST_LOSSES:
        said = f"losses vary between repeats, so that a change by {allowed:.0e} would be allowed"
        yield "loss", f"{said}; a check needs less than {WIDEST_LOSSES:.0e}"


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
    first: dict[str, CaseResult] = {}
    for result in results:
        if result.same_model is None or not result.curves:
            continue
        before = first.setdefault(result.same_model, result)
        if (worst := largest_change(result.curves[0], before.curves[0])) and worst.change > AGREEMENT:
            yield _finding(
                result,
                "variants",
                f"the {worst.label} is {worst.value:.6f}, but {worst.before:.6f} in {before.case}, which trains the "
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
    """Yield a finding for the losses that changed, and for losses that only the baseline has."""
    allowed = max(
        least_loss_change(tonight, baseline), SPREADS * curve_spread(tonight), SPREADS * curve_spread(baseline)
    )
    curve, before = tonight.curves[0], baseline.curves[0]
    if missing := [label for label, _ in before if label not in dict(curve)]:
        yield _finding(tonight, "loss", f"the {missing[0]} is missing, and so are {len(missing) - 1} others")
    if changed := [each for each in _changes(curve, before) if each.change > allowed]:
        first, worst = changed[0], max(each.change for each in changed)
        yield _finding(
            tonight,
            "loss",
            f"the {first.label} is {first.value:.6f}, but {first.before:.6f} in the baseline: they differ by "
            f"{first.change:.1e}, later losses by up to {worst:.1e}; allowed {allowed:.0e}",
        )


def least_loss_change(tonight: CaseResult, baseline: CaseResult) -> float:
    """Return the relative change of a loss that is always allowed: what the device and other versions may round."""
    if tonight.device != CPU_DEVICE:
        return ACCELERATOR_LOSS_TOLERANCE
    is_upgraded = bool(changed_versions(baseline.machine, tonight.machine))
    return VERSIONS_LOSS_TOLERANCE if is_upgraded else CPU_LOSS_TOLERANCE


def _changes(curve: Sequence[Point], before: Sequence[Point]) -> list[Change]:
    known = dict(before)
    return [Change(label, value, known[label]) for label, value in curve if label in known]


def _value(name: str, measured: Measured) -> str:
    amount = _text(measured, measured.median)
    of_peer = f"{amount} steps of the peer"
    waiting, computing = f"takes as long as {of_peer}", f"takes the CPU time of {of_peer}"
    sentences = {
        STEP: f"a step takes {amount} times the peer's",
        STEP_CPU: f"a step takes {amount} times the CPU time of the peer's",
        SAVING: f"saving a checkpoint {waiting}",
        VALIDATION: f"a validation {waiting}",
        PEER: f"a step of the peer, which uses no code of this project, takes the CPU time of {amount} hashes",
        HOST_MEMORY: f"a rank's peak host memory is {amount}",
        ACCELERATOR_MEMORY: f"a rank's peak memory on its accelerator is {amount}",
    }
    stage = name.removesuffix(WALL)
    return sentences.get(name, f"{stage} {computing if stage == name else waiting}")


def _text(measured: Measured, value: float) -> str:
    return f"{value:.2f}" if measured.unit == "peer" else format_bytes(int(value))


def _about(measured: Measured) -> About:
    return "time" if measured.unit == "peer" else "memory"


def _finding(result: CaseResult, about: About, sentence: str) -> Finding:
    return Finding(case=result.case, about=about, sentence=f"{result.case}: {sentence}")

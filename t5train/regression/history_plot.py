"""The picture of a night: the step time of each case over all nights, the baseline, the allowed band, and accepts."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from t5train.records.identity import fingerprint
from t5train.regression.baselines import Baseline
from t5train.regression.machine_key import same_hardware
from t5train.regression.night_history import Line
from t5train.regression.regression_findings import STEP, STEP_CPU

if TYPE_CHECKING:
    from t5train.regression.night_results import CaseResult

MAX_BYTES = 200_000
_SHOWN_NIGHTS, _LABELS = 90, 12
_COLOURS = {STEP_CPU: "tab:blue", STEP: "tab:orange"}


def history_png(results: "Sequence[CaseResult]", lines: Sequence[Line], accepted: Sequence[Baseline]) -> bytes:
    """Return a PNG with one plot for each of tonight's cases, of the nights on the same hardware.

    Nights with other versions are shown if a baseline with these versions was accepted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [result for result in results if result.measured]
    rows = max(1, len(shown))
    figure = Figure(figsize=(8, 2.2 * rows), dpi=80, layout="constrained")
    for axes, result in zip(figure.subplots(rows, squeeze=False)[:, 0], shown, strict=False):
        _draw(axes, result, lines, accepted)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw(axes: Any, result: "CaseResult", lines: Sequence[Line], accepted: Sequence[Baseline]) -> None:
    baselines = [
        each
        for each in accepted
        if each.result.case == result.case and same_hardware(each.result.machine, result.machine)
    ]
    machines = {fingerprint(each.machine) for each in (result, *(one.result for one in baselines))}
    own = [line for line in lines if line.case == result.case and line.machine in machines][-_SHOWN_NIGHTS:]
    for name, colour in _COLOURS.items():
        _draw_quantity(axes, name, colour, own)
    nights = [line.night for line in own]
    for baseline in baselines:
        axes.axvline(_position(nights, baseline.night), color="grey", linestyle=":", linewidth=1)
    axes.set_title(result.case, fontsize="medium")
    axes.set_ylabel("times the peer's step")
    labelled = range(0, len(nights), 1 + len(nights) // _LABELS)
    axes.set_xticks(labelled, [f"{nights[at][4:6]}-{nights[at][6:8]}" for at in labelled], fontsize="x-small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")


def _draw_quantity(axes: Any, name: str, colour: str, lines: Sequence[Line]) -> None:
    found = [(place, line.compared[name]) for place, line in enumerate(lines) if name in line.compared]
    axes.plot([at for at, _ in found], [one.tonight for _, one in found], "o-", color=colour, markersize=3, label=name)
    based = [(at, one.baseline, one.allowed) for at, one in found if one.baseline is not None]
    places, baselines = [at for at, _, _ in based], [before for _, before, _ in based]
    axes.plot(places, baselines, "--", color=colour, linewidth=1)
    axes.fill_between(
        places, baselines, [before * (1 + allowed) for _, before, allowed in based], color=colour, alpha=0.12
    )


def _position(nights: Sequence[str], night: str) -> float:
    """Return where a night is on the axis: its place, or before the first if it is older than all that are shown."""
    return float(sum(one < night for one in nights)) if nights and night >= nights[0] else -0.5

"""The results of a night for people: rows of a table, ``report.md``, and the picture of step times over nights."""

import io
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from t5train.quantities import format_bytes, quantity
from t5train.records.identity import fingerprint
from t5train.regression.baselines import Baseline, same_hardware
from t5train.regression.night_folders import HistoryLine
from t5train.regression.night_results import CaseResult, Compared, Measured, NightResult
from t5train.regression.regression_findings import PEER, STEP, STEP_CPU, WIDEST
from t5train.release.markdown import escaped, page, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT, PLOT = "report.md", "plot.png"
COLUMNS = ("case", "quantity", "tonight", "baseline", "change", "allowed", "verdict")
MAX_PLOT_BYTES = 200_000
_SHOWN_NIGHTS, _LABELS = 90, 12
_COLOURS = {STEP_CPU: "tab:blue", STEP: "tab:orange"}


def rows(result: NightResult) -> list[dict[str, str]]:
    """Return one row for each case and quantity, and one for each other finding."""
    return [
        dict(zip(COLUMNS, (each.case, *cells), strict=True))
        for each in result.results
        for cells in _cells(result, each)
    ]


def _cells(night: NightResult, result: CaseResult) -> Iterator[tuple[str, ...]]:
    empty = ("",) * 4
    others = [each for each in night.findings if each.case == result.case and each.about not in {"time", "memory"}]
    if not others:
        yield "losses, resume, certificate", *empty, "ok"
    for finding in others:
        yield finding.about, *empty, finding.sentence.removeprefix(f"{result.case}: ")
    for name, compared in night.compared[result.case].items():
        yield name, *_compared_cells(name, result.measured[name], compared)


def _compared_cells(name: str, measured: Measured, compared: Compared) -> tuple[str, str, str, str, str]:
    is_worthless = compared.allowed >= WIDEST
    tonight = _amount(name, measured, compared.tonight)
    if compared.baseline is None:
        return tonight, "", "", "", "varies too much" if is_worthless else "no baseline"
    growth = compared.tonight / compared.baseline - 1
    verdict = "worse" if growth > compared.allowed else "varies too much" if is_worthless else "ok"
    return tonight, _amount(name, measured, compared.baseline), f"{growth:+.0%}", f"{compared.allowed:+.0%}", verdict


def _amount(name: str, measured: Measured, value: float) -> str:
    if measured.unit != "peer":
        return format_bytes(int(value))
    return f"{value:.2f} x {'hash' if name == PEER else 'peer'}"


def headline(result: NightResult) -> str:
    """Return the night's outcome as one sentence: the first finding if there are any."""
    if result.findings:
        return result.findings[0].sentence
    new = [case for case, every in result.compared.items() if all(each.baseline is None for each in every.values())]
    except_for = f"; compared with nothing, because there was no baseline: {', '.join(new)}" if new else ""
    return f"{quantity(len(result.results), 'case')}, nothing got worse{except_for}"


def markdown(result: NightResult) -> str:
    """Return the whole report."""
    machines = (
        f"- {each.case}: " + ", ".join(f"{name} {escaped(value)}" for name, value in each.machine.items())
        for each in result.results
    )
    return page(
        f"# Regression, night {result.night}",
        f"Commit {result.git_commit or 'unknown'}, {result.seconds:.0f} s.",
        "\n".join(f"- {escaped(finding.sentence)}" for finding in result.findings) or "Nothing got worse.",
        "\n".join(f"- {escaped(note)}" for note in result.notes),
        table(COLUMNS, ([escaped(cell) for cell in row.values()] for row in rows(result))),
        "\n".join(machines),
        f"![Step times over nights]({PLOT})",
    )


def history_png(results: Sequence[CaseResult], history: Sequence[HistoryLine], accepted: Sequence[Baseline]) -> bytes:
    """Return a PNG with one plot for each of tonight's cases, of the nights on the same hardware.

    A plot shows the step time of each night, the baseline, the allowed band, and when a baseline was accepted. Nights
    with other versions are shown if a baseline with these versions was accepted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [result for result in results if result.measured]
    figure = Figure(figsize=(8, 2.2 * max(1, len(shown))), dpi=80, layout="constrained")
    for axes, result in zip(figure.subplots(max(1, len(shown)), squeeze=False)[:, 0], shown, strict=False):
        own = [one for one in accepted if one.result.case == result.case]
        _draw(axes, result, history, [one for one in own if same_hardware(one.result.machine, result.machine)])
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw(axes: "Axes", result: CaseResult, history: Sequence[HistoryLine], baselines: Sequence[Baseline]) -> None:
    machines = {fingerprint(each.machine) for each in (result, *(one.result for one in baselines))}
    own = [line for line in history if line.case == result.case and line.machine in machines][-_SHOWN_NIGHTS:]
    for name, colour in _COLOURS.items():
        _draw_quantity(axes, name, colour, own)
    nights = [line.night for line in own]
    for baseline in baselines:
        # A night that is older than all that are shown stands before the first.
        at = bisect_left(nights, baseline.night) if nights and baseline.night >= nights[0] else -0.5
        axes.axvline(at, color="grey", linestyle=":", linewidth=1)
    axes.set_title(result.case, fontsize="medium")
    axes.set_ylabel("times the peer's step")
    labelled = range(0, len(nights), 1 + len(nights) // _LABELS)
    axes.set_xticks(labelled, [f"{nights[at][4:6]}-{nights[at][6:8]}" for at in labelled], fontsize="x-small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")


def _draw_quantity(axes: "Axes", name: str, colour: str, lines: Sequence[HistoryLine]) -> None:
    found = [(at, line.compared[name]) for at, line in enumerate(lines) if name in line.compared]
    axes.plot([at for at, _ in found], [one.tonight for _, one in found], "o-", color=colour, markersize=3, label=name)
    based = [(at, one.baseline, one.baseline * (1 + one.allowed)) for at, one in found if one.baseline is not None]
    places, baselines, highest = zip(*based, strict=True) if based else ((), (), ())
    axes.plot(places, baselines, "--", color=colour, linewidth=1)
    axes.fill_between(places, baselines, highest, color=colour, alpha=0.12)

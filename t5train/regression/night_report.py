"""The results of a night as text: rows of a table, and ``report.md``."""

from collections.abc import Iterator

from t5train.quantities import format_bytes, quantity
from t5train.regression.night_results import CaseResult, Compared, Measured, NightResult
from t5train.regression.regression_findings import PEER, WIDEST
from t5train.release.markdown import escaped, page, table

REPORT, PLOT = "report.md", "plot.png"
COLUMNS = ("case", "quantity", "tonight", "baseline", "change", "allowed", "verdict")


def rows(result: NightResult) -> list[dict[str, str]]:
    """Return one row for each case and quantity, and one for each other finding."""
    return [row for each in result.results for row in _rows_of(result, each)]


def _rows_of(night: NightResult, result: CaseResult) -> Iterator[dict[str, str]]:
    others = [each for each in night.findings if each.case == result.case and each.about not in {"time", "memory"}]
    if not others:
        yield _row(result.case, "losses, resume, certificate", verdict="ok")
    for finding in others:
        yield _row(result.case, finding.about, verdict=finding.sentence.removeprefix(f"{result.case}: "))
    for name, compared in night.compared[result.case].items():
        yield _compared_row(result.case, name, result.measured[name], compared)


def _compared_row(case: str, name: str, measured: Measured, compared: Compared) -> dict[str, str]:
    is_worthless = compared.allowed >= WIDEST
    if compared.baseline is None:
        verdict = "varies too much" if is_worthless else "no baseline"
        return _row(case, name, _amount(name, measured, compared.tonight), verdict=verdict)
    growth = compared.tonight / compared.baseline - 1
    return _row(
        case,
        name,
        _amount(name, measured, compared.tonight),
        baseline=_amount(name, measured, compared.baseline),
        change=f"{growth:+.0%}",
        allowed=f"{compared.allowed:+.0%}",
        verdict="worse" if growth > compared.allowed else "varies too much" if is_worthless else "ok",
    )


def _row(case: str, quantity: str, tonight: str = "", **cells: str) -> dict[str, str]:
    return {
        "case": case,
        "quantity": quantity,
        "tonight": tonight,
        **{name: cells.get(name, "") for name in COLUMNS[3:]},
    }


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
    findings = [f"- {escaped(finding.sentence)}" for finding in result.findings] or ["Nothing got worse."]
    return page(
        f"# Regression, night {result.night}",
        f"Commit {result.git_commit or 'unknown'}, {result.seconds:.0f} s.",
        "\n".join(findings),
        "\n".join(f"- {escaped(note)}" for note in result.notes),
        table(COLUMNS, ([escaped(row[name]) for name in COLUMNS] for row in rows(result))),
        "\n".join(_machines(result)),
        f"![Step times over nights]({PLOT})",
    )


def _machines(result: NightResult) -> Iterator[str]:
    for each in result.results:
        yield f"- {each.case}: " + ", ".join(f"{name} {escaped(value)}" for name, value in each.machine.items())

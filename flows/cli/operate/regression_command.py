"""``regression``: runs a night without Prefect, shows the last one, and accepts its results as the new baseline."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import HostfileOption, RootOption, root_of
from flows.cli.terminal import complain, say, show_table, stage_display
from infra.head.regression.night_run import begin_night
from t5train.errors import RegressionUsage
from t5train.files.os_errors import as_storage_errors
from t5train.regression.baselines import require_reason
from t5train.regression.night_folders import MAX_NIGHTS, RegressionFolder
from t5train.regression.night_report import COLUMNS, REPORT, rows
from t5train.regression.night_results import CaseResult, NightResult
from t5train.regression.regression_findings import unsteady

NightOption = Annotated[
    str | None, typer.Option("--night", metavar="NAME", help="Night's folder name", show_default="the newest")
]
CaseOption = Annotated[
    list[str] | None, typer.Option("--case", metavar="CASE", help="Case; can be repeated", show_default="all")
]


@as_storage_errors()
def run(
    cases: CaseOption = None,
    root: RootOption = None,
    hostfile: HostfileOption = None,
    keep_nights: Annotated[int, typer.Option(min=1, max=MAX_NIGHTS, help="Nights whose files are kept")] = 14,
) -> None:
    """Run a night, without Prefect. The exit code is 1 if something got worse."""
    places = root_of(root), cases, hostfile and hostfile.absolute(), keep_nights
    with begin_night(*places) as night, stage_display() as progress:
        data = night.make_data(progress)
        result = night.conclude([night.run_case(case, data, progress) for case in night.cases], progress)
    _show(night.folder, result)


def show(root: RootOption = None, night: NightOption = None) -> None:
    """Show the results of a night. The exit code is 1 if something got worse."""
    folder = RegressionFolder(root_of(root)).night(night)
    _show(folder, NightResult.read(folder))


@as_storage_errors()
def accept(
    why: Annotated[str, typer.Option(metavar="TEXT", help="Reason, which is recorded")],
    root: RootOption = None,
    night: NightOption = None,
    cases: CaseOption = None,
) -> None:
    """Record the results of a night as the new baseline."""
    require_reason(why)
    regression = RegressionFolder(root_of(root))
    with regression.locked():
        folder = regression.night(night)
        result = NightResult.read(folder)
        known = [each.case for each in result.results]
        if unknown := set(cases or ()).difference(known):
            raise RegressionUsage(
                f"the night {folder.name} has no case {sorted(unknown)[0]!r}: its cases are {', '.join(known)}"
            )
        chosen = [each for each in result.results if cases is None or each.case in cases]
        refusals = {each.case: refusal for each in chosen if (refusal := _refusal(each))}
        for each in chosen:
            if each.case in refusals:
                complain(f"not accepted: {refusals[each.case]}")
                continue
            regression.baselines.accept(folder.name, each, why)
            say(f"accepted: {each.case} of {folder.name}")
    if refusals:
        raise typer.Exit(1)


def _refusal(result: CaseResult) -> str | None:
    """Return why a result cannot be a baseline: a stage failed, or nothing could be compared with it."""
    failed = [f"{result.case}: {problem}" for problem in result.problems]
    return next(iter([*failed, *(finding.sentence for finding in unsteady(result))]), None)


def _show(folder: Path, result: NightResult) -> None:
    show_table(list(COLUMNS), [[row[name] for name in COLUMNS] for row in rows(result)])
    for note in result.notes:
        say(note)
    for finding in result.findings:
        say(finding.sentence)
    say(f"report: {folder / REPORT}")
    if not result.passed:
        raise typer.Exit(1)

"""One night of the regression, from an empty folder to written results. Start reading here.

Does not use Prefect: both the flow and the command line call it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from infra.head.hosts.code_shipping import reached_nodes
from infra.head.hosts.hostfile import chosen_hosts
from infra.head.hosts.nodes import Nodes
from infra.head.preflight.run_checks import require_absolute
from infra.head.regression.case_run import CaseRun
from infra.head.regression.case_stages import NightData, make_data
from infra.head.runs.run_removal import hosts_of_run, machines_of_run, plan_removal, removable_run, remove_run
from infra.head.runs.run_state import read_json
from t5train.errors import HostError, RegressionUsage, T5TrainError
from t5train.files.atomic import discard, remove_discarded, replacing, write_text
from t5train.files.presence import names_in, visible_in
from t5train.files.run_folder import RUN, RUNS, removing
from t5train.progress import Progress
from t5train.records.identity import current_provenance
from t5train.regression.baselines import FIRST, changed_versions
from t5train.regression.night_folders import MAX_NIGHTS, RegressionFolder
from t5train.regression.night_report import PLOT, REPORT, history_png, markdown
from t5train.regression.night_results import CaseResult, Finding, NightResult
from t5train.regression.regression_cases import RegressionCase, chosen_cases
from t5train.regression.regression_findings import (
    compare,
    compared,
    disagreements,
    grown,
    least_loss_change,
)
from t5train.spec import ClusterSpec, MachinesSpec

Connect = Callable[[MachinesSpec, Iterable[str]], AbstractContextManager[tuple[Nodes, Mapping[str, HostError]]]]
_log = logging.getLogger(__name__)


class Night:
    """A night that this process runs.

    Not a dataclass, because Prefect searches the fields of dataclasses that are passed to tasks.
    """

    def __init__(self, regression: RegressionFolder, cases: Sequence[RegressionCase], keep_nights: int) -> None:
        self.cases = list(cases)
        self.folder = regression.begin_night()
        self._regression, self._keep = regression, keep_nights
        self._started = time.monotonic()

    def make_data(self, progress: Progress) -> NightData:
        """Make text, vocabulary and shards again in the night's folder."""
        return make_data(self.cases[0].spec(self.folder, "data"), progress)

    def run_case(self, case: RegressionCase, data: NightData, progress: Progress) -> CaseResult:
        """Run a case, and once more if it seems slower than its baseline."""
        return CaseRun(case, self.folder, data, progress).measure(self._is_slower)

    def conclude(self, results: Sequence[CaseResult], progress: Progress) -> NightResult:
        """Compare, write results, report and plot, record first baselines, and remove old nights."""
        night = self._compared(results)
        self._regression.append_history(night)
        night.write(self.folder)
        write_text(self.folder / REPORT, markdown(night))
        with replacing(self.folder / PLOT) as file:
            file.write(history_png(results, self._regression.history(), self._regression.baselines.history()))
        remove_nights([each for each in self._regression.surplus_nights(self._keep) if each != self.folder], progress)
        return night

    def _compared(self, results: Sequence[CaseResult]) -> NightResult:
        findings, notes = list[Finding](), list[str]()
        before = {result.case: self._baseline(result) for result in results}
        for result in results:
            findings += compare(result, before[result.case])
        findings += disagreements(results)
        failed = {finding.case for finding in findings}
        for result in results:
            if (baseline := before[result.case]) is None:
                notes.append(self._begin(result, result.case in failed))
            else:
                notes += _notes(result, baseline)
        return NightResult(
            night=self.folder.name,
            git_commit=current_provenance().git_commit,
            seconds=time.monotonic() - self._started,
            results=list(results),
            compared={result.case: compared(result, before[result.case]) for result in results},
            findings=findings,
            notes=notes,
        )

    def _begin(self, result: CaseResult, has_failed: bool) -> str:
        """Record the first baseline of a case on this machine, unless the case failed; return a note about it."""
        if has_failed:
            return f"{result.case}: no baseline for this machine; none recorded, because of what was found"
        self._regression.baselines.accept(self.folder.name, result, FIRST)
        return f"{result.case}: no baseline for this machine: recorded"

    def _baseline(self, result: CaseResult) -> CaseResult | None:
        found = self._regression.baselines.newest(result.case, result.machine)
        return found.result if found else None

    def _is_slower(self, result: CaseResult) -> bool:
        baseline = self._baseline(result)
        return baseline is not None and any(finding.about == "time" for finding in grown(result, baseline))


@contextmanager
def begin_night(root: Path, names: Sequence[str] | None, hostfile: Path | None, keep_nights: int) -> Iterator[Night]:
    """Begin a night, and hold the lock of ``{root}/regression`` until the block ends.

    Raises SpecError or RegressionUsage before anything is created if an argument is not valid, RegressionRunning if
    another night is running, and RegressionError if a baseline is damaged.
    """
    require_absolute("root", root)
    if hostfile is not None:
        require_absolute("hostfile", hostfile)
    chosen = _chosen(names, hostfile)
    if not 1 <= keep_nights <= MAX_NIGHTS:
        raise RegressionUsage(f"keep_nights is {keep_nights}: it must be from 1 to {MAX_NIGHTS}")
    regression = RegressionFolder(root)
    with regression.locked():
        regression.baselines.history()  # a damaged one would end the night after its first case
        yield Night(regression, chosen, keep_nights)


def _notes(result: CaseResult, baseline: CaseResult) -> list[str]:
    """Return what a reader must know about the comparison: other versions, and what the baseline lacks."""
    notes = []
    if changed := changed_versions(baseline.machine, result.machine):
        allowed = least_loss_change(result, baseline)
        notes.append(
            f"{result.case}: compared with the baseline of other versions ({'; '.join(changed)}), so losses may differ "
            f"by {allowed:.0e}. If these versions are to stay, accept the night (`regression accept`)"
        )
    if new := [name for name in result.measured if name not in baseline.measured]:
        said = "not checked, because the baseline lacks them"
        notes.append(f"{result.case}: {said}: {', '.join(new)}. Accept the night (`regression accept`)")
    if lacking := [name for name in baseline.measured if name not in result.measured]:
        notes.append(f"{result.case}: not checked, because they were not measured: {', '.join(lacking)}")
    return notes


def _chosen(names: Sequence[str] | None, hostfile: Path | None) -> list[RegressionCase]:
    slots = 0 if hostfile is None else chosen_hosts(ClusterSpec(hostfile=hostfile)).num_ranks
    if not (chosen := chosen_cases(names, hostfile, slots)):
        raise RegressionUsage("no case was chosen: name at least one, or leave the names out to run all of them")
    return chosen


def remove_nights(nights: Iterable[Path], progress: Progress, connect: Connect = reached_nodes) -> None:
    """Remove the folders of nights, after what hosts have of their runs, finished or not.

    A night with a host that does not answer is kept and tried again the next night, because only its folder says what
    may be removed on that host. ``connect`` replaces ssh in tests.
    """
    old = list(nights)
    for number, night in enumerate(old, start=1):
        try:
            for run_name in list(_on_hosts(night)):
                _remove_run(night, run_name, connect)
            discard(night)
        except T5TrainError as error:
            _log.warning("kept the night %s, which is tried again the next night: %s", night, error)
        progress("old nights removed", number, len(old))
    if old:
        remove_discarded(old[0].parent)


def _on_hosts(night: Path) -> Iterator[str]:
    """Yield the names of the runs that used hosts, also of those whose removal was interrupted.

    Only these are read as this version reads them: other runs may have settings of an earlier version.
    """
    for folder in visible_in(night / RUNS):
        if read_json(folder / RUN).get("spec", {}).get("cluster", {}).get("hostfile") is not None:
            yield folder.name
    before, after = removing(Path("*")).name.split("*")
    for name in names_in(night / RUNS):
        if name.startswith(before) and name.endswith(after):
            yield name.removeprefix(before).removesuffix(after)


def _remove_run(night: Path, run_name: str, connect: Connect) -> None:
    """Remove a run here and on its hosts. Raises HostError if a host does not answer, RunLocked if it is in use."""
    run, folder = removable_run(night, run_name)
    machines = machines_of_run(folder, None)
    with connect(machines, hosts_of_run(folder, machines)) as (nodes, lacking):
        remove_run(plan_removal(run, folder, nodes, lacking, with_published=False), nodes)
    _log.info("%s: removed the run %s, also on %s", night.name, run_name, ", ".join(nodes.hosts))

"""A sample of `make io-faults`: no fault loses a checkpoint, selects a wrong one, or fails without naming its path."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from infra.node.attempts.shared_memory import SEGMENTS
from tests.acceptance.io_faults import campaign, outcome_table
from tests.acceptance.io_faults.operations import NAMES
from tests.acceptance.io_faults.small_run import ADDRESS
from tests.acceptance.io_faults.traced_calls import calls_below, strace
from tests.acceptance.io_faults.workers import Workers

pytestmark = pytest.mark.slow
_SEED, _TRIALS_PER_OPERATION = 1, 10


def test_no_sampled_fault_loses_data_selects_a_wrong_checkpoint_or_hides_its_path(
    workers: Workers, tmp_path: Path
) -> None:
    journal = campaign.Journal(tmp_path / "journal")
    trials = campaign.shuffled(campaign.plan_trials(workers, NAMES), _SEED, _TRIALS_PER_OPERATION)
    assert {trial.operation for trial in trials} == set(NAMES)
    for _ in campaign.run(workers, trials, journal):
        pass
    assert len(journal.outcomes) == _TRIALS_PER_OPERATION * len(NAMES)
    assert list(outcome_table.faults(journal.outcomes)) == []
    columns = Counter(outcome_table.column_of(each) for each in journal.outcomes.values())
    assert columns["failed, path named"] > len(trials) / 3, "too few injected faults made an operation fail"
    assert columns["not reached"] < len(trials) / 20
    assert not list(SEGMENTS.glob(f"deepspeed*_{ADDRESS}_*"))


@pytest.mark.parametrize("operation", ["save", "recover", "gc", "consolidate", "certify", "publish"])
def test_the_library_sees_every_call_that_strace_sees(workers: Workers, tmp_path: Path, operation: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace on this machine: apt-get install strace")
    worker, trace = workers.all[0], tmp_path / "trace"
    worker.ask("calls", operation)  # a warm-up, for what is done only once
    try:
        with strace(worker.pid, trace):
            calls = worker.ask("calls", operation)
    except PermissionError as error:
        pytest.skip(str(error))
    library = Counter((kind, path) for kind, path, _ in calls)
    kernel = calls_below(worker.folder / "trial", worker.folder / "region", trace)
    assert kernel["open", "root"] + kernel.total() > 100
    for kind, path in library.keys() | kernel.keys():
        # opendir and fdopendir also stat what they have opened, inside libc, where the library cannot see it.
        inside_libc = library["open", path] if kind == "stat" else 0
        seen, made = library[kind, path], kernel[kind, path]
        assert seen <= made <= seen + inside_libc, f"{kind} {path}: strace saw {made} calls, the library {seen}"

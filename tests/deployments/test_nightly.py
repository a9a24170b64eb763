"""Two nights of the regression: the first records the baseline, the second, run by a worker, finds a planted fault."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import NightResult
from tests.acceptance.planted_faults import environment_of
from tests.support.generated_text import write_jsonl
from tests.support.team_servers import BIN, Team, worker
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

CASE = "smoke"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """What the nights train on."""
    return write_jsonl(tmp_path / "text.jsonl", 1000)


@pytest.fixture
def root(tmp_path: Path, text: Path) -> Path:
    """A root with one clean night, which recorded its baseline."""
    command = [f"{BIN}/t5-pretrain", "regression", "run", "--root", str(tmp_path), "--case", CASE]
    subprocess.run(command, env=environment_of(None, tmp_path / "clean", small_text=text), cwd="/", check=True)
    return tmp_path


def test_a_night_finds_a_fault_in_resuming_and_equal_losses_everywhere_else(
    team: Team, root: Path, text: Path, tmp_path: Path
) -> None:
    folders = RegressionFolder(root)
    assert [baseline.result.case for baseline in folders.baselines.history()] == [CASE]
    planted = environment_of("lost-moments", tmp_path / "planted", small_text=text)
    with worker(team, PYTHONPATH=planted["PYTHONPATH"]):
        run = started(team, {"root": str(root), "cases": [CASE], "keep_nights": 1})
        await_that(lambda: team.run(run)["end_time"] is not None)
    [folder] = folders.nights()  # the clean night was removed, as one is kept
    night = NightResult.read(folder)
    failures = {finding.about: finding.sentence for finding in night.findings if finding.about != "time"}
    assert failures.keys() == {"failure"}, "the losses of the uninterrupted run are those of the baseline, bit for bit"
    assert "smoke: after resuming from step 30" in failures["failure"]
    assert "weight tensors" in failures["failure"]
    state = team.run(run)["state"]
    assert (state["type"], state["message"]) == ("FAILED", night.findings[0].sentence)
    artifacts = artifacts_of(team, run)
    of_stages = {"progress-regression-data", f"progress-regression-{CASE}"}
    assert artifacts.items() >= {("regression", "table"), ("regression-history", "image")}
    assert artifacts.keys() - {"regression", "regression-history"} >= of_stages
    await_that(lambda: events_of(team, run) == ["t5-pretrain.regression.failed"])  # stored a moment after the end
    assert failures["failure"] in (folder / "report.md").read_text("utf-8")


def started(team: Team, parameters: dict[str, Any]) -> str:
    """Type ``prefect deployment run t5-regression/nightly``, and return the run's id."""
    given = [part for name, value in parameters.items() for part in ("--param", f"{name}={json.dumps(value)}")]
    command = [f"{BIN}/prefect", "deployment", "run", "t5-regression/nightly", *given]
    subprocess.run(command, env=team.client, cwd="/", check=True, stdout=subprocess.DEVNULL)
    (run,) = team.ask("flow_runs/filter", {"flows": {"name": {"any_": ["t5-regression"]}}})
    return str(run["id"])


def artifacts_of(team: Team, run: str) -> dict[str, str]:
    found = team.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
    return {each["key"]: each["type"] for each in found}


def events_of(team: Team, run: str) -> list[str]:
    wanted = {"event": {"prefix": ["t5-pretrain"]}, "any_resource": {"id": [f"prefect.flow-run.{run}"]}}
    return [each["event"] for each in team.ask("events/filter", {"filter": wanted})["events"]]

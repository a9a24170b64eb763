"""Two nights of the regression: the first records the baseline, the second, in Prefect, finds a planted fault."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.regression import regression
from t5train.regression import regression_cases
from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import NightResult
from tests.acceptance.planted_faults import environment_of

ONCE = replace(regression_cases.CASES[0], repeats=1)
FLOW = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from flows.server.prefect_server import any_server
from t5train.progress import silent
from t5train.regression import regression_cases

regression_cases.CASES = (replace(regression_cases.CASES[0], repeats=1),)
root = Path(sys.argv[1])
with any_server(root, silent):
    from prefect.client.orchestration import get_client
    from flows.regression import regression

    state = regression(root=root, keep_nights=1, return_state=True)
    with get_client(sync_client=True) as client:
        artifacts = {each.key: each.type for each in client.read_artifacts()}
        wanted = {"filter": {"event": {"prefix": ["t5-pretrain"]}}}
        for _ in range(100):  # the server stores events a moment after they are emitted
            events = client.request("POST", "/events/filter", json=wanted).json()
            if events["events"]:
                break
            time.sleep(0.3)
print(json.dumps({
    "type": state.type,
    "message": state.message,
    "artifacts": artifacts,
    "events": [each["event"] for each in events["events"]],
}))
"""


@pytest.fixture
def root(tmp_path: Path, t5_pretrain: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one clean night, which recorded its baseline."""
    monkeypatch.setattr(regression_cases, "CASES", (ONCE,))
    assert t5_pretrain("regression", "run", "--root", str(tmp_path)) == 0
    return tmp_path


@pytest.mark.slow
def test_a_night_finds_a_fault_in_resuming_and_equal_losses_everywhere_else(root: Path, tmp_path: Path) -> None:
    folders = RegressionFolder(root)
    assert [baseline.result.case for baseline in folders.baselines.history()] == ["smoke"]
    seen = run_flow(root, environment_of("lost-moments", tmp_path / "planted"))
    [folder] = folders.nights()  # the clean night was removed, as one is kept
    night = NightResult.read(folder)
    failures = {finding.about: finding.sentence for finding in night.findings if finding.about != "time"}
    assert failures.keys() == {"failure"}, "the losses of the uninterrupted run are those of the baseline, bit for bit"
    assert "smoke: after resuming from step 30" in failures["failure"]
    assert "weight tensors" in failures["failure"]
    assert seen["type"] == "FAILED"
    assert seen["message"] == night.findings[0].sentence
    assert seen["artifacts"] == {"regression": "table", "regression-history": "image"} | progress_in(seen)
    assert seen["events"] == ["t5-pretrain.regression.failed"]
    assert failures["failure"] in (folder / "report.md").read_text("utf-8")


def test_every_parameter_is_described_in_the_form_of_prefect() -> None:
    properties = regression.parameters.properties
    assert properties.keys() == {"root", "cases", "hostfile", "keep_nights"}
    assert all(each.get("description") for each in properties.values())


def run_flow(root: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", FLOW, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def progress_in(seen: dict[str, Any]) -> dict[str, str]:
    return {key: kind for key, kind in seen["artifacts"].items() if kind == "progress"}

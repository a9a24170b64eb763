"""Runs that wait are checked before it is their turn."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.workers.abandoned import AWAITING
from t5train.spec.recipes import trial_settings
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]
Deployed = Callable[..., dict[str, dict[str, Any]]]
Deployments = dict[str, dict[str, Any]]

CHECKER = """
import json, sys
from datetime import timedelta
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from flows.workers import machine_check, waiting_runs
waiting_runs.SKIP_AFTER = timedelta(seconds=float(sys.argv[3]))
if sys.argv[4]:
    machine_check._PROGRAM, machine_check._SECONDS = ["-c", sys.argv[4]], 4.0
runs = waiting_runs.WaitingRuns("somebody@here")
for _ in sys.stdin:
    lines = runs.check()
    print(json.dumps([lines, runs._machine_check is not None]), flush=True)
"""
HANG = """
import sys, time
with open({path!r}, "a") as log:
    log.write(sys.stdin.read() + "\\n")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def deployments(deployed: Deployed) -> Deployments:
    """The deployments of the package, by name."""
    return deployed()


@contextmanager
def checker(
    server: tuple[Path, str], skip_after_seconds: float = 3600, program: str = ""
) -> Iterator[Callable[[], tuple[list[str], bool]]]:
    """Checks the waiting runs once per call. Returns the lines, and whether a check of the machine is not concluded.

    ``program`` replaces what checks the machine.
    """
    home, api_url = server
    command = [sys.executable, "-c", CHECKER, str(home), api_url, str(skip_after_seconds), program]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd="/", **pipes) as process:

        def check() -> tuple[list[str], bool]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            lines, is_checking = json.loads(process.stdout.readline())
            return lines, is_checking

        yield check


def check_to_the_end(check: Callable[[], tuple[list[str], bool]]) -> list[str]:
    """Check until this machine was checked for all waiting runs. Returns all lines."""
    all_lines = list[str]()

    def is_done() -> bool:
        lines, is_checking = check()
        all_lines.extend(lines)
        return not is_checking

    await_that(is_done)
    return all_lines


def set_state(server: tuple[Path, str], ask: Ask, run: str, **state: object) -> None:
    ask(server[0], f"{server[1]}/flow_runs/{run}/set_state", {"state": state, "force": True})


def test_waiting_runs_that_could_not_start_fail_with_the_reason_and_others_wait_on(
    server: tuple[Path, str], deployments: Deployments, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    home, api_url = server
    moe = deployments["moe"]["id"]
    asked = {
        "a contradiction": {"trial": True, "steps": 5},
        "no text": {},
        "no GPU": {"corpus": "pydocs"},
        "no file": {"corpus": "pydocs", "settings": trial_settings() | {"tokenizer.path": "/nowhere.model"}},
        "possible": {"corpus": "pydocs", "settings": trial_settings()},
    }
    runs = {}
    for name, parameters in asked.items():
        create = f"{api_url}/deployments/{moe}/create_flow_run"
        runs[ask(home, create, {"parameters": parameters, "name": name})["id"]] = name
    other, workers = "somebody@there", f"{api_url}/work_pools/t5-pretrain/workers"
    with checker(server) as check:
        ask(home, f"{workers}/heartbeat", {"name": other})
        assert len(check_to_the_end(check)) == 2, "the other machine may have GPU and file"
        ask(home, f"{workers}/{other}", {}, method="DELETE")
        assert len(check_to_the_end(check)) == 2
        refused = [run for run, name in runs.items() if name in ("no text", "no GPU")]
        for run in refused:
            set_state(server, ask, run, type="SCHEDULED", name="AwaitingRetry")
        assert len(check_to_the_end(check)) == 2, "who retries them learns it, too"
        (possible,) = [run for run, name in runs.items() if name == "possible"]
        due = ask(home, f"{api_url}/flow_runs/{possible}", {}, method="GET")["next_scheduled_start_time"]
        set_state(server, ask, possible, type="SCHEDULED", name="Late", state_details={"scheduled_time": due})
        assert check() == ([], False), "runs that were checked are not checked again"
    found = ask(home, f"{api_url}/flow_runs/filter", {"flow_runs": {"id": {"any_": list(runs)}}})
    states = {runs[each["id"]]: (each["state_type"], each["state"]["message"]) for each in found}
    titles = {runs[each["id"]]: each["name"] for each in found}
    assert states.pop("possible") == ("SCHEDULED", None)
    assert {state for state, _ in states.values()} == {"FAILED"}
    assert "optimizer.warmup_steps is 10" in states["a contradiction"][1]
    assert "t5-pretrain run moe --trial" in states["no text"][1]
    assert "has no GPU" in states["no GPU"][1]
    assert "tokenizer.path is /nowhere.model" in states["no file"][1]
    assert titles["no GPU"].startswith("moe: The run could not start: this machine has no GPU")
    reports = ask(home, f"{api_url}/artifacts/filter", {"artifacts": {"key": {"any_": ["failure"]}}})
    # Other tests of this process may have reported failures of other runs to the same server.
    assert {runs[each["flow_run_id"]] for each in reports if each["flow_run_id"] in runs} == states.keys()
    set_state(server, ask, possible, type="CANCELLED")


def test_a_check_of_the_machine_that_hangs_delays_nothing_and_is_given_up_after_three_tries(
    server: tuple[Path, str], deployments: Deployments, ask: Ask, tmp_path: Path
) -> None:
    home, api_url = server
    create = f"{api_url}/deployments/{deployments['moe']['id']}/create_flow_run"
    names, log = ("first", "second"), tmp_path / "log"
    asked = [{"corpus": "pydocs", "settings": trial_settings(), "run_name": name} for name in names]
    runs = [ask(home, create, {"parameters": parameters})["id"] for parameters in asked]
    with checker(server, program=HANG.format(path=str(log))) as check:
        assert check() == ([], True)
        ask(home, create, {"parameters": {"trial": True, "steps": 5}})
        (line,), is_checking = check()
        assert is_checking
        assert "optimizer.warmup_steps is 10" in line
        assert check_to_the_end(check) == []
    checked = [json.loads(line)["run_name"] for line in log.read_text().splitlines()]
    ours = [name for name in checked if name in names]  # others may be left by other tests
    assert ours == ours[:2] * 3
    assert set(ours) == set(names)
    for run in runs:
        assert ask(home, f"{api_url}/flow_runs/{run}", {}, method="GET")["state_type"] == "SCHEDULED"
        set_state(server, ask, run, type="CANCELLED")


def test_a_late_run_of_a_schedule_is_skipped_unless_it_has_started_before(
    server: tuple[Path, str], deployments: Deployments, ask: Ask
) -> None:
    home, api_url = server
    nightly = deployments["nightly"]
    of_schedule = {"deployments": {"id": {"any_": [nightly["id"]]}}}
    schedule = f"{api_url}/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
    ask(home, schedule, {"active": True, "schedule": {"interval": 5}}, method="PATCH")
    crashed = None
    try:
        with checker(server) as check:
            assert check()[0] == [], "none is an hour late"
        skipped = list[str]()
        deadline = time.monotonic() + 300  # ample: the scheduler looks every two seconds
        while not skipped:
            assert time.monotonic() < deadline, "no run was scheduled"
            if crashed is None and (scheduled := ask(home, f"{api_url}/flow_runs/filter", of_schedule)):
                crashed = min(scheduled, key=lambda run: run["expected_start_time"])["id"]
                set_state(server, ask, crashed, type="RUNNING")
                set_state(server, ask, crashed, type="SCHEDULED", name=AWAITING)
            if crashed:
                with checker(server, 0) as check:
                    skipped, _ = check()
    finally:
        ask(home, schedule, {"active": False}, method="PATCH")
    assert "of a schedule was due at" in skipped[0]
    assert ask(home, f"{api_url}/flow_runs/{crashed}", {}, method="GET")["state_name"] == AWAITING
    of_nightly = ask(home, f"{api_url}/flow_runs/filter", of_schedule)
    (state,) = {each["state_name"] for each in runs_in(of_nightly, "CANCELLED")}
    assert state == "Skipped"


def runs_in(runs: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [each for each in runs if each["state_type"] == state]

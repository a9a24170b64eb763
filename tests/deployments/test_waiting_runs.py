"""Runs that wait are checked before it is their turn."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.workers.abandoned import AWAITING
from t5train.spec.recipes import trial_settings

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]
Deployed = Callable[..., dict[str, dict[str, Any]]]

CHECK = """
import json, sys
from datetime import timedelta
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from flows.workers import waiting_runs
waiting_runs.SKIP_AFTER = timedelta(seconds=float(sys.argv[3]))
print(json.dumps(waiting_runs.WaitingRuns("somebody@here").check()))
"""


def check(server: tuple[Path, str], skip_after_seconds: float = 3600) -> list[str]:
    home, api_url = server
    command = [sys.executable, "-c", CHECK, str(home), api_url, str(skip_after_seconds)]
    lines: list[str] = json.loads(subprocess.run(command, cwd="/", stdout=subprocess.PIPE, check=True).stdout)
    return lines


def test_waiting_runs_that_could_not_start_fail_with_the_reason_and_others_wait_on(
    server: tuple[Path, str], deployed: Deployed, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    home, api_url = server
    moe = deployed()["moe"]["id"]
    asked = {
        "a contradiction": {"trial": True, "steps": 5},
        "no text": {},
        "no GPU": {"corpus": "pydocs"},
        "possible": {"corpus": "pydocs", "settings": trial_settings()},
    }
    runs = {}
    for name, parameters in asked.items():
        create = f"{api_url}/deployments/{moe}/create_flow_run"
        runs[ask(home, create, {"parameters": parameters, "name": name})["id"]] = name
    assert len(check(server)) == 3
    found = ask(home, f"{api_url}/flow_runs/filter", {"flow_runs": {"id": {"any_": list(runs)}}})
    states = {runs[each["id"]]: (each["state_type"], each["state"]["message"]) for each in found}
    titles = {runs[each["id"]]: each["name"] for each in found}
    assert states.pop("possible") == ("SCHEDULED", None)
    assert {state for state, _ in states.values()} == {"FAILED"}
    assert "optimizer.warmup_steps is 10" in states["a contradiction"][1]
    assert "t5-pretrain run moe --trial" in states["no text"][1]
    assert "has no GPU" in states["no GPU"][1]
    assert titles["no GPU"].startswith("moe: The run could not start: this machine has no GPU")
    reports = ask(home, f"{api_url}/artifacts/filter", {"artifacts": {"key": {"any_": ["failure"]}}})
    assert {runs[each["flow_run_id"]] for each in reports} == states.keys()


def test_a_late_run_of_a_schedule_is_skipped_unless_it_has_started_before(
    server: tuple[Path, str], deployed: Deployed, ask: Ask
) -> None:
    home, api_url = server
    nightly = deployed()["nightly"]
    of_schedule = {"deployments": {"id": {"any_": [nightly["id"]]}}}
    schedule = f"{api_url}/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
    ask(home, schedule, {"active": True, "schedule": {"interval": 5}}, method="PATCH")
    crashed = None
    try:
        assert check(server) == [], "none is an hour late"
        skipped = list[str]()
        deadline = time.monotonic() + 300  # ample: Prefect's scheduler looks once a minute
        while not skipped:
            assert time.monotonic() < deadline, "no run was scheduled"
            if crashed is None and (scheduled := ask(home, f"{api_url}/flow_runs/filter", of_schedule)):
                crashed = min(scheduled, key=lambda run: run["expected_start_time"])["id"]
                for state in ({"type": "RUNNING"}, {"type": "SCHEDULED", "name": AWAITING}):
                    ask(home, f"{api_url}/flow_runs/{crashed}/set_state", {"state": state, "force": True})
            skipped = check(server, 0) if crashed else []
    finally:
        ask(home, schedule, {"active": False}, method="PATCH")
    assert "of a schedule was due at" in skipped[0]
    assert ask(home, f"{api_url}/flow_runs/{crashed}", {}, method="GET")["state_name"] == AWAITING
    (state,) = {each["state_name"] for each in runs_in(ask(home, f"{api_url}/flow_runs/filter", {}), "CANCELLED")}
    assert state == "Skipped"


def runs_in(runs: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [each for each in runs if each["state_type"] == state]

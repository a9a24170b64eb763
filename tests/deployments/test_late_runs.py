"""Runs of a schedule that wait too long are skipped."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.workers.abandoned import AWAITING

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]
Deployed = Callable[..., dict[str, dict[str, Any]]]

SKIP = """
import json, sys
from datetime import timedelta
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from flows.workers import run_monitor
run_monitor.SKIP_AFTER = timedelta(seconds=float(sys.argv[3]))
print(json.dumps(run_monitor.RunMonitor("somebody@here").skip_late()))
"""


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
        assert skipped_after(server, 3600) == [], "none is an hour late"
        skipped = list[str]()
        deadline = time.monotonic() + 300  # ample: the scheduler looks every two seconds
        while not skipped:
            assert time.monotonic() < deadline, "no run was scheduled"
            if crashed is None and (scheduled := ask(home, f"{api_url}/flow_runs/filter", of_schedule)):
                crashed = min(scheduled, key=lambda run: run["expected_start_time"])["id"]
                for state in ({"type": "RUNNING"}, {"type": "SCHEDULED", "name": AWAITING}):
                    ask(home, f"{api_url}/flow_runs/{crashed}/set_state", {"state": state, "force": True})
            if crashed:
                skipped = skipped_after(server, 0)
    finally:
        ask(home, schedule, {"active": False}, method="PATCH")
    assert "of a schedule was due at" in skipped[0]
    assert ask(home, f"{api_url}/flow_runs/{crashed}", {}, method="GET")["state_name"] == AWAITING
    of_nightly = ask(home, f"{api_url}/flow_runs/filter", of_schedule)
    assert {each["state_name"] for each in of_nightly if each["state_type"] == "CANCELLED"} == {"Skipped"}


def skipped_after(server: tuple[Path, str], seconds: float) -> list[str]:
    """Skip the runs that have waited for so long. Returns the lines that say so."""
    command = [sys.executable, "-c", SKIP, str(server[0]), server[1], str(seconds)]
    lines: list[str] = json.loads(subprocess.check_output(command, cwd="/", text=True))
    return lines

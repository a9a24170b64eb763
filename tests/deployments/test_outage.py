"""A worker outlives its server: Prefect's own ends after minutes without one, and kills its runs."""

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.team_servers import Team
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "0.2"}
"""Prefect's worker counts failed requests, so the more often it asks, the sooner it ends: here after half a minute."""


def test_a_worker_outlives_a_server_that_is_away_or_refuses_its_key_and_then_takes_runs_one_by_one(
    tmp_path: Path,
) -> None:
    team = Team(tmp_path, None)
    with ExitStack() as stack:
        with team.running():
            team.call("deploy", "--root", str(tmp_path))
            command = [sys.executable, "-P", "-m", "flows.workers.worker", "t5-pretrain", "t5@gpu1"]
            worker = subprocess.Popen(command, env=team.client | QUICK, cwd="/", stderr=subprocess.PIPE, text=True)
            stack.callback(worker.kill)
            await_that(lambda: team.ask("work_pools/t5-pretrain/workers/filter", {}) != [])
        time.sleep(60)
        assert worker.poll() is None, "the server was away"
        key = team.home / "api-key"
        given = key.read_text()
        key.unlink()
        with team.running():
            assert key.read_text() != given
            time.sleep(10)
            assert worker.poll() is None, "the server refused its key"
        key.write_text(given)
        with team.running():
            queue = team.ask("work_queues/filter", {"work_queues": {"name": {"any_": ["training"]}}})[0]
            team.ask(f"work_queues/{queue['id']}", {"concurrency_limit": 2}, method="PATCH")
            wrong = {"recipe": "smoke", "root": str(tmp_path), "steps": 1}  # fewer steps than its warm-up
            runs = [team.start("SCHEDULED", parameters=wrong) for _ in range(2)]
            await_that(lambda: all(team.run(run)["state_type"] == "FAILED" for run in runs))
            first, second = sorted(map(team.run, runs), key=lambda run: run["start_time"])
            assert first["end_time"] <= second["start_time"], "one at a time, although the queue allows two"
    _, said = worker.communicate()
    reported = re.findall("runs go on without it|serves this worker again", said)
    # Once each; again if the server was busy, or if it ended before the worker was killed.
    assert len(reported) >= 2
    assert all(report != before for before, report in pairwise(["serves this worker again", *reported]))

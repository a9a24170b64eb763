"""A team's server on PostgreSQL, and its worker, as their systemd units start them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import psutil
import pytest

from flows.deployment.notifications import PREFIX, STATES, WEBHOOK_VARIABLE
from flows.server.team_server import DATABASE_VARIABLE
from infra.node import processes
from t5train.files.run_folder import LAST_COMPLETE, PUBLISHED, RUNS
from tasks.stages import CORPUS, SHARDS, TOKENIZER, TRAIN
from tests.support import paced_training, team_servers
from tests.support.generated_text import TINY, write_jsonl
from tests.support.team_servers import BIN, HIDDEN, UNITS, Team, environment, exec_start, worker
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

REPEAT = """
import asyncio
from flows.server.prefect_server import configured_api_url
configured_api_url()
from flows.deployment.notifications import notify, webhook_url

asyncio.run(notify(webhook_url()))
"""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Callable[[str], str]]:
    """The URL of a database of a private PostgreSQL, for a password."""
    with team_servers.postgresql() as url_with:
        yield url_with


@pytest.fixture(scope="module")
def team(postgresql: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A team's server that has been restarted after the deployments were created and the first runs were scheduled."""
    team = Team(tmp_path_factory.mktemp("team"), postgresql(HIDDEN))
    with team.running():
        team.call("deploy", "--root", str(team.root))
        (smoke,) = team.ask("deployments/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
        monthly = {"schedule": {"cron": "0 0 1 * *"}, "active": True}
        team.ask(f"deployments/{smoke['id']}/schedules", [monthly])
        await_that(lambda: bool(team.scheduled()))
        key = (team.home / "api-key").read_text()
    with team.running():
        assert (team.home / "api-key").read_text() == key
        team.scheduled_after_restart = team.scheduled()
        yield team


@pytest.mark.parametrize("unit", ["server", "worker"])
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        # Containers usually have no systemd, and only systemd reads the units; a stand-in for it would prove nothing.
        pytest.skip("no systemd-analyze to check the units with: apt-get install systemd")
    name = f"t5-pretrain-{unit}.service"
    (tmp_path / name).write_text((UNITS / name).read_text().replace("/opt/t5-pretrain/.venv/bin", BIN))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_restarted_server_has_its_deployments_and_scheduled_runs_in_postgresql(team: Team) -> None:
    assert {each["name"] for each in team.ask("deployments/filter", {})} >= {"smoke", "base"}
    assert {run["auto_scheduled"] for run in team.scheduled_after_restart} == {True}
    assert not list(team.home.glob("*.db"))


def test_the_databases_password_is_in_no_log_no_command_line_and_no_page(team: Team) -> None:
    forms = [HIDDEN, quote(HIDDEN, safe="")]
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    seen = [*map(" ".join, commands), (team.home / "server.log").read_text()]
    assert any(str(team.root) in each for each in seen)
    seen.append(team.get("admin/settings"))
    assert "connection_url" in seen[-1]
    assert [form for form in forms for each in seen if form in each] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda url: url.replace("word-of", "wrong"), "password authentication failed"),
        (lambda url: url.replace("/prefect", "/none"), "createdb"),
    ],
)
def test_a_database_that_refuses_ends_the_start(
    postgresql: Callable[[str], str], change: Callable[[str], str], reason: str, tmp_path: Path
) -> None:
    command = exec_start("server", **{"/var/lib/t5-pretrain-server": str(tmp_path)})
    settings = environment(**{DATABASE_VARIABLE: change(postgresql(HIDDEN))})
    result = subprocess.run(command, env=settings, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 8
    (line,) = result.stderr.splitlines()
    assert re.match(r"error: PostgreSQL at 127\.0\.0\.1, port \d+, database (prefect|none), user t5, cannot", line)
    assert reason in line
    assert "of-the-database" not in line
    assert not (tmp_path / "server").exists()


@contextmanager
def receiver() -> Iterator[tuple[str, list[str]]]:
    """A web server that keeps what is posted to it, and its URL."""
    posted = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hooks/hidden", posted
        finally:
            server.shutdown()
            thread.join()


def test_failed_crashed_and_late_runs_are_posted_once(team: Team) -> None:
    with receiver() as (url, posted):
        team.call("notifications", **{WEBHOOK_VARIABLE: url})
        program = [sys.executable, "-c", REPEAT]
        subprocess.run(program, env=team.client | {WEBHOOK_VARIABLE: url}, cwd="/", check=True)
        automations = team.ask("automations/filter", {})
        assert sorted(each["name"] for each in automations if each["name"].startswith(PREFIX)) == sorted(STATES)
        assert "hidden" not in json.dumps([automations, team.ask("block_documents/filter", {})])
        runs = {state: team.start("PENDING", name=f"is {state}") for state in ("FAILED", "CRASHED", "COMPLETED")}
        for state, run in runs.items():
            team.set_state(run, state, f'the "reason" of {state}')
        late = team.start("SCHEDULED", name="is late")
        await_that(lambda: len(posted) >= 3)
        team.set_state(late, "CANCELLED")
    assert sorted(posted) == [
        'run is CRASHED: Crashed. the "reason" of CRASHED',
        'run is FAILED: Failed. the "reason" of FAILED',
        "run is late: Late.",
    ]
    team.call("notifications", "--off")
    assert [each for each in team.ask("automations/filter", {}) if each["name"].startswith(PREFIX)] == []
    assert team.ask("block_documents/filter", {}) == []


def test_a_scheduled_run_continues_from_its_checkpoint_when_its_dead_machine_is_back_and_is_published(
    team: Team, tmp_path: Path
) -> None:
    (smoke,) = team.ask("deployments/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
    steps = {"optimizer.num_steps": 40, "storage.validate_every_steps": 40, "storage.checkpoint_every_steps": 5}
    steps |= {"optimizer.global_batch_sequences": 8, "layout.micro_batch_sequences": 8}
    settings = TINY | steps | {"cluster.ranks": 1, "corpus.source": str(write_jsonl(tmp_path / "text.jsonl", 400))}
    parameters = {"root": str(tmp_path), "run_name": "one", "settings": settings}
    # The rank sleeps in each step, so that the run still trains when it is killed, soon after its first checkpoint.
    with worker(team, **paced_training.environment_of(tmp_path / "paces")) as process:
        at = datetime.now(UTC) + timedelta(seconds=30)  # ample: the scheduler looks every two seconds
        when = {"interval": 86400, "anchor_date": at.isoformat()}
        schedule = {"schedule": when, "active": True, "parameters": parameters}
        (created,) = team.ask(f"deployments/{smoke['id']}/schedules", [schedule])
        is_ours = {"tags": {"all_": ["auto-scheduled"]}, "expected_start_time": {"before_": at.isoformat()}}
        ours = {"flow_runs": is_ours, "deployments": {"id": {"any_": [smoke["id"]]}}}
        checkpoint = tmp_path / RUNS / "one" / LAST_COMPLETE

        def states() -> list[str]:
            return [each["state_type"] for each in team.ask("flow_runs/filter", ours)]

        await_that(lambda: checkpoint.exists() or "FAILED" in states())
        (found,) = team.ask("flow_runs/filter", ours)
        run, flow = found["id"], int(found["infrastructure_pid"])
        # Prefect drops the fraction of the second that a run should still wait.
        assert datetime.fromisoformat(found["start_time"]) > at - timedelta(seconds=1)
        heartbeats = processes.variable(flow, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY")
        assert heartbeats == "30", "ten are missing before the automation marks a run as lost"
        children = processes.find(processes.child_of(process.pid))
        for pid in (process.pid, *children, flow):
            with suppress(ProcessLookupError):  # it has ended with the one before
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert team.run(run)["state_type"] == "RUNNING"
    with worker(team) as process:
        assert process.stdout is not None
        assert "run 'one' lost its worker" in process.stdout.readline()
        await_that(lambda: team.run(run)["state_type"] not in ("RUNNING", "PENDING", "SCHEDULED", "CRASHED"))
        children = processes.find(processes.child_of(process.pid))
    assert not children & processes.find(lambda pid: pid in children)
    found = team.run(run)
    assert (found["state_type"], found["run_count"]) == ("COMPLETED", 2)
    assert (tmp_path / RUNS / "one" / PUBLISHED).exists()
    is_its_table = {"key": {"any_": ["stages"]}, "flow_run_id": {"any_": [run]}}
    tables = team.ask("artifacts/filter", {"artifacts": is_its_table})
    stages = max((json.loads(table["data"]) for table in tables), key=len)  # that of the second attempt
    results = {row["stage"]: row["result"] for row in stages}
    assert [results[each.title] for each in (CORPUS, TOKENIZER, SHARDS, TRAIN)] == ["reused"] * 3 + ["made"]
    steps = [json.loads(line)["step"] for line in (tmp_path / RUNS / "one" / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(1) == 1
    team.ask(f"deployments/{smoke['id']}/schedules/{created['id']}", {}, method="DELETE")

"""A real Prefect server of the installed version: it starts, schedules, takes deployments, and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from flows.server.prefect_server import answers
from infra.node.ports import free_port
from tests.support import prefect_servers
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]
Deployed = Callable[..., dict[str, dict[str, Any]]]

NIGHTLY = """
import asyncio
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from flows.pretrain import pretrain

async def main():
    async with get_client() as client:
        schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="30 2 * * *"), active=True)
        await client.create_deployment(await client.create_flow(pretrain), "nightly", schedules=[schedule])

asyncio.run(main())
"""


CLOSE = """
import sys
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

import asyncio
from prefect.client.orchestration import get_client
from flows.workers.abandoned import close_killed_runs

async def closed():
    async with get_client() as client:
        return await close_killed_runs(client)

print(len(asyncio.run(closed())))
"""

RUN = """
import sys
from pathlib import Path
from flows.server import prefect_server
prefect_server.become_client(Path(sys.argv[1]), sys.argv[2])

from prefect import flow
from prefect.runtime import flow_run
from flows import pretrain
from flows.cli import run_command
from flows.run_parameters import RunParameters
from t5train.progress import silent

@flow(name="t5-pretrain")
def at_once(**parameters):
    print(flow_run.id)

pretrain.pretrain_flow = lambda *_: at_once
run_command._run_flow(None, RunParameters(recipe="smoke", root="/nowhere"), silent, False, fine_tuning=False)
prefect_server._flush()
"""

FAIL = """
from prefect import flow
from t5train.errors import InputError
from tasks.stages import FLOW_OPTIONS
from tasks.stages import CORPUS, stage_task

tries = []

@stage_task(CORPUS)
def fail():
    tries.append("task")
    raise InputError("no text")

@flow(name="fails", **FLOW_OPTIONS)
def fails():
    tries.append("flow")
    fail()

try:
    fails()
except InputError as error:
    print(*tries, error)
"""

TRIAL = """
import sys
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from flows.pretrain import pretrain
from t5train.errors import InputError

given = {"corpus": "/missing", "hostfile": "/hosts", "publish_under": "s3://bucket/t5", "deployed_settings": {
    "optimizer.seed": 7, "corpus.split": [900, 50, 50]}}
try:
    pretrain(recipe="moe", root=sys.argv[3], run_name="shown", trial=True, **given)
except InputError as error:
    print(error)
"""

STRANGER = """
import encodings.idna, os, sys, urllib.error, urllib.request
key_file, api_url, deployment, user = sys.argv[1:]
os.setgroups([])  # after the imports, as Python itself may be where only this user can read it
os.setgid(int(user))
os.setuid(int(user))
try:
    open(key_file).read()
except OSError as error:
    print(type(error).__name__)
create = f"{api_url}/deployments/{deployment}/create_flow_run"
guess = {"content-type": "application/json", "Prefect-Csrf-Token": "guess", "Prefect-Csrf-Client": "guess"}
for url, body, headers in [
    (f"{api_url}/csrf-token?client=guess", None, {}), (create, b"{}", {}), (create, b"{}", guess)
]:
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
NOBODY = "65534"


def status(url: str, *, method: str = "GET", **headers: str) -> int:
    """The HTTP status of the response to a request without a body."""
    request = Request(url, method=method, headers={name.replace("_", "-"): value for name, value in headers.items()})  # noqa: S310 - the server of this test
    try:
        with urlopen(request, timeout=30) as response:  # noqa: S310 - as above
            return int(response.status)
    except HTTPError as error:
        return error.code


def basic(key: str) -> str:
    return f"Basic {b64encode(key.encode()).decode()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_read_the_key_and_cannot_start_a_run(
    server: tuple[Path, str], deployed: Deployed, ask: Ask
) -> None:
    home, api_url = server
    smoke = deployed()["smoke"]
    create = f"{api_url}/deployments/{smoke['id']}/create_flow_run"
    command = [sys.executable, "-c", STRANGER, str(home / "api-key"), api_url, smoke["id"], NOBODY]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    # Without the key, a client gets no CSRF token. Without the token, the server rejects every change.
    assert result.stdout.split() == ["PermissionError", "401", "403", "403"], result.stderr
    assert ask(home, f"{api_url}/flow_runs/filter", {"deployments": {"id": {"any_": [smoke["id"]]}}}) == []
    assert ask(home, create, {})["deployment_id"] == smoke["id"]  # with the key it can be done


def test_without_the_key_a_server_answers_only_the_health_check(server: tuple[Path, str]) -> None:
    home, api_url = server
    key = (home / "api-key").read_text().strip()
    assert status(f"{api_url}/health") == 200
    for path in ("admin/version", "admin/settings", "csrf-token?client=me", "docs"):
        assert status(f"{api_url}/{path}") == 401
        assert status(f"{api_url}/{path}", Authorization=basic(key[:-1])) == 401
        assert status(f"{api_url}/{path}", Authorization=basic(key)) == 200


def test_a_change_requires_the_key_and_a_csrf_token(server: tuple[Path, str]) -> None:
    home, api_url = server
    key = (home / "api-key").read_text().strip()
    assert status(f"{api_url}/flow_runs/filter", method="POST", Authorization=basic(key)) == 403


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out"])
def test_a_websocket_needs_the_key(server: tuple[Path, str], path: str) -> None:
    home, api_url = server
    key = (home / "api-key").read_text().strip()
    for token, is_admitted in ((key[:-1], False), (key, True)):
        with connect(f"ws{api_url.removeprefix('http')}/{path}", subprotocols=[Subprotocol("prefect")]) as socket:
            socket.send(json.dumps({"type": "auth", "token": token}))
            if is_admitted:
                assert json.loads(socket.recv(30))["type"] == "auth_success"
            else:
                with pytest.raises(ConnectionClosed, match="1008"):
                    socket.recv(30)


def test_a_run_that_waits_for_others_is_not_late_within_seconds(server: tuple[Path, str], ask: Ask) -> None:
    home, api_url = server
    settings = ask(home, f"{api_url}/admin/settings", {}, method="GET")
    assert settings["server"]["services"]["late_runs"]["after_seconds"] == "PT10M"


def test_cors_requests_of_other_origins_are_refused(server: tuple[Path, str]) -> None:
    own = server[1].removesuffix("/api")
    preflight = {"method": "OPTIONS", "Access_Control_Request_Method": "POST"}
    assert status(f"{server[1]}/flow_runs/", **preflight, Origin=own) == 200
    for other in ("http://127.0.0.1:1", "http://localhost:4200", "null", own.replace("http", "https")):
        assert status(f"{server[1]}/flow_runs/", **preflight, Origin=other) == 400


def test_a_server_listens_on_loopback_alone(server: tuple[Path, str]) -> None:
    port = f"{int(server[1].split(':')[2].removesuffix('/api')):04X}"
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    listening = [fields[1] for fields in sockets if fields[1].endswith(f":{port}") and fields[3] == "0A"]
    assert listening == [f"0100007F:{port}"]


def test_a_run_whose_process_was_killed_is_closed_and_a_live_one_is_not(
    server: tuple[Path, str], ask: Ask, flow_process: Any
) -> None:
    home, api_url = server
    (doomed, killed), (_, living) = flow_process(home, api_url), flow_process(home, api_url)
    doomed.kill()
    doomed.wait()
    closing = subprocess.run([sys.executable, "-c", CLOSE, str(home), api_url], capture_output=True, check=True)
    found = ask(home, f"{api_url}/flow_runs/filter", {"flow_runs": {"id": {"any_": [killed, living]}}})
    assert closing.stdout == b"1\n"
    assert {run["id"]: run["state_type"] for run in found} == {killed: "CRASHED", living: "RUNNING"}


def test_a_run_of_the_terminal_sends_no_heartbeats_that_could_be_missed(server: tuple[Path, str], ask: Ask) -> None:
    home, api_url = server
    program = [sys.executable, "-c", RUN, str(home), api_url]
    run = subprocess.run(program, cwd="/", stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    of_run = {"filter": {"resource": {"id": [f"prefect.flow-run.{run}"]}}}

    def events() -> set[str]:
        return {each["event"] for each in ask(home, f"{api_url}/events/filter", of_run)["events"]}

    await_that(lambda: "prefect.flow-run.Completed" in events())
    assert "prefect.flow-run.heartbeat" not in events()


def test_a_cron_deployment_gets_a_scheduled_run(server: tuple[Path, str], ask: Ask) -> None:
    home, api_url = server
    environment = prefect_servers.client_environment(home, api_url)
    refused = subprocess.run(
        [sys.executable, "-c", NIGHTLY], env=environment, capture_output=True, text=True, check=False
    )
    assert "401 Unauthorized" in refused.stderr
    environment["PREFECT_API_AUTH_STRING"] = (home / "api-key").read_text().strip()
    subprocess.run([sys.executable, "-c", NIGHTLY], env=environment, check=True)
    query: dict[str, object] = {
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
        "deployments": {"name": {"any_": ["nightly"]}},
    }
    deadline = time.monotonic() + 300
    while not (runs := ask(home, f"{api_url}/flow_runs/filter", query)) and time.monotonic() < deadline:
        time.sleep(1)
    assert runs


def test_a_second_server_on_the_same_home_is_refused(server: tuple[Path, str]) -> None:
    command = [sys.executable, "-c", prefect_servers.SERVE, str(server[0]), str(free_port())]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert f"is in use by another Prefect server at {server[1]}: stop that one" in result.stderr


def test_modules_in_the_current_folder_do_not_shadow_those_of_the_server(server: tuple[Path, str]) -> None:
    home, api_url = server
    assert {path.stem for path in (home.parent / "current").glob("*.py")} == {"flows", "json", "uvicorn"}
    assert answers(api_url)


def test_a_server_ends_when_the_process_that_started_it_is_killed(
    tmp_path: Path, new_home: Callable[[Path], Path]
) -> None:
    process, api_url = prefect_servers.start(new_home(tmp_path / "prefect"), tmp_path)
    with process:
        assert answers(api_url)
        process.send_signal(signal.SIGKILL)
        process.wait()
        await_that(lambda: not answers(api_url))


def test_a_permanent_error_is_tried_once_whatever_the_users_settings_are(
    server: tuple[Path, str], tmp_path: Path
) -> None:
    home, api_url = server
    environment = prefect_servers.client_environment(home, api_url) | prefect_servers.HOSTILE
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_API_AUTH_STRING": (home / "api-key").read_text().strip()}
    command = [sys.executable, "-c", FAIL]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.split("\n") == ["flow task no text", ""], result.stderr
    assert not (tmp_path / "storage").exists()


def test_the_page_of_a_trial_shows_the_text_that_it_trains_on_and_not_what_it_does_not_use(
    server: tuple[Path, str], ask: Ask, tmp_path: Path
) -> None:
    home, api_url = server
    command = [sys.executable, "-c", TRIAL, str(home), api_url, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "/missing" in result.stdout, result.stderr
    of_trial = {"flow_runs": {"name": {"like_": "shown"}}}
    (found,) = ask(home, f"{api_url}/flow_runs/filter", of_trial)
    assert found["parameters"] == {
        "recipe": "moe",
        "root": str(tmp_path),
        "run_name": "shown",
        "trial": True,
        "adopt": False,
        "corpus": "/missing",
        "deployed_settings": {"corpus.split": [900, 50, 50]},
    }

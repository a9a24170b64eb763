"""A real Prefect server with the installed versions: it starts, schedules, takes deployments, and leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from flows.prefect_server import answers
from infra.ports import free_port
from t5train.recipes import RECIPES

pytestmark = pytest.mark.slow

SERVE = """
import sys
from pathlib import Path
from flows.prefect_server import own_server
from t5train.progress import silent

with own_server(Path(sys.argv[1]), int(sys.argv[2]), silent, lasting=True) as api_url:
    print(api_url, flush=True)
    sys.stdin.read()
"""

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


def client_environment(home: Path, api_url: str) -> dict[str, str]:
    return os.environ | {"PREFECT_HOME": str(home), "PREFECT_API_URL": api_url, "DO_NOT_TRACK": "1"}


def ask(url: str, query: dict[str, object]) -> list[dict[str, object]]:
    request = Request(url, json.dumps(query).encode(), {"content-type": "application/json"})  # noqa: S310 - the server of this test
    with urlopen(request, timeout=30) as response:  # noqa: S310 - the server of this test
        found: list[dict[str, object]] = json.load(response)
        return found


def start(home: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", SERVE, str(home), str(free_port())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    api_url = process.stdout.readline().strip()
    assert api_url, f"no server: {(home / 'server.log').read_text()}"
    return process, api_url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    home = tmp_path_factory.mktemp("prefect")
    process, api_url = start(home)
    with process:
        yield home, api_url
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert not answers(api_url)


def deployed(home: Path, api_url: str, root: Path) -> list[dict[str, object]]:
    command = [sys.executable, "-c", "from flows.cli import main; main()", "deploy", "--root", str(root)]
    result = subprocess.run(
        command, cwd=root, env=client_environment(home, api_url), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = ask(f"{api_url}/deployments/filter", {})
    moving = {"updated", "last_polled", "status"}
    for deployment in found:
        for schedule in deployment["schedules"]:  # type: ignore[attr-defined]  # plain JSON
            schedule.pop("updated")
    return [{key: value for key, value in each.items() if key not in moving} for each in found]


def test_deploying_twice_gives_the_same_deployments(server: tuple[Path, str], tmp_path: Path) -> None:
    home, api_url = server
    first = deployed(home, api_url, tmp_path)
    assert {each["name"] for each in first} == set(RECIPES)
    assert deployed(home, api_url, tmp_path) == first
    pool, *others = ask(f"{api_url}/work_pools/filter", {})
    assert (pool["name"], others) == ("t5-pretrain", [])
    assert "false" in json.dumps(pool["base_job_template"]["variables"]["properties"]["stream_output"])  # type: ignore[index]  # plain JSON
    queues = {each["name"]: each["concurrency_limit"] for each in ask(f"{api_url}/work_queues/filter", {})}
    assert queues["training"] == 1


def test_a_deployment_holds_no_folder_of_who_deployed_but_the_root(server: tuple[Path, str], tmp_path: Path) -> None:
    smoke = next(each for each in deployed(*server, tmp_path) if each["name"] == "smoke")
    assert smoke["entrypoint"] == "flows.pretrain:pretrain"
    assert smoke["parameters"] == {"recipe": "smoke", "root": str(tmp_path)}
    assert [schedule["active"] for schedule in smoke["schedules"]] == [False]  # type: ignore[attr-defined]  # plain JSON
    checkout = str(Path(__file__).parents[2])
    assert checkout not in json.dumps(smoke)


def test_a_cron_deployment_gets_a_scheduled_run(server: tuple[Path, str]) -> None:
    home, api_url = server
    subprocess.run([sys.executable, "-c", NIGHTLY], env=client_environment(home, api_url), check=True)
    query: dict[str, object] = {
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
        "deployments": {"name": {"any_": ["nightly"]}},
    }
    deadline = time.monotonic() + 90
    while not (runs := ask(f"{api_url}/flow_runs/filter", query)) and time.monotonic() < deadline:
        time.sleep(1)
    assert runs


def test_a_second_server_on_the_same_home_is_refused(server: tuple[Path, str]) -> None:
    command = [sys.executable, "-c", SERVE, str(server[0]), str(free_port())]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "is in use by another Prefect server" in result.stderr


def test_a_module_in_the_current_folder_shadows_nothing(tmp_path: Path) -> None:
    for module in ("flows", "json", "uvicorn"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('shadowed')")
    command = [sys.executable, "-P", "-c", SERVE, str(tmp_path / "home"), str(free_port())]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        url, _ = process.communicate(timeout=180)
    assert url.startswith("http"), (tmp_path / "home/server.log").read_text()


def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    process, api_url = start(tmp_path)
    with process:
        assert answers(api_url)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 20
        while answers(api_url) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not answers(api_url)

"""`t5-pretrain deploy` makes a server agree with the definitions, and leaves alone what people do on the server."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import deployments
from flows.deployment.definitions import FILE, Definitions
from tests.support import prefect_servers
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]

DEPLOYER = """
import json, sys
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from flows.deployment import deploy
from t5train.errors import T5TrainError

of_the_package = deploy.Definitions.load()
for line in sys.stdin:
    asked = json.loads(line)
    wanted = deploy.Definitions.model_validate(asked["definitions"]) if asked["definitions"] else of_the_package
    deploy.Definitions.load = lambda: wanted
    try:
        print(json.dumps(deploy.deploy(asked["given"], Path(sys.argv[1]).parent).refused), flush=True)
    except T5TrainError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""
SCHEDULE = {"slug": "weekly", "cron": "0 3 * * 0", "timezone": "UTC"}
ALERT = {
    "name": "t5-pretrain: test",
    "trigger": {"type": "event", "posture": "Reactive", "expect": ["none"], "threshold": 1, "within": 0},
    "actions": [{"type": "do-nothing"}],
}


def definitions(*wanted: dict[str, Any], automations: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"pull": [], "deployments": list(wanted), "automations": list(automations)}


def deployment(name: str, **more: Any) -> dict[str, Any]:
    pool = {"name": "t5-pretrain", "work_queue_name": name}
    always = {"entrypoint": "flows.pretrain:pretrain", "enforce_parameter_schema": True, "work_pool": pool}
    return {"name": name, "description": "", "parameters": {"recipe": "smoke", "corpus": "pydocs"}} | always | more


class Deployer:
    """Deploys to a server, in a process that stays."""

    def __init__(self, process: subprocess.Popen[str], home: Path, api_url: str, ask: Ask) -> None:
        self._process, self._home, self.api_url, self._ask = process, home, api_url, ask
        self.root = home.parent

    def deploy(self, wanted: dict[str, Any] | None = None, **given: object) -> dict[str, str]:
        """Apply definitions (those of the package if left out) with these defaults; returns what it reports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"definitions": wanted, "given": given}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer

    def found(self, what: str = "deployments") -> dict[str, dict[str, Any]]:
        """What is on the server, by name."""
        return {each["name"]: each for each in self.ask(f"{what}/filter")}

    def ask(self, path: str, body: object = None, **how: object) -> Any:
        return self._ask(self._home, f"{self.api_url}/{path}", body or {}, **how)


@pytest.fixture(scope="module")
def deployer(
    tmp_path_factory: pytest.TempPathFactory, ask: Ask, new_home: Callable[[Path], Path]
) -> Iterator[Deployer]:
    """A deployer to a server on which nothing has been deployed."""
    root = tmp_path_factory.mktemp("definitions")
    home = new_home(root / "prefect")
    with prefect_servers.running(home, root) as api_url:
        command = [sys.executable, "-c", DEPLOYER, str(home), api_url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
            yield Deployer(process, home, api_url, ask)
            assert process.stdin is not None
            process.stdin.close()


def test_the_server_agrees_with_the_definitions_also_after_a_second_deploy(deployer: Deployer) -> None:
    assert deployer.deploy() == {}
    found, wanted = deployer.found(), Definitions.load()
    assert {each.name for each in wanted.deployments} == found.keys()
    for each in wanted.deployments:
        there = found[each.name]
        assert (there["description"], there["work_queue_name"]) == (each.description, each.work_pool.work_queue_name)
        assert there["parameters"] == each.parameters | {"root": str(deployer.root)}
        assert there["entrypoint"] == each.entrypoint
        schedules = [(s["slug"], s["schedule"]["cron"], s["schedule"]["timezone"]) for s in there["schedules"]]
        assert schedules == [(schedule.slug, schedule.cron, schedule.timezone) for schedule in each.schedules]
        assert not any(schedule["active"] for schedule in there["schedules"])
    queues = {name: each["concurrency_limit"] for name, each in deployer.found("work_queues").items()}
    assert queues == {"default": None, "training": 1}
    assert deployer.deploy() == {}
    assert deployer.found() == found
    automations = deployer.found("automations")
    assert automations.keys() == {each.name for each in wanted.automations}
    deployer.deploy()
    assert deployer.found("automations") == automations, "an update makes them forget the events that they wait for"


def test_a_run_on_the_server_cannot_change_its_program(deployer: Deployer) -> None:
    deployer.deploy()
    template = deployer.found("work_pools")["t5-pretrain"]["base_job_template"]
    assert template["variables"]["properties"]["stream_output"]["default"] is False
    for half in (template["variables"]["properties"], template["job_configuration"]):
        assert half
        assert not {"command", "env", "working_dir"} & half.keys()
    assert str(Path(__file__).parents[2]) not in json.dumps(deployer.found()), "a path of the source code"


def test_defaults_of_deployments_are_kept_until_they_are_changed(deployer: Deployer, tmp_path: Path) -> None:
    text, hosts = tmp_path / "text.txt", tmp_path / "hosts"
    text.write_text("one\ntwo\n")
    hosts.write_text("node1 slots=1\n")
    given = {"corpus": str(text), "hostfile": str(hosts), "publish_under": "s3://bucket/t5"}
    given |= {"deployed_settings": {"optimizer.seed": 7}}
    refused = deployer.deploy(**given)
    assert refused.keys() == {"t5-pretrain/pipeline"}, "a pipeline of two stages needs two ranks"
    moe = deployer.found()["moe"]["parameters"]
    assert moe == {"recipe": "moe", "root": str(deployer.root)} | given
    assert deployer.deploy() == refused
    assert deployer.found()["moe"]["parameters"] == moe
    assert deployer.found()["smoke"]["parameters"]["corpus"] == "pydocs", "the definition takes precedence"
    assert deployer.deploy(corpus="", hostfile="", publish_under="", deployed_settings={}) == {}
    assert deployer.found()["moe"]["parameters"].keys() == {"recipe", "root"}


def test_defaults_that_no_run_could_begin_with_are_refused_and_change_nothing(deployer: Deployer) -> None:
    with_secret = {"corpus.mixed_with": ["a.txt", "https://user:secret@127.0.0.1/text"]}
    wrong: list[tuple[dict[str, object], str]] = [
        ({"corpus": "/no such folder/nothing.txt"}, "nothing.txt"),
        ({"hostfile": "/no such file"}, "/no such file"),
        ({"deployed_settings": {"optimizer.sead": 7}}, "did you mean 'optimizer.seed'"),
        ({"corpus": "https://user:secret@127.0.0.1/text"}, "--corpus has a password"),
        ({"deployed_settings": with_secret}, "corpus.mixed_with has a password"),
        ({"deployed_settings": {"corpus.source": "s3://key@bucket/text"}}, "corpus.source has a password"),
    ]
    deployer.deploy()
    before = deployer.found()
    for given, said in wrong:
        assert said in deployer.deploy(**given)["error"]
    assert deployer.found() == before
    assert deployer.deploy() == {}, "the defaults were kept"


def test_a_changed_or_removed_definition_changes_or_removes_what_it_made(deployer: Deployer) -> None:
    deployer.deploy()
    deployer.deploy(definitions(deployment("a", schedules=[SCHEDULE]), deployment("b"), automations=(ALERT,)))
    first = deployer.found()
    assert first.keys() == {"a", "b"}, "the package's definitions are not mentioned any more"
    assert deployer.found("work_queues").keys() == {"default", "a", "b"}
    assert deployer.found("automations").keys() == {ALERT["name"]}
    deployer.ask("deployments/", {"name": "mine", "flow_id": first["a"]["flow_id"], "work_pool_name": "t5-pretrain"})
    (schedule,) = first["a"]["schedules"]
    switch = f"deployments/{first['a']['id']}/schedules/{schedule['id']}"
    deployer.ask(switch, {"active": True}, method="PATCH")
    added = {"schedule": {"cron": "0 1 * * *", "timezone": "UTC"}, "active": True}
    deployer.ask(f"deployments/{first['a']['id']}/schedules", [added])
    decided = {"tags": ["mine"], "concurrency_limit": 3, "concurrency_options": {"collision_strategy": "CANCEL_NEW"}}
    deployer.ask(f"deployments/{first['a']['id']}", decided, method="PATCH")

    later = SCHEDULE | {"cron": "0 5 * * 0"}
    deployer.deploy(definitions(deployment("a", description="new", schedules=[later])))
    second = deployer.found()
    assert second.keys() == {"a", "mine"}
    assert deployer.found("work_queues").keys() == {"default", "a"}
    assert deployer.found("automations").keys() == set()
    assert (second["a"]["id"], second["a"]["description"]) == (first["a"]["id"], "new")
    schedules = {each["slug"]: (each["active"], each["schedule"]["cron"]) for each in second["a"]["schedules"]}
    assert schedules == {"weekly": (True, "0 5 * * 0"), None: (True, "0 1 * * *")}, "a person's decisions"
    assert second["a"]["tags"] == ["mine"]
    assert second["a"]["global_concurrency_limit"]["limit"] == 3
    assert second["a"]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    updated = second["a"]["updated"]
    deployer.deploy(definitions(deployment("a", description="new", schedules=[later])))
    assert deployer.found()["a"]["updated"] == updated, "an update would remove its scheduled runs"
    deployer.deploy(definitions(deployment("a")))
    assert [each["slug"] for each in deployer.found()["a"]["schedules"]] == [None]
    deployer.ask(f"deployments/{second['mine']['id']}", method="DELETE")  # for other tests, as `deploy` leaves it


def test_a_run_without_heartbeats_is_lost_and_one_with_them_is_not(deployer: Deployer) -> None:
    (automation,) = [each.model_dump(mode="json", exclude_unset=True) for each in Definitions.load().automations]
    automation["trigger"]["within"] = 30
    deployer.deploy(definitions(deployment("a"), automations=(automation,)))
    create = f"deployments/{deployer.found()['a']['id']}/create_flow_run"
    silent, alive, resumed = [deployer.ask(create, {"state": {"type": "RUNNING"}}) for _ in range(3)]
    for _ in range(5):  # as the server may not know the automation yet when the first ones arrive
        deployer.ask("events", [heartbeat(run) for run in (silent, alive, resumed)])
        time.sleep(2)
    state = {"type": "SCHEDULED", "name": "AwaitingResume"}

    def is_lost() -> bool:
        deployer.ask("events", [heartbeat(alive)])
        # Repeated, because the server handles two events at a time, and may handle the first change of the state before
        # the heartbeat that precedes it.
        deployer.ask(f"flow_runs/{resumed['id']}/set_state", {"state": state, "force": True})
        time.sleep(2)
        return "Lost" in states(silent)

    def states(run: dict[str, Any]) -> set[str]:
        """The names of all states that a run has had."""
        found = deployer.ask(f"flow_run_states/?flow_run_id={run['id']}", method="GET")
        return {each["name"] for each in found}

    await_that(is_lost)
    assert [states(run) for run in (alive, resumed)] == [{"Running"}, {"Running", "AwaitingResume"}]


def heartbeat(run: dict[str, Any]) -> dict[str, Any]:
    """The event that the process of a flow run emits."""
    related = {"prefect.resource.id": f"prefect.flow.{run['flow_id']}", "prefect.resource.role": "flow"}
    return {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run['id']}", "prefect.resource.name": run["name"]},
        "related": [related | {"prefect.resource.name": "t5-pretrain"}],
    }


def test_a_wrong_parameter_is_refused_when_the_run_is_created(deployer: Deployer) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"settings": {"optimizer.num_step": 5}}, "'optimizer.num_step' was unexpected"),
        ({"stepz": 5}, "'stepz' was unexpected"),
        ({"corpus": "https://user:secret@host/text"}, "does not match"),
    ]
    deployer.deploy()
    moe = deployer.found()["moe"]["id"]
    for parameters, said in wrong:
        answer = deployer.ask(f"deployments/{moe}/create_flow_run", {"parameters": parameters}, expected=409)
        assert said in answer["detail"]
    assert deployer.ask("flow_runs/filter", {"deployments": {"id": {"any_": [moe]}}}) == []


def test_plain_prefect_understands_the_file(deployer: Deployer) -> None:
    deployer.deploy()
    wanted, file = Definitions.load(), Path(deployments.__path__[0]) / FILE
    home = deployer.root / "prefect"
    environment = prefect_servers.client_environment(home, deployer.api_url)
    environment["PREFECT_API_AUTH_STRING"] = (home / "api-key").read_text().strip()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    made = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    found = deployer.found()
    for each in wanted.deployments:
        there = found[each.name]
        assert (there["parameters"], there["entrypoint"]) == (each.parameters, each.entrypoint)
        assert there["pull_steps"] == wanted.pull
        assert [(schedule["slug"], schedule["active"]) for schedule in there["schedules"]] == [
            (schedule.slug, False) for schedule in each.schedules
        ]
    deployer.deploy()
    assert deployer.found()["moe"]["parameters"] == {"recipe": "moe", "root": str(deployer.root)}

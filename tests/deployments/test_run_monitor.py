"""The monitor of a worker closes and resumes the runs that lost their process, and skips late ones of schedules."""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from flows.workers.abandoned import AWAITING, WORKER_LABEL
from flows.workers.lost_runs import LOST
from flows.workers.run_monitor import MOST_RESUMES, NOT_RESUMED, RESUMES_LABEL
from flows.workers.run_records import RESTORED, folder_of, worker_name
from t5train.files.run_folder import LAST_COMPLETE, RUNS
from tests.support.team_servers import Team
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

MONITORS = """
import json, sys
from datetime import timedelta
from flows.server.prefect_server import configured_api_url
configured_api_url()
from flows.workers import abandoned, cancelled_runs, lost_runs, run_monitor
from flows.workers.run_monitor import RunMonitor

TIMES = {
    "patient": [],
    "impatient": [
        (cancelled_runs, "PREFECT_TIME", timedelta(0)),
        (cancelled_runs, "SAVE_SECONDS", 3.0),
        (abandoned, "_START_TIME", timedelta(0)),
        (lost_runs, "FORGOTTEN_AFTER", timedelta(seconds=40)),
        (run_monitor, "SKIP_AFTER", timedelta(0)),
    ],
}
usual = [(module, name, getattr(module, name)) for times in TIMES.values() for module, name, _ in times]
monitors = {}
for number, worker, temper, method in map(json.loads, sys.stdin):
    for module, name, time in [*usual, *TIMES[temper]]:
        setattr(module, name, time)
    if number not in monitors:
        monitors[number] = RunMonitor(worker)
    print(json.dumps(getattr(monitors[number], method)()), flush=True)
"""

HOLD = """
import sys, time
from pathlib import Path
from uuid import UUID
from flows.workers import run_records

run_records.hold(Path(sys.argv[1]), UUID(sys.argv[2]), UUID(sys.argv[3]))
print("held", flush=True)
time.sleep(600)
"""


Call = Callable[[str], list[str]]
Monitor = Callable[..., Call]


@pytest.fixture(scope="module")
def monitor(team: Team) -> Iterator[Monitor]:
    """Makes run monitors of machines' workers, each new, in one process, as Prefect takes seconds to import.

    ``monitor(worker)`` returns a function that calls a method of the monitor by its name.

    An impatient one does not wait for Prefect's worker, and takes a run for forgotten after 40 s of silence.
    """
    command = [sys.executable, "-c", MONITORS]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    numbers = itertools.count()
    with subprocess.Popen(command, env=team.client, cwd="/", **pipes) as process:

        def monitor(worker: str, temper: str = "patient") -> Call:
            number = next(numbers)

            def call(method: str) -> list[str]:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps([number, worker, temper, method]) + "\n")
                process.stdin.flush()
                return list(json.loads(process.stdout.readline()))

            return call

        yield monitor


def test_a_run_that_keeps_crashing_without_a_new_checkpoint_is_given_up(
    team: Team, monitor: Monitor, tmp_path: Path
) -> None:
    parameters = {"recipe": "smoke", "root": str(tmp_path), "run_name": "bad"}
    run = team.start("CRASHED", parameters=parameters, labels={WORKER_LABEL: "t5@gpu1"})
    checkpoint = tmp_path / RUNS / "bad" / LAST_COMPLETE
    checkpoint.parent.mkdir(parents=True)
    names = []
    call = monitor("t5@gpu1")
    for crash in range(2 * MOST_RESUMES + 1):
        if crash == MOST_RESUMES:
            checkpoint.write_text(json.dumps({"tag": "step-00000050", "at": "", "places": {}}))
        team.set_state(run, "CRASHED")
        call("check")
        names.append(team.run(run)["state_name"])
        if names[-1] == AWAITING:
            found = team.run(run)
            assert found["next_scheduled_start_time"] == found["expected_start_time"], "it keeps its place"
    assert names == [AWAITING] * 2 * MOST_RESUMES + [NOT_RESUMED]


def test_it_is_said_once_that_a_run_of_this_worker_started_and_how_it_ended(team: Team, monitor: Monitor) -> None:
    def taken(worker: str) -> str:
        run = team.start("SCHEDULED")
        team.ask(f"flow_runs/{run}/labels", {WORKER_LABEL: worker}, method="PATCH")
        return run

    earlier = taken("t5@news")
    team.set_state(earlier, "COMPLETED")
    call = monitor("t5@news")
    assert call("news") == []
    mine, others = taken("t5@news"), taken("t5@elsewhere")
    name = team.run(mine)["name"]
    for run in (mine, others):
        team.set_state(run, "RUNNING")
    assert call("news") == [f"run {name!r} is running"]
    assert call("news") == []
    team.set_state(mine, "FAILED", "Train failed: the disk\n is full")
    assert call("news") == [f"run {name!r} failed: Train failed: the disk is full"]
    team.set_state(mine, "RUNNING")
    assert call("news") == [f"run {name!r} is running again"]
    team.set_state(mine, "COMPLETED")
    assert call("news") == [f"run {name!r} completed"]
    assert call("news") == []
    team.set_state(others, "COMPLETED")


def test_only_crashed_runs_of_the_own_machine_are_resumed(team: Team, monitor: Monitor) -> None:
    own, other = {WORKER_LABEL: "t5@gpu1"}, {WORKER_LABEL: "t5@gpu2"}
    left = {state: team.start(state, labels=own) for state in ("FAILED", "CANCELLED", "COMPLETED")}
    left |= {"RUNNING": team.start("RUNNING", labels=other), "CRASHED": team.start("CRASHED", labels=other)}
    unstarted = team.start("PENDING", labels=other)
    call = monitor("t5@gpu1")
    assert any("lost its worker" in line for line in call("check"))  # its worker was never online
    assert call("check") == []
    assert {run: team.run(run)["state_type"] for run in left.values()} == {run: state for state, run in left.items()}
    assert team.run(unstarted)["state_type"] == "CRASHED"
    team.set_state(left["RUNNING"], "CANCELLED")


@pytest.fixture
def quick_automation(team: Team) -> Iterator[None]:
    """Let the automation that marks silent runs wait for half a minute only, longer than a check of a busy machine."""
    (automation,) = team.ask("automations/filter", {})
    usual = {name: automation[name] for name in ("name", "description", "trigger", "actions")}
    path = f"automations/{automation['id']}"
    team.ask(path, usual | {"trigger": usual["trigger"] | {"within": 30}}, method="PUT")
    yield
    team.ask(path, usual, method="PUT")


@pytest.mark.usefixtures("quick_automation")
def test_a_silent_run_of_a_machine_that_is_down_is_lost_even_if_the_servers_automation_forgot_it(
    team: Team, monitor: Monitor
) -> None:
    # Without a heartbeat, the automation does not know them, as after a restart of the server.
    silent, reporting = (team.start("RUNNING", labels={WORKER_LABEL: "t5@gpu2"}) for _ in range(2))
    mine = team.start("RUNNING", labels={WORKER_LABEL: "t5@gpu1"})
    call = monitor("t5@gpu1", "impatient")

    def is_lost() -> bool:
        _heartbeat(team, reporting)
        assert call("check") == []
        return bool(team.run(silent)["state_name"] == LOST)

    assert not is_lost(), "it may have been silent for a moment only"
    await_that(is_lost, seconds=300, every=2.0)  # each time, the server answers a dozen requests
    assert [team.run(run)["state_name"] for run in (reporting, mine)] == ["Running", "Running"]
    for run in (silent, reporting, mine):
        team.set_state(run, "CANCELLED")


def _heartbeat(team: Team, run: str) -> None:
    """Report that a run is alive, as its process does."""
    flow = team.ask(f"flows/{team.run(run)['flow_id']}", None, method="GET")
    of_flow = {"id": f"prefect.flow.{flow['id']}", "name": flow["name"], "role": "flow"}
    event = {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": "prefect.flow-run.heartbeat"}
    about = {
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{f"prefect.resource.{key}": value for key, value in of_flow.items()}],
    }
    team.ask("events", [event | about])


def test_a_worker_that_starts_closes_only_runs_without_a_process(team: Team, monitor: Monitor) -> None:
    own = {WORKER_LABEL: "t5@gpu1"}
    pending, running, cancelling, living = (
        team.start(state, labels=own) for state in ("PENDING", "RUNNING", "CANCELLING", "RUNNING")
    )
    with subprocess.Popen(["sleep", "600"], env={"PREFECT__FLOW_RUN_ID": living}) as process:
        try:
            call = monitor("t5@gpu1")
            closed = call("begin")
        finally:
            process.kill()
    assert len(closed) == 3
    states = [team.run(run)["state_type"] for run in (pending, running, cancelling, living)]
    assert states == ["CRASHED", "CRASHED", "CANCELLED", "RUNNING"]
    for run in (pending, running, living):
        team.set_state(run, "CANCELLED")


def test_a_start_that_a_dead_worker_owes_is_no_crash(team: Team, monitor: Monitor) -> None:
    run = team.start("PENDING", labels={WORKER_LABEL: "t5@gpu1"})
    other, own = monitor("t5@gpu2"), monitor("t5@gpu1")
    for _ in range(MOST_RESUMES + 1):
        assert any("lost its worker" in line for line in other("check"))
        assert any("will be resumed" in line for line in own("check"))
    assert team.run(run)["labels"][RESUMES_LABEL] == 0
    team.set_state(run, "CANCELLED")


def test_a_run_that_a_worker_could_not_start_is_resumed(team: Team, monitor: Monitor) -> None:
    run = team.start("PENDING")
    team.set_state(run, "CRASHED", "Failed to submit flow run to infrastructure: the server is busy")
    call = monitor("t5@gpu1")
    assert len(call("check")) == 1
    assert team.run(run)["state_name"] == AWAITING
    team.set_state(run, "CANCELLED")


def test_a_run_that_was_taken_and_never_started_is_closed_and_resumed(team: Team, monitor: Monitor) -> None:
    run = team.start("PENDING")
    call = monitor("t5@gpu1", "impatient")
    assert len(call("check")) == 2
    assert team.run(run)["state_name"] == AWAITING
    team.set_state(run, "CANCELLED")


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
@pytest.mark.parametrize("is_stubborn", [False, True])
def test_a_cancelled_run_that_prefect_did_not_end_is_told_to_save_and_then_killed(
    team: Team, monitor: Monitor, state: str, is_stubborn: bool
) -> None:
    run = team.start("RUNNING", labels={WORKER_LABEL: "t5@gpu1"})
    others = team.start("RUNNING", labels={WORKER_LABEL: "t5@gpu1"})
    script = f"trap '{'' if is_stubborn else 'exit 7'}' TERM; echo; while true; do sleep 0.1; done"
    processes = [
        subprocess.Popen(["sh", "-c", script], env={"PREFECT__FLOW_RUN_ID": each}, stdout=subprocess.PIPE)
        for each in (run, others)
    ]
    cancelled, living = processes
    try:
        assert cancelled.stdout is not None
        assert cancelled.stdout.readline() == b"\n", "it has set its trap"
        team.set_state(run, state)
        call = monitor("t5@gpu1", "impatient")
        told, *_ = call("check")  # and a second line, if it has ended by then
        assert "is told to save and end" in told
        await_that(lambda: bool(call("check")) or cancelled.poll() is not None)
        assert cancelled.wait(300) == (-signal.SIGKILL if is_stubborn else 7)
        assert living.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for each in (run, others):
        team.set_state(each, "CANCELLED")


def test_a_run_that_is_cancelled_while_it_waits_for_its_next_attempt_leaves_the_queue(
    team: Team, monitor: Monitor
) -> None:
    labels = ({WORKER_LABEL: worker} for worker in ("t5@gpu1", "t5@gpu1", "t5@gpu2"))
    mine, living, others = runs = [team.start("RUNNING", labels=each) for each in labels]
    for run in runs:
        team.ask(f"flow_runs/{run}", {"infrastructure_pid": "of the last attempt"}, method="PATCH")
        team.set_state(run, "SCHEDULED", name=AWAITING)
        team.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})  # as the UI does
    stubborn = ["sh", "-c", "trap '' TERM; while true; do sleep 0.1; done"]
    with subprocess.Popen(stubborn, env={"PREFECT__FLOW_RUN_ID": living}) as process:
        try:
            call = monitor("t5@gpu1")
            assert call("check") == [], "Prefect's worker may be ending it"
            assert {team.run(run)["state_type"] for run in runs} == {"CANCELLING"}
            call = monitor("t5@gpu1", "impatient")
            told, closed = call("check")
        finally:
            process.kill()
    assert "is told to save" in told
    assert f"run {team.run(mine)['name']!r}, which was cancelled" in closed
    states = [team.run(run)["state_type"] for run in (mine, living, others)]
    assert states == ["CANCELLED", "CANCELLING", "CANCELLING"]
    for run in (living, others):
        team.set_state(run, "CANCELLED")


def test_a_lost_run_is_resumed_only_when_its_process_has_ended(team: Team, monitor: Monitor) -> None:
    run = team.start("RUNNING", labels={WORKER_LABEL: worker_name()})
    folder = folder_of(Path(team.client["PREFECT_HOME"]), team.api_url)
    command = [sys.executable, "-c", HOLD, str(folder), run, team.run(run)["state_id"]]
    states = []
    call = monitor(worker_name())
    process = subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        for _ in range(2):
            team.set_state(run, "CRASHED", name=LOST)
            assert len(call("check")) == 1
            states.append(team.run(run)["state_name"])
        assert call("check") == []
    finally:
        process.kill()
        process.communicate()
    assert len(call("check")) == 2, "it is closed, and then scheduled again"
    states.append(team.run(run)["state_name"])
    team.set_state(run, "RUNNING")
    team.set_state(run, "CRASHED", name=LOST)
    call("check")
    states.append(team.run(run)["state_name"])
    assert states == [RESTORED, RESTORED, AWAITING, AWAITING]
    assert team.run(run)["labels"][RESUMES_LABEL] == 2
    team.set_state(run, "CANCELLED")


@pytest.mark.parametrize(("state", "name"), [("PAUSED", "Suspended"), ("SCHEDULED", AWAITING)])
def test_a_lost_run_that_was_not_running_gets_its_state_back(
    team: Team, monitor: Monitor, state: str, name: str
) -> None:
    run = team.start("RUNNING", labels={WORKER_LABEL: "t5@gpu1"})
    team.set_state(run, state, name=name)
    team.set_state(run, "CRASHED", name=LOST)
    call = monitor("t5@gpu1")
    assert len(call("check")) == 1
    assert (team.run(run)["state_type"], team.run(run)["state_name"]) == (state, name)
    assert call("check") == []
    assert RESUMES_LABEL not in team.run(run)["labels"]
    team.set_state(run, "CANCELLED")


def is_due(run: dict[str, Any]) -> bool:
    return datetime.fromisoformat(run["expected_start_time"]) < datetime.now(UTC)


def test_a_late_run_of_a_schedule_is_skipped_unless_it_has_started_before(team: Team, monitor: Monitor) -> None:
    (nightly,) = team.ask("deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
    of_schedule = {"deployments": {"id": {"any_": [nightly["id"]]}}}
    schedule = f"deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
    team.ask(schedule, {"active": True, "schedule": {"interval": 5}}, method="PATCH")
    try:
        await_that(lambda: any(map(is_due, team.ask("flow_runs/filter", of_schedule))))
        assert monitor("t5@late")("skip_late") == [], "none is an hour late"
        crashed = min(team.ask("flow_runs/filter", of_schedule), key=lambda run: run["expected_start_time"])["id"]
        team.set_state(crashed, "RUNNING")
        team.set_state(crashed, "SCHEDULED", name=AWAITING)
        skipped, call = list[str](), monitor("t5@late", "impatient")
        await_that(lambda: skipped.extend(call("skip_late")) or skipped)
    finally:
        team.ask(schedule, {"active": False}, method="PATCH")
    assert "of a schedule was due at" in skipped[0]
    assert team.run(crashed)["state_name"] == AWAITING
    of_nightly = team.ask("flow_runs/filter", of_schedule)
    assert {each["state_name"] for each in of_nightly if each["state_type"] == "CANCELLED"} == {"Skipped"}

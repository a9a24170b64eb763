"""Which runs a worker takes, and when."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.workers import head_worker
from flows.workers.abandoned import AWAITING, WORKER_LABEL
from flows.workers.head_worker import HeadWorker


def scheduled(state: str, worker: str | None) -> FlowRun:
    labels = {WORKER_LABEL: worker} if worker else {}
    return FlowRun(flow_id=uuid4(), state=Scheduled(name=state), labels=labels)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> HeadWorker:
    """The worker of gpu1, on an idle machine. That of gpu2 is online, that of gpu3 is not."""

    async def restore(_client: object, worker: str) -> list[str]:
        return []

    async def online(_: object) -> set[str]:
        return {"t5@gpu1", "t5@gpu2"}

    monkeypatch.setattr(head_worker, "restore_lost_runs", restore)
    monkeypatch.setattr(head_worker, "online_workers", online)
    monkeypatch.setattr(head_worker, "is_machine_busy", lambda: False)
    monkeypatch.setattr(HeadWorker, "client", None)
    return HeadWorker("pool", name="t5@gpu1")


def taken(worker: HeadWorker, monkeypatch: pytest.MonkeyPatch, *runs: FlowRun) -> list[FlowRun]:
    """Which of the runs that Prefect offers the worker takes."""

    async def offered(_: ProcessWorker) -> list[SimpleNamespace]:
        return [SimpleNamespace(flow_run=run) for run in runs]

    monkeypatch.setattr(ProcessWorker, "_get_scheduled_flow_runs", offered)
    return [each.flow_run for each in asyncio.run(worker._get_scheduled_flow_runs())]


@pytest.mark.parametrize(
    ("state", "of_worker", "is_taken"),
    [
        ("Scheduled", None, True),
        (AWAITING, "t5@gpu1", True),
        (AWAITING, "t5@gpu2", False),
        (AWAITING, "t5@gpu3", False),
        ("AwaitingRetry", "t5@gpu1", True),
        ("AwaitingRetry", "t5@gpu2", False),
        ("AwaitingRetry", "t5@gpu3", True),
    ],
)
def test_a_run_stays_on_its_machine_unless_it_is_retried_while_that_is_off(
    worker: HeadWorker, monkeypatch: pytest.MonkeyPatch, state: str, of_worker: str | None, is_taken: bool
) -> None:
    run = scheduled(state, of_worker)
    assert taken(worker, monkeypatch, run) == [run] * is_taken


def test_a_worker_takes_no_run_while_the_machine_is_busy_or_the_worker_ends(
    worker: HeadWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scheduled("Scheduled", None)
    assert taken(worker, monkeypatch, first) == [first]
    monkeypatch.setattr(head_worker, "is_machine_busy", lambda: True)
    assert taken(worker, monkeypatch, first) == []
    monkeypatch.setattr(head_worker, "is_machine_busy", lambda: False)
    worker.drain()
    assert taken(worker, monkeypatch, first) == []


def test_lost_runs_are_restored_before_a_waiting_run_takes_their_place(
    worker: HeadWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    async def restore(_client: object, worker: str) -> list[str]:
        done.append(f"restored for {worker}")
        return []

    async def offered(_: ProcessWorker) -> list[SimpleNamespace]:
        done.append("looked for runs")
        return []

    monkeypatch.setattr(head_worker, "restore_lost_runs", restore)
    monkeypatch.setattr(ProcessWorker, "_get_scheduled_flow_runs", offered)
    asyncio.run(worker._get_scheduled_flow_runs())
    assert done == ["restored for t5@gpu1", "looked for runs"]


def test_the_end_of_a_process_is_not_reported_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def killed(*_: object) -> ProcessWorkerResult:
        return ProcessWorkerResult(status_code=-9, identifier="17")

    monkeypatch.setattr(ProcessWorker, "run", killed)
    worker, run = HeadWorker("pool", name="t5@gpu1"), scheduled("Scheduled", None)
    result = asyncio.run(worker.run(run, ProcessJobConfiguration()))
    assert (result.status_code, result.identifier) == (0, "17")

"""Which runs a worker takes, and in which order it does things: crashed runs belong to the machine with their files."""

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


def test_a_worker_restores_its_lost_runs_first_and_leaves_other_machines_crashed_runs_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []
    new, retried = scheduled("Scheduled", None), scheduled("AwaitingRetry", "t5@gpu2")
    own, foreign = scheduled(AWAITING, "t5@gpu1"), scheduled(AWAITING, "t5@gpu2")

    async def restore(worker: str) -> list[str]:
        done.append(f"restored for {worker}")
        return []

    async def found(_: ProcessWorker) -> list[SimpleNamespace]:
        done.append("looked for runs")
        return [SimpleNamespace(flow_run=run) for run in (new, retried, own, foreign)]

    monkeypatch.setattr(head_worker, "restore_lost_runs", restore)
    monkeypatch.setattr(ProcessWorker, "_get_scheduled_flow_runs", found)
    taken = asyncio.run(HeadWorker("pool", name="t5@gpu1")._get_scheduled_flow_runs())
    assert [each.flow_run for each in taken] == [new, retried, own]
    assert done == ["restored for t5@gpu1", "looked for runs"], "a waiting run takes no place of one that is alive"


def test_the_end_of_a_process_is_not_reported_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def killed(*_: object) -> ProcessWorkerResult:
        return ProcessWorkerResult(status_code=-9, identifier="17")

    monkeypatch.setattr(ProcessWorker, "run", killed)
    worker, run = HeadWorker("pool", name="t5@gpu1"), scheduled("Scheduled", None)
    result = asyncio.run(worker.run(run, ProcessJobConfiguration()))
    assert (result.status_code, result.identifier) == (0, "17")

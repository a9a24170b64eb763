"""Which shards a host has hung with: those that it has begun, not those that wait there."""

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from infra.head.tokenising.dask_scheduler import _HangWatch

JOBS = [{"description": f"shard-{number:05d}.json"} for number in range(8)]


def given_up(begun: list[int], waiting: list[int], progress: int | None, capsys: pytest.CaptureFixture[str]) -> str:
    """Why a worker with these jobs is given up; empty if it is not. One of them may have progressed at each check."""
    is_given_up = asyncio.Event()
    jobs = [SimpleNamespace(key=("try-1", number)) for number in [*begun, *waiting]]
    worker = SimpleNamespace(address="tls://one", name="one", processing=jobs)

    async def remove_worker(address: str, **_: Any) -> None:
        del scheduler.workers[address]
        is_given_up.set()

    scheduler = SimpleNamespace(workers={worker.address: worker}, remove_worker=remove_worker)
    watch = _HangWatch(scheduler, JOBS, hang_seconds=0.1)

    async def report() -> None:
        while progress is not None:
            watch.note_progress(worker.address, progress)
            await asyncio.sleep(0.01)

    async def both() -> None:
        for number in begun:
            watch.note_progress(worker.address, number)
        tasks = [asyncio.create_task(each) for each in (watch.watch(), report())]
        with suppress(TimeoutError):
            await asyncio.wait_for(is_given_up.wait(), 0.3 if progress is not None or not jobs else 60)
        for task in tasks:
            task.cancel()

    asyncio.run(both())
    return "".join(json.loads(line)["reason"] for line in capsys.readouterr().out.splitlines())


def test_shards_that_wait_on_a_host_that_hangs_are_not_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert given_up([3, 1], [2], None, capsys).startswith(
        "shard-00001, shard-00003 made no progress for 0.1 s. If its d"
    )


def test_a_host_that_begins_nothing_is_given_up_with_what_waits_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert given_up([], [2], None, capsys).startswith("shard-00002 made no progress")


def test_a_host_that_makes_progress_or_has_nothing_to_do_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert not given_up([0, 1], [], 1, capsys)
    assert not given_up([0], [], 0, capsys)
    assert not given_up([], [], None, capsys)

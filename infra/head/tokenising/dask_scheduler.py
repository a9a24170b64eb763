"""The scheduler of Dask, with the client that gives it the jobs: ``python -m infra.head.tokenising.dask_scheduler``.

A process of its own, so that Dask's threads, loggers and warnings stay out of the flow, and the scheduler ends with the
process that started it, even if that is killed. Each message is a line of JSON::

    stdin    {"lease_seconds": 60}                       to start; then
             {"function": "package.module:name", "jobs": [...]}
    stdout   {"port": 40001, "certificate": "...", "key": "..."}
             {"job": 3, "done": 1048576}                 progress; at the end of a job also "result"
             {"left": "node1"}                           the scheduler has lost the worker of this host
             {"error": "InputError", "message": "..."}   a job failed for good

The jobs of a worker that is lost are given to others. A job whose process was killed is tried again, also elsewhere.
"""

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin, as_completed

from infra.head.tokenising.run_credentials import new_credentials
from infra.node.tokenising.dask_settings import configure, security, without_http
from infra.node.tokenising.dask_worker import PROGRESS, JobFailed, perform
from t5train.errors import WorkerLost

_TRIES = 3
Json = dict[str, Any]


class _Departures(SchedulerPlugin):  # type: ignore[misc]  # Dask has no types
    """Reports the hosts whose workers the scheduler has lost."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self._names[worker] = scheduler.workers[worker].name

    def remove_worker(self, scheduler: Any, worker: str, **_: object) -> None:  # noqa: ARG002 - Dask names it
        _say({"left": self._names[worker]})


async def _serve() -> None:
    credentials = new_credentials()
    secure = security(credentials)
    async with without_http(Scheduler)(protocol="tls", port=0, security=secure) as scheduler:
        scheduler.add_plugin(_Departures())
        _say({"port": scheduler.port, "certificate": credentials.certificate, "key": credentials.key})
        line = await asyncio.to_thread(sys.stdin.readline)
        threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
        work = json.loads(line or "null")
        address = f"tls://127.0.0.1:{scheduler.port}"
        async with Client(address, asynchronous=True, security=secure) as client:
            client.subscribe_topic(PROGRESS, lambda event: _say(event[1]))
            await _perform(client, work["function"], work["jobs"])
            await asyncio.Event().wait()  # the last results may still be on their way; the parent ends this process


async def _perform(client: Any, function: str, jobs: list[Json]) -> None:
    """Have all jobs done. What is done is released at once: Dask would do it again if its worker were lost later."""
    tries = Counter[int]()

    def submit(number: int) -> Any:
        tries[number] += 1
        return client.submit(perform, function, jobs[number], number, key=(f"try-{tries[number]}", number), pure=False)

    unfinished = as_completed([submit(number) for number in range(len(jobs))])
    async for future in unfinished:
        if future.status != "finished":
            _, number = future.key
            error, message = _failure(await future.exception())
            if error == WorkerLost.__name__ and tries[number] < _TRIES:
                unfinished.add(submit(number))
            else:
                _say({"error": error, "message": message})


def _failure(error: BaseException) -> tuple[str, str]:
    if isinstance(error, JobFailed):
        kind, message = error.args
        return kind, message
    return WorkerLost.__name__, f"a shard could not be made: {' '.join(str(error).split())}"


def _say(message: Json) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Schedule until stdin ends."""
    configure(json.loads(sys.stdin.readline())["lease_seconds"])
    asyncio.run(_serve())


if __name__ == "__main__":
    main()

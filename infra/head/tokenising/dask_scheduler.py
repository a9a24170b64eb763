"""The scheduler of Dask, with the client that gives it the jobs: ``python -m infra.head.tokenising.dask_scheduler``.

A process of its own, so that Dask's threads, loggers and warnings stay out of the flow, and the scheduler ends with the
process that started it, even if that is killed. Each message is a line of JSON::

    stdin    {"lease_seconds": 60}                       to start; then
             {"function": "package.module:name", "jobs": [...]}
    stdout   {"port": 40001, "certificate": "...", "key": "..."}
             {"job": 3, "done": 1048576}                 progress; at the end of a job also "result"
             {"left": "node1"}                           the scheduler has lost this host, perhaps with "reason"
             {"error": "InputError", "message": "..."}   a job failed for good

The jobs of a worker that is lost are given to others. A job whose process was killed is tried again elsewhere, and a
worker on which several were killed gets no more.
"""

import asyncio
import json
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin, as_completed

from infra.head.tokenising.run_credentials import new_credentials
from infra.node.tokenising.dask_settings import configure, security, without_http
from infra.node.tokenising.dask_worker import PROGRESS, JobFailed, perform
from t5train.data.worker_processes import end_with_parent
from t5train.errors import WorkerLost

_TRIES = 3
Json = dict[str, Any]


class _Watched(SchedulerPlugin):  # type: ignore[misc]  # Dask has no types, so its classes count as Any
    """Reports the hosts whose workers the scheduler has lost, and counts the jobs in a row that workers have lost."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.losses = Counter[str]()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self._names[worker] = scheduler.workers[worker].name

    def remove_worker(self, *, worker: str, **_: object) -> None:
        _say({"left": self._names[worker]})

    def transition(self, _key: object, _start: str, finish: str, **about: Any) -> None:
        if finish == "memory":
            self.losses.pop(about.get("worker", ""), None)


async def _serve() -> None:
    credentials = new_credentials()
    secure = security(credentials)
    async with without_http(Scheduler)(protocol="tls", port=0, security=secure) as scheduler:
        watched = _Watched()
        scheduler.add_plugin(watched)
        _say({"port": scheduler.port, "certificate": credentials.certificate, "key": credentials.key})
        line = await asyncio.to_thread(sys.stdin.readline)
        threading.Thread(target=end_with_parent, args=[sys.stdin.fileno()], name="end-with-parent", daemon=True).start()
        work = json.loads(line or "null")
        address = f"tls://127.0.0.1:{scheduler.port}"
        async with Client(address, asynchronous=True, security=secure) as client:
            client.subscribe_topic(PROGRESS, lambda event: _say(event[1]))
            await _perform(client, scheduler.workers, watched.losses, work["function"], work["jobs"])
            await asyncio.Event().wait()  # the last results may still be on their way; the parent ends this process


async def _perform(
    client: Any, workers: Mapping[str, Any], losses: Counter[str], function: str, jobs: list[Json]
) -> None:
    """Have all jobs done. What is done is released at once: Dask would do it again if its worker were lost later."""
    tries = [_Tries(number, job) for number, job in enumerate(jobs)]
    unfinished = as_completed([one.submit(client, function, workers) for one in tries])
    async for future in unfinished:
        _, number = future.key
        if future.status == "finished":
            continue
        error, message, worker = _failure(await future.exception(), number)
        tries[number].failed.append(worker)
        if error != WorkerLost.__name__ or len(tries[number].failed) == _TRIES:
            _say({"error": error, "message": message})
            continue
        losses[worker] += 1
        if losses[worker] >= _TRIES and worker in workers and len(workers) > 1:
            await _retire(client, workers[worker].name, worker, message)
        unfinished.add(tries[number].submit(client, function, workers))


@dataclass
class _Tries:
    """The tries of a job, and the addresses of the workers on which it has failed."""

    number: int
    job: Json
    failed: list[str] = field(default_factory=list)

    def submit(self, client: Any, function: str, workers: Mapping[str, Any]) -> Any:
        """Try it, on a worker on which it has not failed if there is one."""
        key = (f"try-{len(self.failed) + 1}", self.number)
        others = [each for each in workers if each not in self.failed] if self.failed else []
        where = {"workers": others, "allow_other_workers": True} if others else {}
        return client.submit(perform, function, self.job, self.number, key=key, pure=False, **where)


async def _retire(client: Any, host: str, worker: str, reason: str) -> None:
    """Give no more jobs to a worker that fails at all of them."""
    _say({"left": host, "reason": f"{_TRIES} shards in a row could not be made there: {reason}"})
    await client.retire_workers([worker])


def _failure(error: BaseException, number: int) -> tuple[str, str, str]:
    if isinstance(error, JobFailed):
        kind, message, worker = error.args
        return kind, message, worker
    return WorkerLost.__name__, f"shard {number} could not be made: {' '.join(str(error).split())}", ""


def _say(message: Json) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Schedule until stdin ends."""
    warnings.filterwarnings("ignore", "Couldn't detect a suitable IP address", RuntimeWarning)  # hosts need none
    configure(json.loads(sys.stdin.readline())["lease_seconds"])
    asyncio.run(_serve())


if __name__ == "__main__":
    main()

"""The scheduler of Dask, with the client that gives it the jobs: ``python -m infra.head.tokenising.dask_scheduler``.

A process of its own, so that Dask's threads, loggers and warnings stay out of the flow, and the scheduler ends with the
process that started it, even if that is killed. Each message is a line of JSON::

    stdin    {"lease_seconds": 60}                         to start; then
             {"function": "package.module:name", "jobs": [...], "hang_seconds": 900}
    stdout   {"port": 40001, "certificate": "...", "key": "..."}
             {"job": 3, "done": 1048576, "worker": "..."}  progress; at the end of a job also "result"
             {"left": "node1"}                             the scheduler has lost this host, perhaps with "reason"
             {"error": "InputError", "message": "..."}     a job failed for good

The jobs of a worker that is lost are given to others. A job whose process was killed is tried again elsewhere, and a
worker on which several were killed gets no more. A worker on which all jobs hang is given up, and its jobs are given to
others.
"""

import asyncio
import json
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from distributed import Client, Scheduler, SchedulerPlugin, as_completed

from infra.node.stages.dask_settings import Credentials, configure, security, without_http
from infra.node.stages.dask_worker import PROGRESS, JobFailed, perform
from t5train.data.download.source_listing import few
from t5train.data.worker_processes import end_with_parent
from t5train.errors import WorkerLost

_TRIES = 3
_VALID = timedelta(days=7)
_CLOCK_DIFFERENCE = timedelta(days=1)
_CHECKS = 10
"""How many times progress is checked within the time after which a worker counts as hung."""
Json = dict[str, Any]


def new_credentials() -> Credentials:
    """Return a new key, with a certificate that is its own authority.

    They exist in memory only. The scheduler accepts nothing else and ends with the run, so nobody can use them later.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "t5-pretrain tokenising")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_DIFFERENCE)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Credentials(
        certificate.public_bytes(Encoding.PEM).decode(),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    )


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
            hangs = _HangWatch(scheduler, work["jobs"], work["hang_seconds"])
            client.subscribe_topic(PROGRESS, lambda event: _report(event[1], hangs))
            # The watch does not end: the last results may still be on their way, and the parent ends this process.
            performed = _perform(client, scheduler.workers, watched.losses, work["function"], work["jobs"])
            await asyncio.gather(hangs.watch(), performed)


class _HangWatch:
    """Gives up workers that have jobs, but make no progress with any of them.

    A worker with one job that hangs is still useful until its other jobs are done, so it is given up only then.
    """

    def __init__(self, scheduler: Any, jobs: Sequence[Json], hang_seconds: float) -> None:
        self._scheduler, self._jobs, self._hang_seconds = scheduler, jobs, hang_seconds
        self._silent_checks = Counter[str]()
        self._begun_on = dict[int, str]()
        self._hung_on = defaultdict[int, list[str]](list)

    def note_progress(self, worker: str, number: int) -> None:
        """Note that a job has begun, progressed or ended on a worker."""
        self._silent_checks.pop(worker, None)
        self._begun_on[number] = worker

    async def watch(self) -> None:
        """Watch the workers, without end.

        Checks are counted, not seconds: after a time for which this process was itself stopped, no worker has hung.
        """
        while True:
            await asyncio.sleep(self._hang_seconds / _CHECKS)
            busy = [worker for worker in self._scheduler.workers.values() if worker.processing]
            self._silent_checks = Counter({each.address: self._silent_checks[each.address] + 1 for each in busy})
            hung = [(each, self._jobs_on(each)) for each in busy if self._silent_checks[each.address] > _CHECKS]
            for worker, numbers in hung:
                await self._give_up(worker, numbers)

    def _jobs_on(self, worker: Any) -> list[int]:
        """Return the jobs that a worker has begun, or those that wait for it if it has begun none."""
        numbers = sorted(number for _, number in (job.key for job in worker.processing))
        return [number for number in numbers if self._begun_on.get(number) == worker.address] or numbers

    async def _give_up(self, worker: Any, numbers: list[int]) -> None:
        """Have other workers do the jobs of a worker. A job with which several have hung ends the work."""
        silence = f"made no progress for {self._hang_seconds:g} s"
        names = few([_shard(self._jobs[number]) for number in numbers])
        _say(
            {
                "left": worker.name,
                "reason": f"{names} {silence}. If its disks or the shared storage hang, leave it out with --exclude",
            }
        )
        for number in numbers:
            self._hung_on[number].append(worker.name)
            if len(hosts := self._hung_on[number]) == _TRIES:
                message = (
                    f"{_shard(self._jobs[number])} {silence} on each of {', '.join(hosts)}. Check whether the storage "
                    "with the text or the shards hangs. Finished shards are kept: run this again to make the rest"
                )
                _say({"error": WorkerLost.__name__, "message": message})
        await self._scheduler.remove_worker(worker.address, stimulus_id="hang")


def _report(progress: Json, hangs: _HangWatch) -> None:
    hangs.note_progress(progress["worker"], progress["job"])
    _say(progress)


def _shard(job: Json) -> str:
    """Return the name of a shard, as in the names of its files."""
    return str(job["description"]).removesuffix(".json")


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
        error, message, worker = _failure(await future.exception(), jobs[number])
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


def _failure(error: BaseException, job: Json) -> tuple[str, str, str]:
    if isinstance(error, JobFailed):
        kind, message, worker = error.args
        return kind, message, worker
    return WorkerLost.__name__, f"{_shard(job)} could not be made: {' '.join(str(error).split())}", ""


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

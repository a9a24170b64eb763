"""Makes shards on all hosts of a hostfile, as ``shards.executor=dask`` asks for.

A job is a shard, which is a range of the documents. Shards of a host that is lost are made by the others. Shards that
are complete are recognised by their descriptions, so after an error, the next run makes only what is missing.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from infra.head.hosts.code_shipping import reached_nodes
from infra.head.hosts.hostfile import chosen_hosts
from infra.head.hosts.nodes import Attendance, attended
from infra.head.tokenising.scheduler_process import require_packages, scheduler_process
from infra.node.channel import Channel
from infra.node.stages.dask_worker import MAKING_PACKAGES, WorkerReady, WorkerStart
from infra.node.stages.makers import own_makers
from t5train.data.native import segmenter_build
from t5train.data.segments import stretches_of
from t5train.data.worker_processes import Advance, Json, Workers
from t5train.errors import HostError, HostUnreachable, StorageError, WorkerLost, error_of
from t5train.files.atomic import write_text
from t5train.files.os_errors import explain
from t5train.spec import ClusterSpec, MachinesSpec, RunSpec, ShardsSpec

_CHECKED_FILES = 1000
_HANG_SECONDS = 900.0
"""A host counts as hung after this time without progress. Usually there is progress twice a second, and every few
seconds while a file is decompressed up to a shard's text. There is none for longer only at the end of a shard, when its
files are written to disk."""
_START_SECONDS = 120.0  # enough to import Dask from a slow disk
_SCHEDULER_CHECKS = 20
_log = logging.getLogger(__name__)


def shard_workers(spec: RunSpec) -> Workers | None:
    """Return who makes the shards of a run; None if this machine does. Whether they can is checked with the first jobs.

    The workers raise the HostError of a host that cannot begin, and WorkerLost when no host is left.
    """
    return None if spec.shards.executor == "local" else partial(_on_hosts, spec.shards, spec.cluster)


def workers_for(shards: ShardsSpec, cluster: ClusterSpec) -> Workers | None:
    """Return who makes shards, as ``shard_workers`` does.

    Raises SpecError if the hostfile is not valid, and InputError if Dask is not installed on this machine.
    """
    if shards.executor == "local":
        return None
    require_packages()
    chosen_hosts(cluster)
    return partial(_on_hosts, shards, cluster)


@dataclass(frozen=True)
class _Event:
    """A report of a host's worker (``host``), or of the scheduler; None: the scheduler has ended."""

    report: WorkerReady | HostError | Json | None
    host: str | None = None


_Events = SimpleQueue[_Event]


def _on_hosts(
    shards: ShardsSpec, cluster: ClusterSpec, function: str, jobs: Sequence[Json], advance: Advance
) -> Iterator[Json]:
    if not jobs:
        return
    require_packages()
    names, events = chosen_hosts(cluster).names, _Events()
    with ExitStack() as stack:
        nodes, lacking = stack.enter_context(reached_nodes(MachinesSpec(cluster=cluster), names))
        for error in lacking.values():
            raise error
        makers, lease_seconds = own_makers(MAKING_PACKAGES, nodes.code), cluster.lease_seconds
        scheduler = stack.enter_context(scheduler_process(lease_seconds, lambda message: events.put(_Event(message))))
        nonce, probe = stack.enter_context(_probe(Path(jobs[0]["folder"])))
        start = WorkerStart(
            name="",
            port=scheduler.port,
            credentials=scheduler.credentials,
            lease_seconds=lease_seconds,
            makers=makers,
            umask=_umask(),
            processes=shards.workers,
            probe=probe,
            nonce=nonce,
            sources=_sources(jobs),
        )
        starts = {name: replace(start, name=name) for name in names}

        def report(host: str, what: Channel | WorkerReady | HostError) -> None:
            if not isinstance(what, Channel):
                events.put(_Event(what, host))

        attendance = Attendance(WorkerReady, "its Dask worker", _START_SECONDS)
        stack.enter_context(attended(nodes, starts, attendance, report))
        _await_workers(names, events)
        scheduler.begin(function, jobs, _HANG_SECONDS)
        yield from _Progress(len(jobs), names, advance).results(events)


def _umask() -> int:
    """Return the umask of this process. ``os.umask`` would change it for a moment, for all threads."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("Umask:")[2].split()[0], 8)


def _sources(jobs: Sequence[Json]) -> dict[str, int]:
    """Return files with the text, spread over all of it, and their sizes. More would delay the start of every host."""
    paths = sorted({source.path for job in jobs for source, _ in stretches_of(job)})
    sample = {*paths[:: len(paths) // _CHECKED_FILES + 1], *paths[-1:]}
    try:
        return {str(path): path.stat().st_size for path in sorted(sample)}
    except OSError as error:
        raise StorageError(f"the text cannot be read: {explain(error)}") from error


@contextmanager
def _probe(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the text and path of a file in a folder, by which hosts notice whether they share it.

    Whoever makes the folder next removes the file if this process is killed, because its name is that of a temporary
    file of ``replacing``.
    """
    nonce = secrets.token_hex(16)
    path = folder / f".hosts.{nonce[:8]}.tmp"
    write_text(path, nonce)
    try:
        yield nonce, path
    finally:
        path.unlink(missing_ok=True)


def _await_workers(names: Sequence[str], events: _Events) -> None:
    """Wait until the workers of all hosts are ready. Raises the error of the first host that cannot begin."""
    ready: dict[str, WorkerReady] = {}
    while len(ready) < len(names):
        event = events.get()
        if isinstance(event.report, HostError):
            raise event.report
        if isinstance(event.report, WorkerReady) and event.host is not None:
            ready[event.host] = event.report
        elif isinstance(event.report, dict):
            raise _left(event.report["left"])
        else:
            raise _lost_scheduler()
    _log.info("processes that tokenise: %s", ", ".join(f"{each.processes} on {name}" for name, each in ready.items()))
    if slow := [name for name, each in ready.items() if not each.is_compiled]:
        _log.warning(
            "%s: text is tokenised at a third of the usual speed or less, because the segmenter is not compiled "
            "there. Install this project there, and run %s; code that --ship-code sends is not compiled",
            ", ".join(slow),
            segmenter_build.COMMAND,
        )


@dataclass
class _Progress:
    """What is done of the jobs, and which hosts are lost."""

    unfinished: int
    hosts: Sequence[str]
    advance: Advance
    done: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    finished: set[int] = field(default_factory=set)
    lost: dict[str, HostError] = field(default_factory=dict)

    def results(self, events: _Events) -> Iterator[Json]:
        """Yield the result of each job. Raises the error of a job that failed, and WorkerLost when no host is left."""
        while self.unfinished:
            event = _next(events)
            if isinstance(event.report, HostError) and event.host is not None:
                self._lose(event.host, event.report)
            elif isinstance(event.report, dict):
                yield from self._of_scheduler(event.report)
            else:
                raise _lost_scheduler()

    def _of_scheduler(self, message: Json) -> Iterator[Json]:
        if "error" in message:
            raise error_of(message["error"], message["message"])
        if "left" in message:
            self._lose(message["left"], _left(message["left"], message.get("reason")))
            return
        job, units = message["job"], message["done"]
        if units > self.done[job]:  # a job that is done again has been counted before
            self.advance(units - self.done[job])
            self.done[job] = units
        if "result" in message and job not in self.finished:
            self.finished.add(job)
            self.unfinished -= 1
            yield message["result"]

    def _lose(self, host: str, error: HostError) -> None:
        if host in self.lost:
            return
        self.lost[host] = error
        if len(self.lost) == len(self.hosts):
            raise WorkerLost(
                f"no host is left to tokenise: {'; '.join(map(str, self.lost.values()))}. Finished shards are kept: "
                "run this again to make the rest, without such hosts (--exclude) or with shards.executor=local"
            )
        _log.warning("%s. The other hosts make its shards", error)


def _next(events: _Events) -> _Event:
    """Wait for an event. Raises WorkerLost if the scheduler has hung: it reports progress, or hosts without any."""
    limit_seconds = 2 * _HANG_SECONDS
    for _ in range(_SCHEDULER_CHECKS):  # one long wait would be over at once after a time for which this was stopped
        with suppress(Empty):
            return events.get(timeout=limit_seconds / _SCHEDULER_CHECKS)
    raise WorkerLost(
        f"Dask's scheduler on this machine has reported nothing for {limit_seconds:g} s. Check whether this machine is "
        "out of memory. Finished shards are kept: run this again to make the rest"
    )


def _left(host: str, reason: str | None = None) -> HostUnreachable:
    return HostUnreachable(f"{host}: {reason or 'its worker has ended, or does not answer'}", [host])


def _lost_scheduler() -> WorkerLost:
    return WorkerLost(
        "Dask's scheduler on this machine has ended. The standard error output of this program shows why; finished "
        "shards are kept, so run this again to make the rest"
    )

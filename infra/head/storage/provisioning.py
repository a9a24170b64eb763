"""Copies the files that ranks begin from to their nodes: only those that a node lacks. Nodes verify them.

Folders that all nodes need are passed from node to node, so that each byte crosses each link once. Parts of a
checkpoint are copied from the gathered copy to the nodes that lack them.
"""

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from infra.head.hosts.nodes import Nodes, conversation
from infra.head.storage.checkpoint_inventory import FoundTag, complete_tags
from infra.head.storage.node_paths import NodeRun, path_of_consolidated, path_of_shards, path_of_start
from infra.head.storage.staged_bytes import StagedBytes, StagingReports
from infra.node.attempts.log_tail import printable
from infra.node.channel import BrokenOff, Channel
from infra.node.node_folders import tag_path
from infra.node.ports import Endpoint
from infra.node.storage.chain_copy import ChainBroken, Listening, ReleaseRun, Stage, Upstream
from infra.node.storage.file_channel import (
    AllArrived,
    BytesArrived,
    Content,
    FileRange,
    FromReceiver,
    Wanted,
    answer,
    files_in,
)
from infra.node.storage.pull import listed
from infra.node.storage.stored_checkpoints import HEAD, ReceiveFiles, inventory_of
from t5train.checkpoint.sidecar import sidecar_name
from t5train.checkpoint.tags import files_read_by
from t5train.errors import HostError
from t5train.files.run_folder import METRICS, WANDB_SENT, step_of
from t5train.progress import Progress
from t5train.records.digests import digest_file
from t5train.records.metrics import drop_after
from t5train.records.stage_records import MANIFEST, Record, Weights
from t5train.spec.rank_job import TrainJob

_AT_ONCE = 16
_log = logging.getLogger(__name__)


def part(tag: FoundTag, names: Iterable[str], ranks: Sequence[int]) -> list[Wanted]:
    """Return what a node needs to resume from a tag: the files ``names`` that its ranks read, and their sidecars.

    In place of a file from a rank of another node, the replica that one of the node's own ranks recorded is accepted.
    """
    replicas = {name: digest for rank in ranks for name, digest in tag.sidecars[rank].replicas.items()}
    files = [
        Wanted(
            *(name, tag.files[name].size, tag.files[name].sha256),
            as_good=(Content(replicas[name].size, replicas[name].sha256),) if name in replicas else (),
        )
        for name in sorted(names)
    ]
    texts = {name: tag.texts[name].encode("utf-8") for name in map(sidecar_name, ranks)}
    return [*files, *(Wanted(name, len(text), sha256(text).hexdigest()) for name, text in texts.items())]


def restore(
    nodes: Nodes,
    run_name: str,
    relative_path: str,
    parts: Mapping[str, Sequence[Wanted]],
    source: Path,
    reports: StagingReports | None = None,
    recorded: Collection[str] | None = None,
) -> None:
    """Copy from the folder ``source`` to each host the files of its part that are missing or damaged there.

    ``relative_path`` is the folder on hosts, such as ``node_folders.tag_path``. Files are copied in the order of the
    part, so sidecars come last, and are verified. Files on hosts that cannot be read now are set aside, and so are
    pickles that are not in ``recorded``, if given. Raises the first HostError, after all hosts have ended.
    """
    arrivals = _Arrivals("checkpoint bytes restored", reports or StagingReports(), parts)

    def give(host: str) -> None:
        names = None if recorded is None else tuple(sorted(recorded))
        request = ReceiveFiles(nodes.store, run_name, relative_path, tuple(parts[host]), names)
        with conversation(nodes, host, request) as node:
            _serve(node, host, source, arrivals)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="restore") as threads:
        list(threads.map(give, parts))


class _Arrivals:
    """Counts and reports the bytes that arrive at hosts, of the files that each host needs."""

    def __init__(self, what: str, reports: StagingReports, wanted: Mapping[str, Sequence[Wanted]]) -> None:
        self._what, self._reports = what, reports
        needed = {host: sum(each.size for each in files) for host, files in wanted.items()}
        for host, count in needed.items():
            reports.staged.add(host, needed=count)
        self._total, self._done = sum(needed.values()), 0
        self._lock = threading.Lock()

    def add(self, host: str, arrived: BytesArrived) -> None:
        """Report that more bytes have arrived at a host."""
        self._reports.staged.add(host, copied=arrived.copied, already_there=arrived.already_there)
        with self._lock:
            self._done += arrived.copied + arrived.already_there
            self._reports.progress(self._what, min(self._done, self._total), self._total)


def _serve(node: Channel, host: str, source: Path, arrivals: _Arrivals) -> None:
    """Serve files of the folder ``source`` until a node has all."""
    while (message := node.receive(FromReceiver)) is not None:
        match message:
            case FileRange():
                answer(node, message, files_in(source))
            case BytesArrived():
                arrivals.add(host, message)
            case ChainBroken(reason):
                _log.warning(
                    "%s copies from the head, because it cannot read from the previous node: %s",
                    host,
                    printable(reason),
                )
            case AllArrived():
                return
    raise BrokenOff("the process there ended before it had received all files")


def files_of_record(record: Record) -> list[Wanted]:
    """Return the files of a record to stage, with the manifest last."""
    digests = {name: digest_file(record.path / name) for name in [*sorted(record.files), MANIFEST]}
    return [Wanted.of(name, digest) for name, digest in digests.items()]


def stage_folder(
    nodes: Nodes,
    source: Path,
    files: Sequence[Wanted],
    relative_path: str,
    run_name: str,
    reports: StagingReports | None = None,
    beside: Mapping[str, int] | None = None,
) -> None:
    """Copy these files of the folder ``source`` to ``relative_path`` on every node, verify and pin them.

    ``beside`` has the bytes that the run will write in addition, by host: its disk must have space for them, too. Files
    that a node already has complete are not sent again, and interrupted transfers resume. A node that cannot reach the
    previous one copies from the head. Raises the HostError of the first node that fails.
    """
    if not nodes.hosts:
        return
    arrivals = _Arrivals("bytes staged on hosts", reports or StagingReports(), dict.fromkeys(nodes.hosts, files))
    staging = _Staging(nodes, source, arrivals)
    token, bytes_of = secrets.token_hex(32), beside or {}
    requests = [
        Stage(nodes.store, run_name, relative_path, tuple(files), token, bytes_of.get(host, 0)) for host in nodes.hosts
    ]
    with ThreadPoolExecutor(len(nodes.hosts), thread_name_prefix="stage") as threads:
        results = [threads.submit(staging.one, number, request) for number, request in enumerate(requests)]
    for result in results:
        result.result()


def release(nodes: Nodes, run_name: str) -> dict[str, HostError | None]:
    """Allow nodes to remove what was staged for a run that has ended; returns each node's error, or None."""
    answers = nodes.ask(ReleaseRun(nodes.store, run_name), deadline_seconds=60.0)
    return {host: each if isinstance(each, HostError) else None for host, each in answers.items()}


class _Staging:
    """A chain of nodes, each of which copies files from the previous one."""

    def __init__(self, nodes: Nodes, source: Path, arrivals: _Arrivals) -> None:
        self._nodes, self._source, self._arrivals = nodes, source, arrivals
        self._servers: list[Future[Endpoint | None]] = [Future() for _ in nodes.hosts]
        self._ended = [threading.Event() for _ in nodes.hosts]

    def one(self, number: int, request: Stage) -> None:
        """Stage files on one node, and keep its session open until the next node has them, too."""
        host = self._nodes.hosts[number]
        try:
            with conversation(self._nodes, host, request) as node:
                self._servers[number].set_result(_server(node))
                node.send(Upstream(self._servers[number - 1].result() if number else None))
                _serve(node, host, self._source, self._arrivals)
                self._ended[number].set()
                if number + 1 < len(self._nodes.hosts):
                    self._ended[number + 1].wait()
        finally:
            self._ended[number].set()
            if not self._servers[number].done():
                self._servers[number].set_result(None)


def _server(node: Channel) -> Endpoint:
    """The endpoint where the node serves files to other nodes."""
    message = node.receive(Listening)
    if message is None:
        raise BrokenOff("the process there ended before it started to serve files")
    return message.server


def provide(run: NodeRun, job: TrainJob, progress: Progress, staged: StagedBytes) -> None:
    """Copy to each node the files that its ranks read for ``job``, which has the head's paths.

    Then ``staged`` has the bytes of this attempt alone. Raises HostError.
    """
    staged.begin()
    reports = StagingReports(progress, staged)
    _stage(run, job.shards_folder, files_of_record(job.shards()), path_of_shards(job), reports)
    if (consolidated := job.consolidated) is not None:
        files = files_of_record(Weights.load(consolidated.folder))
        _stage(run, consolidated.folder, files, path_of_consolidated(consolidated), reports)
    elif job.resume_tag is not None:
        _restore(run, job.resume_tag, reports)
    if (model := job.begins_from) is not None:
        _stage(run, model.folder, listed(model.folder, _visible(model.folder)), path_of_start(model), reports)
    _continue_metrics(run, job)


def _stage(run: NodeRun, folder: Path, files: list[Wanted], relative_path: str, reports: StagingReports) -> None:
    stage_folder(run.nodes, folder, files, relative_path, run.name, reports, run.checkpoint_bytes)


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _restore(run: NodeRun, name: str, reports: StagingReports) -> None:
    tag = next(tag for tag in complete_tags({HEAD: inventory_of(run.checkpoints)}) if tag.name == name)
    parts = {host.name: part(tag, _read_by(tag, run.ranks_of(host)), run.ranks_of(host)) for host in run.hosts.all}
    relative_path = tag_path(run.name, name)
    restore(run.nodes, run.name, relative_path, parts, run.checkpoints / name, reports, tag.files)


def _read_by(tag: FoundTag, ranks: range) -> set[str]:
    return {name for rank in ranks for name in files_read_by(rank, tag.sidecars)}


def _continue_metrics(run: NodeRun, job: TrainJob) -> None:
    """Copy the head's metrics to the first host, where rank 0 continues them. Creates the run's folder on all nodes."""
    step = job.consolidated.clock.step if job.consolidated else step_of(job.resume_tag) if job.resume_tag else 0
    drop_after(run.folder / METRICS, step)
    names = [METRICS, WANDB_SENT]
    wanted = {host: listed(run.folder, names) if host == run.first else [] for host in run.nodes.hosts}
    restore(run.nodes, run.name, run.relative_path, wanted, run.folder)

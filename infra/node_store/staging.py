"""The head brings a folder to the own disks of all nodes, each byte over its own link once: nodes pass it on."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infra.node_store.conversation import conversation, serve
from infra.node_store.nodes import Nodes
from infra.node_store.pulling import Wanted
from infra.node_store.wire import BrokenOff, Channel, Message
from t5train.errors import HostError
from t5train.progress import Progress, silent
from t5train.records import MANIFEST, Record, digest_file


def files_of_record(record: Record) -> list[Wanted]:
    """What to stage of a record that lies in one folder: its files, and the manifest last."""
    digests = {name: digest_file(record.path / name) for name in [*sorted(record.files), MANIFEST]}
    return [Wanted.of(name, digest) for name, digest in digests.items()]


def stage_folder(
    nodes: Nodes,
    source: Path,
    files: Sequence[Wanted],
    place: str,
    run_name: str,
    progress: Progress = silent,
    beside: Mapping[str, int] | None = None,
) -> None:
    """Have every node hold these files of the folder ``source`` in its ``place``, verified, pinned for the run.

    Each keeps room for as many bytes as the run will write ``beside`` on that host. What a node has whole is not sent
    again, and what broke off goes on where it stood. A node that does not reach the one before it takes from the head.
    Raises the HostError of the first node that does not get there.
    """
    if not nodes.hosts:
        return
    staging = _Staging(nodes, source, files, progress)
    request = nodes.request(
        place=place, run_name=run_name, token=secrets.token_hex(32), files=[each.to_json() for each in files]
    )
    requests = [{**request, "beside_bytes": (beside or {}).get(host, 0)} for host in nodes.hosts]
    with ThreadPoolExecutor(len(nodes.hosts), thread_name_prefix="stage") as threads:
        results = [threads.submit(staging.one, number, request) for number, request in enumerate(requests)]
    for result in results:
        result.result()


def release(nodes: Nodes, run_name: str) -> dict[str, HostError | None]:
    """A run has ended: what was staged for it may go when room is needed; the error of each node that was not told."""
    answers = nodes.ask("release", lambda _: nodes.request(run_name=run_name), deadline_seconds=60.0)
    return {host: each if isinstance(each, HostError) else None for host, each in answers.items()}


class _Staging:
    """A chain of nodes."""

    def __init__(self, nodes: Nodes, source: Path, files: Sequence[Wanted], progress: Progress) -> None:
        self._nodes, self._source, self._progress = nodes, source, progress
        self._servers: list[Future[Message | None]] = [Future() for _ in nodes.hosts]
        self._ended = [threading.Event() for _ in nodes.hosts]
        self._total, self._done = len(nodes.hosts) * sum(each.size for each in files), 0
        self._lock = threading.Lock()

    def one(self, number: int, request: Message) -> None:
        """Talk with a node until it has everything, and the next one, too."""
        host = self._nodes.hosts[number]
        try:
            with conversation(self._nodes, host, "stage", request) as channel:
                self._servers[number].set_result(_server(channel))
                channel.say({"upstream": self._servers[number - 1].result() if number else None})
                serve(channel, host, self._source, self._add)
                self._ended[number].set()
                if number + 1 < len(self._nodes.hosts):
                    self._ended[number + 1].wait()
        finally:
            self._ended[number].set()
            if not self._servers[number].done():
                self._servers[number].set_result(None)

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress("bytes staged on hosts", min(self._done, self._total), self._total)


def _server(channel: Channel) -> Message:
    """Where the node serves others."""
    message = channel.hear()
    if message is None:
        raise BrokenOff("it ended before it had begun")
    server: Message = message["listening"]
    return server

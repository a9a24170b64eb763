"""A node that was replaced, wiped or damaged gets its part of a checkpoint back from the gathered copy."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from infra.node_store.conversation import conversation, serve
from infra.node_store.nodes import Nodes
from infra.node_store.pulling import Wanted
from infra.node_store.tags import FoundTag
from t5train.progress import Progress, silent
from t5train.sidecar import sidecar_name

_AT_ONCE = 16


def part(tag: FoundTag, names: Iterable[str], ranks: Sequence[int]) -> list[Wanted]:
    """What a node must have to resume from a tag: the files ``names`` that its ranks read, and its ranks' sidecars.

    In place of a file of another node's rank, the replica that one of its own ranks recorded will do.
    """
    replicas = {name: digest for rank in ranks for name, digest in tag.sidecars[rank].replicas.items()}
    files = [
        Wanted(
            *(name, tag.files[name].size, tag.files[name].sha256),
            as_good=((replicas[name].size, replicas[name].sha256),) if name in replicas else (),
        )
        for name in sorted(names)
    ]
    texts = {name: tag.texts[name].encode("utf-8") for name in map(sidecar_name, ranks)}
    return [*files, *(Wanted(name, len(text), sha256(text).hexdigest()) for name, text in texts.items())]


def restore(
    nodes: Nodes,
    run_name: str,
    place: str,
    parts: Mapping[str, Sequence[Wanted]],
    source: Path,
    progress: Progress = silent,
    recorded: Collection[str] | None = None,
) -> None:
    """Give each host what it lacks, or has damaged, of its part: copies of files of the folder ``source``, verified.

    ``place`` is the folder there, such as ``paths.tag_place``. Files come in the order of the part, so sidecars last.
    A copy there that cannot be read now is moved aside, and so is a pickle that is not ``recorded``, where that is
    given. Raises the first HostError, after all hosts have ended.
    """
    telling = _Restored(progress, sum(each.size for wanted in parts.values() for each in wanted))

    def give(host: str) -> None:
        files = [each.to_json() for each in parts[host]]
        names = None if recorded is None else sorted(recorded)
        request = nodes.request(run_name=run_name, place=place, files=files, recorded=names)
        _give(nodes, host, request, source, telling)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="restore") as threads:
        list(threads.map(give, parts))


class _Restored:
    """How far all hosts are."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many bytes more are where they belong."""
        with self._lock:
            self._done += count
            self._progress("checkpoint bytes restored", min(self._done, self._total), self._total)


def _give(nodes: Nodes, host: str, request: dict[str, Any], source: Path, restored: _Restored) -> None:
    with conversation(nodes, host, "receive", request) as channel:
        serve(channel, host, source, restored.add)

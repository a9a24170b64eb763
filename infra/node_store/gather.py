"""The head takes from nodes what it lacks of a checkpoint: from all of them at once, each file verified as it comes."""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.node_store.conversation import conversation
from infra.node_store.inventory import HEAD
from infra.node_store.nodes import Nodes
from infra.node_store.paths import tag_place
from infra.node_store.pulling import Wanted, Watcher, is_whole, missing_bytes, pull
from infra.node_store.tags import FoundTag
from infra.node_store.wire import Refused
from t5train.atomic import sync_folder, write_text
from t5train.cores import num_cores
from t5train.errors import DigestMismatch, HostError, IncompleteCheckpoint, T5TrainError
from t5train.progress import Progress, silent
from t5train.storage_space import require_space

_AT_ONCE = 16
"""Nodes that send at the same time."""


def gather(nodes: Nodes, run_name: str, tag: FoundTag, checkpoints: Path, progress: Progress = silent) -> None:
    """Make ``checkpoints / tag`` complete: every file verified, sidecars last; gone on with after a break.

    Raises IncompleteCheckpoint when a file is nowhere as it was recorded, naming where it was looked for, StorageError
    when the disk is full, and HostError when a node that alone has something does not send it.
    """
    folder = checkpoints / tag.name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_strangers(folder, tag)
    lacking = _lacking(folder, _wanted(tag), progress)
    require_space(folder, missing_bytes(folder, lacking), f"checkpoint {tag.name}")
    _Gathering(nodes, tag_place(run_name, tag.name), folder, lacking, progress).run(tag.places)
    for name, text in sorted(tag.texts.items()):
        if not (folder / name).exists():  # else it is this one: others have been removed
            write_text(folder / name, text)
    sync_folder(checkpoints)


def _wanted(tag: FoundTag) -> list[Wanted]:
    return [Wanted.of(name, digest) for name, digest in sorted(tag.files.items())]


def _lacking(folder: Path, wanted: list[Wanted], progress: Progress) -> list[Wanted]:
    """What is not there whole; what is there is read, one file on each core."""
    total, done, missing = sum(each.size for each in wanted), 0, []
    with ThreadPoolExecutor(num_cores()) as threads:
        for each, whole in zip(wanted, threads.map(lambda one: is_whole(folder, one), wanted), strict=True):
            done += each.size
            progress("checkpoint bytes verified", done, total)
            if not whole:
                missing.append(each)
    return missing


def _remove_strangers(folder: Path, tag: FoundTag) -> None:
    """What was gathered of another saving of this tag: its sidecars first, so it is never taken for complete."""
    for path in folder.glob("rank-*.json"):
        if tag.texts.get(path.name, "").encode() != path.read_bytes():
            path.unlink()
    for path in folder.glob("*.pt"):
        if path.name not in tag.files:
            path.unlink()


class _Gathering(Watcher):
    """Files still to come, and why those that did not come did not."""

    def __init__(self, nodes: Nodes, place: str, folder: Path, lacking: list[Wanted], progress: Progress) -> None:
        self._nodes, self._place, self._folder, self._progress = nodes, place, folder, progress
        self._lacking = {each.name: each for each in lacking}
        self._total, self._done = sum(each.size for each in lacking), 0
        self._failures: dict[str, list[T5TrainError]] = {each.name: [] for each in lacking}
        self._lock = threading.Lock()

    def run(self, places: Mapping[str, Iterable[str]]) -> None:
        """Ask for each file where it is, then where else it is."""
        left = {name: [place for place in places[name] if place in self._nodes.hosts] for name in self._lacking}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="gather") as threads:
            while self._lacking:
                for name in self._lacking:
                    if not left[name]:
                        raise self._failure(name, places[name])
                list(threads.map(lambda shares: self._from(*shares), self._shares(left).items()))

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:  # noqa: ARG002 - as Watcher has it
        """Count what a broken-off transfer left."""
        self.grown(wanted, size)

    def grown(self, wanted: Wanted, count: int) -> None:  # noqa: ARG002 - as Watcher has it
        """Tell how far all is."""
        with self._lock:
            self._done += count
            self._progress("checkpoint bytes gathered", min(self._done, self._total), self._total)

    def whole(self, wanted: Wanted) -> None:
        """One less to come."""
        with self._lock:
            del self._lacking[wanted.name]

    def _shares(self, left: dict[str, list[str]]) -> dict[str, list[Wanted]]:
        """Who is to send what: of those that have a file the one with the least to send; taken off ``left``."""
        shares: dict[str, list[Wanted]] = {}
        for name, wanted in self._lacking.items():
            host = min(left[name], key=lambda one: sum(each.size for each in shares.get(one, [])))
            left[name].remove(host)
            shares.setdefault(host, []).append(wanted)
        return shares

    def _from(self, host: str, share: list[Wanted]) -> None:
        try:
            with conversation(self._nodes, host, "send", self._nodes.request(place=self._place)) as channel:
                for each in share:
                    try:
                        pull(channel.fetch, [each], self._folder, self)
                    except (DigestMismatch, Refused) as error:
                        self._failures[each.name].append(error)
        except HostError as error:
            for each in share:
                self._failures[each.name].append(error)

    def _failure(self, name: str, places: Iterable[str]) -> T5TrainError:
        for error in self._failures[name]:
            if isinstance(error, HostError):
                return error
        where = ", ".join(place or "the head" for place in places if place != HEAD) or "no node"
        said = "; ".join(map(str, self._failures[name])) or "what the head has of it is damaged"
        return IncompleteCheckpoint(f"{name} is nowhere as it was recorded ({where} had it): {said}")

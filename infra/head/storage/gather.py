"""Copies the files of a checkpoint that the head lacks from all nodes at once, and verifies each file as it arrives.

Metrics and the witness are collected from one node.
"""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.head.hosts.nodes import Nodes, conversation
from infra.head.storage.checkpoint_inventory import FoundTag
from infra.node.node_folders import tag_path
from infra.node.storage.file_channel import CannotRead, Refused, Wanted, Watcher, fetch_over
from infra.node.storage.pull import is_whole, missing_bytes, pull
from infra.node.storage.stored_checkpoints import HEAD, ListFiles, SendFiles
from t5train.checkpoint.sidecar import is_sidecar
from t5train.errors import DigestMismatch, HostError, IncompleteCheckpoint, RemoteFailed, T5TrainError, Unreadable
from t5train.files.atomic import set_aside, sync_folder, write_text
from t5train.files.presence import is_there, names_in, reading
from t5train.files.run_folder import SET_ASIDE, unlisted
from t5train.host_resources import num_cores, require_space
from t5train.progress import Progress, silent

_AT_ONCE = 16
"""How many nodes send at the same time."""


def gather(nodes: Nodes, run_name: str, tag: FoundTag, checkpoints: Path, progress: Progress = silent) -> None:
    """Complete the gathered copy of a tag in ``checkpoints``. Interrupted transfers resume.

    Every file is verified, and sidecars are written last. Files of another save of this tag, and files that cannot be
    read now, are set aside, not removed. Raises IncompleteCheckpoint if no intact copy of a file is found, with the
    locations that were tried; Unreadable if this cannot be determined; StorageError if the disk is full; and HostError
    if the only node that has a file does not send it.
    """
    folder = checkpoints / tag.name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _move_strangers(folder, tag)
    wanted = [Wanted.of(name, digest) for name, digest in sorted(tag.files.items())]
    lacking = _lacking(folder, wanted, progress)
    require_space(folder, missing_bytes(folder, lacking.wanted), f"checkpoint {tag.name}")
    _Gathering(nodes, tag_path(run_name, tag.name), folder, lacking, progress).run(tag.places)
    for name, text in sorted(tag.texts.items()):
        if not is_there(folder / name):  # a sidecar that is there is this one: others were set aside
            write_text(folder / name, text)
    sync_folder(checkpoints)


@dataclass(frozen=True)
class _Lacking:
    """The files still to gather, and those of them that are present but cannot be read now."""

    wanted: list[Wanted]
    unreadable: Mapping[str, Unreadable]


def _lacking(folder: Path, wanted: list[Wanted], progress: Progress) -> _Lacking:
    """The files that are missing or damaged. Files that are present are verified, one on each core at a time."""
    total, done, missing = sum(each.size for each in wanted), 0, []
    unreadable = dict[str, Unreadable]()

    def whole(each: Wanted) -> bool:
        try:
            return is_whole(folder, each)
        except Unreadable as error:
            unreadable[each.name] = error
            return False

    with ThreadPoolExecutor(num_cores()) as threads:
        for each, there in zip(wanted, threads.map(whole, wanted), strict=True):
            done += each.size
            progress("checkpoint bytes verified", done, total)
            if not there:
                missing.append(each)
    return _Lacking(missing, unreadable)


def _move_strangers(folder: Path, tag: FoundTag) -> None:
    """Set aside what was gathered of another save of this tag: sidecars first, so it never seems to be complete."""
    names = names_in(folder)
    for name in (name for name in names if is_sidecar(name)):
        if not _holds(folder / name, tag.texts.get(name)):
            set_aside(
                folder / name, _aside(folder), f"it belongs to another save of {tag.name} than the one being gathered"
            )
    for name in unlisted(names, tag.files):
        set_aside(folder / name, _aside(folder), f"no rank recorded it as a part of {tag.name}")


def _holds(path: Path, text: str | None) -> bool:
    try:
        with reading(path):
            return text is not None and path.read_bytes() == text.encode()
    except Unreadable:
        return False


def _aside(folder: Path) -> Path:
    """The head's set-aside folder of the run."""
    return folder.parent.parent / SET_ASIDE


class _Gathering(Watcher):
    """Fetches the files that are still to gather, and keeps the failures of each."""

    def __init__(self, nodes: Nodes, relative_path: str, folder: Path, lacking: _Lacking, progress: Progress) -> None:
        self._nodes, self._folder_of, self._folder, self._progress = nodes, relative_path, folder, progress
        self._lacking = {each.name: each for each in lacking.wanted}
        self._total = sum(each.size for each in lacking.wanted)
        self._arrived: dict[str, int] = {}
        self._failures: dict[str, list[T5TrainError]] = {each.name: [] for each in lacking.wanted}
        self._unreadable = lacking.unreadable
        self._lock = threading.Lock()

    def run(self, places: Mapping[str, Iterable[str]]) -> None:
        """Request each file from a node that has it, then from the other nodes that do."""
        left = {name: [place for place in places[name] if place in self._nodes.hosts] for name in self._lacking}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="gather") as threads:
            while self._lacking:
                for name in self._lacking:
                    if not left[name]:
                        raise self._failure(name, places[name])
                list(threads.map(lambda shares: self._from(*shares), self._shares(left).items()))

    def begun(self, wanted: Wanted, size: int) -> None:
        """Count the bytes that an interrupted transfer left. Bytes that arrived damaged before no longer count."""
        with self._lock:
            self._arrived[wanted.name] = 0
        self.grown(wanted, size)

    def grown(self, wanted: Wanted, count: int) -> None:
        """Report the progress of all files."""
        with self._lock:
            self._arrived[wanted.name] += count
            self._progress("checkpoint bytes gathered", sum(self._arrived.values()), self._total)

    def whole(self, wanted: Wanted) -> None:
        """Count the file as gathered."""
        with self._lock:
            del self._lacking[wanted.name]

    def _shares(self, left: dict[str, list[str]]) -> dict[str, list[Wanted]]:
        """Assign each file to a host that has it: the one with the fewest bytes to send so far.

        That host is removed from ``left`` for this file.
        """
        shares: dict[str, list[Wanted]] = {}
        for name, wanted in self._lacking.items():
            host = min(left[name], key=lambda one: sum(each.size for each in shares.get(one, [])))
            left[name].remove(host)
            shares.setdefault(host, []).append(wanted)
        return shares

    def _from(self, host: str, share: list[Wanted]) -> None:
        try:
            with conversation(self._nodes, host, SendFiles(self._nodes.store, self._folder_of)) as node:
                for each in share:
                    try:
                        pull(fetch_over(node), [each], self._folder, self, _aside(self._folder))
                    except (DigestMismatch, Refused) as error:
                        self._failures[each.name].append(error)
        except HostError as error:
            for each in share:
                self._failures[each.name].append(error)

    def _failure(self, name: str, places: Iterable[str]) -> T5TrainError:
        for error in self._failures[name]:
            if isinstance(error, HostError):
                return error
        cannot = [str(each) for each in self._failures[name] if isinstance(each, CannotRead)]
        if name in self._unreadable:
            cannot.append(str(self._unreadable[name]))
        if cannot:
            return Unreadable(f"{name} may be intact, but cannot be read now: {'; '.join(cannot)}")
        where = ", ".join(place or "the head" for place in places if place != HEAD) or "no node"
        said = "; ".join(map(str, self._failures[name])) or "the head's copy is damaged"
        return IncompleteCheckpoint(f"no intact copy of {name} was found (copies were on {where}): {said}")


_DEADLINE_SECONDS = 600.0


def collect(nodes: Nodes, host: str, relative_path: str, names: Iterable[str], into: Path) -> list[str]:
    """Copy files and whole folders called ``names`` from ``relative_path`` on a host into the folder ``into``.

    Names that do not exist there are skipped. Returns the names of the files that were copied. A file that is growing
    is copied as it was at one moment. Raises HostError; and DigestMismatch or Refused, after all other files were
    copied, if a file was replaced meanwhile.
    """
    asked = tuple(names)
    folders = tuple(f"{name}/" for name in asked)
    answer = nodes.on(host).ask(ListFiles(nodes.store, relative_path, asked), _DEADLINE_SECONDS)[host]
    if isinstance(answer, HostError):
        raise answer
    if strange := [each.name for each in answer.files if each.name not in asked and not each.name.startswith(folders)]:
        raise RemoteFailed(f"{host} sent {strange[0]!r}, which was not requested. Check which code runs there", [host])
    if not answer.files:  # a conversation takes a second on a busy host
        return []
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    replaced: DigestMismatch | Refused | None = None
    with conversation(nodes, host, SendFiles(nodes.store, relative_path)) as node:
        for each in answer.files:
            try:
                pull(fetch_over(node), [each], into, Watcher())
            except (DigestMismatch, Refused) as error:
                replaced = replaced or error
    if replaced is not None:
        raise replaced
    return [each.name for each in answer.files]

"""Downloads files to a folder: in parallel, each byte hashed as it arrives, resumable after any end of the process.

While a file is incomplete, it is called ``.{name}.part``, and a note of it says how many bytes of which state are known
to be on disk; another start continues there. A complete one gets its name and a note (``kept_downloads``).
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from t5train.data.download.kept_downloads import (
    Note,
    forget_completed,
    is_current,
    locked,
    note_completed,
    read_note,
    write_note,
)
from t5train.data.download.parquet_columns import Columns, ReadRange, fetch_columns, needed_columns
from t5train.data.download.remote_reading import (
    TRIES,
    Backoff,
    Readers,
    RemoteFile,
    is_for_threads,
    is_hub,
    is_interrupted,
    look_at,
    message_of,
    read_range,
    status_of,
    takes_ranges,
)
from t5train.errors import InputError, StorageError
from t5train.files.atomic import sync_folder, write_json
from t5train.files.os_errors import reason
from t5train.host_resources import num_cores, require_free_space
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, digest_file
from t5train.records.locations import Counted, redacted

CONNECTIONS = 8
BLOCK_BYTES = 16 << 20
"""Read with one request. There are at most two for each connection in memory."""
DURABLE_BYTES = 64 << 20
"""After so many bytes, a part of a file is written to disk and noted, so that another start continues there."""
_REPORT_SECONDS = 0.5
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A remote file, and where it is to be on this machine."""

    remote: str
    local: Path
    known: FileDigest | None = None
    """What its content is known to be, whatever the store says."""
    columns: Sequence[str] = ()
    """Of a .parquet file: the columns that are read. Others are not fetched if they are most of the file."""


class _Missing(NamedTuple):
    """A file that is not on this machine, or only in part."""

    file: RemoteFile
    local: Path
    expected: str | None
    """Its sha256, if the store or an earlier download of the same state says it."""
    has_ranges: bool
    part_bytes: int
    """Bytes of it that are on disk."""
    columns: Columns | None
    """Of a .parquet file: the columns to fetch in place of the whole file."""

    @property
    def size_bytes(self) -> int | None:
        """How much is to be fetched in all; None if the store does not report it."""
        return self.file.size if self.columns is None else self.columns.size_bytes

    @property
    def path(self) -> Path:
        """Where it is until it is complete."""
        return self.local.with_name(f".{self.local.name}{'.part' if self.columns is None else '.columns.tmp'}")

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each block that is not on disk."""
        size = self.file.size or 0
        return ((start, min(start + BLOCK_BYTES, size)) for start in range(self.part_bytes, size, BLOCK_BYTES))


def download(filesystem: Any, folder: Path, wanted: Sequence[Wanted], progress: Progress) -> None:
    """Download the files that are not on this machine in their present state.

    Only one process at a time downloads to ``folder``, which contains all of them; others wait. Copies are verified
    against the digests in their notes, and a damaged one is fetched again.

    Raises InputError if a file cannot be transferred, differs twice in a row from its known digest, or changes
    meanwhile, and StorageError if the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), _Session(filesystem, progress) as session:
        for parent in {each.local.parent for each in wanted}:
            for leftover in parent.glob(".*.tmp"):  # of a process that was killed
                leftover.unlink()
        missing = session.missing(wanted)
        needed = sum((each.size_bytes or 0) - each.part_bytes for each in missing)
        require_free_space(folder, needed, f"the download of {quantity(len(missing), 'file')}")
        if missing:
            forget_completed(folder)
            session.fetch(missing)
        note_completed(folder, [each.local for each in wanted])


class _Session:
    """Looks at remote files and fetches them. Threads read ahead; everything else happens in the caller's thread.

    A context manager that ends the threads.
    """

    def __init__(self, filesystem: Any, progress: Progress) -> None:
        self._filesystem, self._progress = filesystem, progress
        self._backoff = Backoff()
        # Other filesystems must be used by one thread at a time.
        self._readers = Readers(CONNECTIONS if is_for_threads(filesystem) else 1)
        self._missing: Sequence[_Missing] = ()
        self._done = self._finished = 0
        self._total: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._backoff.give_up()
        self._readers.close()

    def missing(self, wanted: Sequence[Wanted]) -> list[_Missing]:
        """Return the files to fetch: those of which no undamaged copy of the present state is here."""
        self._filesystem.invalidate_cache()
        self._total = len(wanted)
        files = self._all(partial(self._look, each.remote) for each in wanted)
        with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
            copies = list(pool.map(lambda file, each: is_current(each.local, file, each.known), files, wanted))
        absent = [pair for pair, is_there in zip(zip(files, wanted, strict=True), copies, strict=True) if not is_there]
        return self._all(partial(self._absent, *pair) for pair in absent)

    def _look(self, path: str) -> RemoteFile:
        return self._retried(path, lambda: look_at(self._filesystem, path))

    def _absent(self, file: RemoteFile, wanted: Wanted) -> _Missing:
        """Return what is to be fetched of a file."""
        local, known, note = wanted.local, wanted.known, read_note(wanted.local)
        noted = note.content.sha256 if note is not None and note.is_of(file) and note.whole is None else None
        expected = known.sha256 if known is not None else file.sha256 or noted
        has_ranges = self._retried(file.path, lambda: takes_ranges(self._filesystem, file))
        # Only if the content of the whole file has a known digest, which then identifies the columns, too.
        if wanted.columns and file.sha256 and has_ranges:
            columns = needed_columns(self._ranges_of(file), file.size or 0, wanted.columns)
            if columns is not None:
                return _Missing(file, local, None, has_ranges, 0, columns)
        can_resume = has_ranges and (file.reports_changes or expected is not None)
        missing = _Missing(file, local, expected, has_ranges, 0, None)
        return missing._replace(part_bytes=_bytes_on_disk(missing) if can_resume else 0)

    def fetch(self, missing: Sequence[_Missing]) -> None:
        """Fetch all. A file whose content is not the expected one is set aside, and fetched once more."""
        self._missing = missing
        for each in missing:
            each.local.parent.mkdir(parents=True, exist_ok=True)
        sizes = [each.size_bytes for each in missing]
        self._total = None if None in sizes else sum(size or 0 for size in sizes)
        self._done = sum(each.part_bytes for each in missing)
        blocks = self._blocks(missing)
        for each in missing:
            if not self._fetched(each, blocks):
                again = each._replace(part_bytes=0)
                self._done -= each.file.size or 0
                if not self._fetched(again, self._blocks([again])):
                    raise InputError(
                        f"{redacted(each.file.path)} was downloaded twice, and both times its sha256 was not "
                        f"{each.expected}, as expected. The last copy is kept as {each.local}.bad. If the store's file "
                        "was replaced on purpose, set corpus.revision to a new name"
                    )
            self._finished += 1

    def _fetched(self, each: _Missing, blocks: Iterator[bytes]) -> bool:
        """Fetch one file. Returns False if its content is not the expected one, and sets it aside then."""
        content = self._content(each, blocks)
        if each.columns is None and each.file.size not in {None, content.size}:
            _remove(each)
            raise InputError(
                f"{redacted(each.file.path)} ended after {content.size} of {each.file.size} bytes: try again"
            )
        if each.expected is not None and content.sha256 != each.expected:
            bad = each.local.with_name(f"{each.local.name}.bad")  # nothing reads it any more, but its user may
            each.path.replace(bad)
            _remove(each)
            _log.warning("%s has sha256 %s, not %s; the copy is kept as %s", redacted(each.file.path), content.sha256,
                         each.expected, bad)  # fmt: skip
            return False
        if each.expected is None and each.columns is None and self._has_changed(each):
            _remove(each)
            raise InputError(f"{redacted(each.file.path)} was changed while it was downloaded: try again")
        _keep(each, content)
        return True

    def _content(self, each: _Missing, blocks: Iterator[bytes]) -> FileDigest:
        """Write what is to be fetched of a file to its path, and return the digest of it."""
        if each.columns is None and each.has_ranges:
            with _PartialFile(each) as part:
                for _ in each.ranges():
                    content = next(blocks)
                    part.write(content)
                    self._report(len(content))
            return part.digest()
        if each.columns is not None:
            next(blocks)  # when a thread has written them
        else:
            counted = Counted(f"bytes of {each.local.name} downloaded", self._progress)
            fetch = partial(self._filesystem.get_file, each.file.path, str(each.path), callback=counted)
            self._retried(each.file.path, fetch)  # from the beginning at each try
        self._report(each.size_bytes or 0)
        with _disk_errors(each.path), open(each.path, "rb") as file:
            os.fsync(file.fileno())
        return digest_file(each.path)

    def _has_changed(self, each: _Missing) -> bool:
        """Whether the store has another state of a file now. Files of the Hub are those of one listing."""
        if is_hub(self._filesystem):
            return False
        self._filesystem.invalidate_cache()
        return self._look(each.file.path).state != each.file.state

    def _retried(self, path: str, act: Callable[[], _Result]) -> _Result:
        """Return the result of a request about a file, tried again if it fails for a reason that may pass.

        Converts the error of a server, which may show a signed URL, or of a transfer that was interrupted too often.
        """
        try:
            return self._backoff.retried(act, redacted(path), is_interrupted)
        except Exception as error:
            failed = f"{redacted(path)} cannot be downloaded: {message_of(error)}"
            if is_interrupted(error):
                failed += f", at each of {TRIES} tries. Start again later: what has arrived is kept"
                raise InputError(failed) from None
            if status_of(error) is None:
                raise
            raise InputError(f"{failed}. Check the URL, and whether the server gives you access") from None

    def _ranges_of(self, file: RemoteFile) -> ReadRange:
        """Return a function that reads a range of a file, with retries."""
        return lambda start, end: self._retried(file.path, lambda: read_range(self._filesystem, file, start, end))

    def _all(self, acts: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Return the results of functions that threads call, in order."""
        futures = [self._readers.submit(act) for act in acts]
        return [self._awaited(each) for each in futures]

    def _blocks(self, missing: Iterable[_Missing]) -> Iterator[bytes]:
        """Yield the blocks of all files in order. So many as there are connections are read ahead."""
        ahead: deque[Future[bytes]] = deque()
        for each in missing:
            for read in self._reads(each):
                ahead.append(self._readers.submit(read))
                if len(ahead) > CONNECTIONS:
                    yield self._awaited(ahead.popleft())
        while ahead:
            yield self._awaited(ahead.popleft())

    def _reads(self, each: _Missing) -> Iterator[Callable[[], bytes]]:
        """Yield what threads do for a file: read its blocks, or fetch its columns."""
        read = self._ranges_of(each.file)

        def columns(chosen: Columns) -> bytes:
            fetch_columns(read, each.file.size or 0, chosen, each.path)
            return b""

        if each.columns is not None:
            yield partial(columns, each.columns)
        elif each.has_ranges:
            yield from (partial(read, start, end) for start, end in each.ranges())

    def _awaited(self, future: Future[_Result]) -> _Result:
        while wait([future], timeout=_REPORT_SECONDS).not_done:
            self._report(0)
        return future.result()

    def _report(self, newly_done: int) -> None:
        if not self._missing:
            self._progress("remote files looked at", 0, self._total)
            return
        self._done += newly_done
        number = len(self._missing)
        files = f", {self._finished:,} of {number:,} files complete" if number > 1 else ""
        self._progress(f"bytes downloaded{files}", self._done, self._total)


class _PartialFile:
    """The blocks of a file so far, and their digest. A context manager that leaves them on disk."""

    def __init__(self, each: _Missing) -> None:
        self._each, self._digest = each, hashlib.sha256()
        self._size = self._durable = each.part_bytes
        with _disk_errors(each.path):
            self._file = open(each.path, "r+b" if each.part_bytes else "w+b")  # noqa: SIM115 - __exit__ closes it
            self._file.truncate(each.part_bytes)
            while chunk := self._file.read(1 << 20):
                self._digest.update(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                self._sync()
            elif not isinstance(error, StorageError):
                self._make_durable()  # so that another start continues here
        finally:
            self._file.close()

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with _disk_errors(self._each.path):
            self._file.write(content)
        self._digest.update(content)
        self._size += len(content)
        if self._size - self._durable >= DURABLE_BYTES:
            self._make_durable()

    def digest(self) -> FileDigest:
        """Return the size and digest of all blocks."""
        return FileDigest(size=self._size, sha256=self._digest.hexdigest())

    def _sync(self) -> None:
        with _disk_errors(self._each.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def _make_durable(self) -> None:
        self._sync()
        self._durable = self._size
        file = self._each.file
        with _disk_errors(_part_note(self._each)):
            write_json(_part_note(self._each), {"state": file.state, "size": file.size, "bytes": self._size})


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn every OSError in the block into a StorageError, also a TimeoutError, as of a network file system."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {reason(error, path)}") from error


def _bytes_on_disk(each: _Missing) -> int:
    """Return how many bytes of the present state of a file are known to be on disk."""
    file = each.file
    try:
        noted = json.loads(_part_note(each).read_bytes())
        is_there = 0 < noted["bytes"] <= min(file.size or 0, each.path.stat().st_size)
        is_same = (noted["state"], noted["size"]) == (file.state, file.size)
        return int(noted["bytes"]) if is_there and is_same else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0  # not begun, or killed before the first note


def _keep(each: _Missing, content: FileDigest) -> None:
    """Give a complete file its name, and write its note."""
    each.path.replace(each.local)
    sync_folder(each.local.parent)
    file = each.file
    whole = FileDigest(size=file.size or 0, sha256=file.sha256 or "") if each.columns is not None else None
    write_note(each.local, Note(file.state, content, whole))
    _remove(each)


def _remove(each: _Missing) -> None:
    """Remove what has arrived of a file, and the note of it."""
    each.path.unlink(missing_ok=True)
    each.local.with_name(f".{each.local.name}.part").unlink(missing_ok=True)  # of an earlier download of all columns
    _part_note(each).unlink(missing_ok=True)


def _part_note(each: _Missing) -> Path:
    return each.local.with_name(f".{each.local.name}.part.json")

"""Downloads files to a folder: in parallel, each byte hashed as it arrives, resumable after any end of the process.

Beside a download lies its note: state, size and sha256. While it is incomplete, it is called ``.{name}.part``, and a
note of it says how many bytes of which state are known to be on disk; another start continues there.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from t5train.data.download.parquet_columns import Columns, ReadRange, fetch_columns, needed_columns
from t5train.data.download.partial_file import Missing, PartialFile, is_whole, part_bytes, read_note
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
from t5train.errors import InputError
from t5train.files.atomic import write_json
from t5train.files.confined import confined
from t5train.files.output_folder import lock_or_wait
from t5train.host_resources import num_cores, require_free_space
from t5train.locations import Counted, redacted
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records.digests import FileDigest

CONNECTIONS = 8
BLOCK_BYTES = 16 << 20
"""Read with one request. There are at most two for each connection in memory."""
_REPORT_SECONDS = 0.5
_LISTING = ".downloaded-files.json"
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


def download(filesystem: Any, folder: Path, wanted: Sequence[Wanted], progress: Progress) -> None:
    """Download the files that are not on this machine in their present state.

    Only one process at a time downloads to ``folder``, which contains all of them; others wait. Copies are verified
    against the digests in their notes, and a damaged one is fetched again.

    Raises InputError if a file cannot be transferred, differs twice in a row from its known digest, or changes
    meanwhile, and StorageError if the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), _session(filesystem, progress) as session:
        for parent in {each.local.parent for each in wanted}:
            for leftover in parent.glob(".*.tmp"):  # of a process that was killed
                leftover.unlink()
        missing = session.missing(wanted)
        needed = sum((each.size_bytes or 0) - each.part_bytes for each in missing)
        require_free_space(folder, needed, f"the download of {quantity(len(missing), 'file')}")
        if missing:
            (folder / _LISTING).unlink(missing_ok=True)  # until all files are of one state again
            session.fetch(missing)
        note_completed(folder, [each.local for each in wanted])


def downloaded_before(folder: Path) -> list[Path] | None:
    """Return the files that a download last put into a folder; None if it never completed.

    Nothing is compared with the store, and the files may have been damaged since.
    """
    try:
        names = [str(name) for name in json.loads((folder / _LISTING).read_bytes())["files"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / _LISTING} is damaged ({error}). Remove it, and download the text again") from None
    return [confined(folder, name, str(folder / _LISTING), InputError) for name in names]


def note_completed(folder: Path, places: Sequence[Path]) -> None:
    """Record that all files of a text are in a folder."""
    write_json(folder / _LISTING, {"files": [each.relative_to(folder).as_posix() for each in places]})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let only one process download to a folder; others wait."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_or_wait(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _session(filesystem: Any, progress: Progress) -> Iterator["_Session"]:
    session = _Session(filesystem, progress)
    try:
        yield session
    finally:
        session.close()


class _Session:
    """Looks at remote files and fetches them. Threads read ahead; everything else happens in the caller's thread."""

    def __init__(self, filesystem: Any, progress: Progress) -> None:
        self._filesystem, self._progress = filesystem, progress
        self._backoff = Backoff()
        # Other filesystems must be used by one thread at a time.
        self._readers = Readers(CONNECTIONS if is_for_threads(filesystem) else 1)
        self._missing: Sequence[Missing] = ()
        self._done = self._finished = 0
        self._total: int | None = None

    def close(self) -> None:
        """End the threads."""
        self._backoff.give_up()
        self._readers.close()

    def missing(self, wanted: Sequence[Wanted]) -> list[Missing]:
        """Return the files to fetch: those of which no undamaged copy of the present state is here."""
        self._filesystem.invalidate_cache()
        self._total = len(wanted)
        files = self._all(partial(self._look, each.remote) for each in wanted)
        with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
            copies = list(pool.map(_is_current, files, wanted))
        absent = [pair for pair, is_there in zip(zip(files, wanted, strict=True), copies, strict=True) if not is_there]
        return self._all(partial(self._absent, *pair) for pair in absent)

    def _look(self, path: str) -> RemoteFile:
        with _converted(path):
            return self._backoff.retried(lambda: look_at(self._filesystem, path), redacted(path), is_interrupted)

    def _absent(self, file: RemoteFile, wanted: Wanted) -> Missing:
        """Return what is to be fetched of a file."""
        local, known, note = wanted.local, wanted.known, read_note(wanted.local)
        noted = note.content.sha256 if note is not None and note.is_of(file) and note.whole is None else None
        expected = known.sha256 if known is not None else file.sha256 or noted
        with _converted(file.path):
            has_ranges = self._backoff.retried(
                lambda: takes_ranges(self._filesystem, file), redacted(file.path), is_interrupted
            )
            # Only if the content of the whole file has a known digest, which then identifies the columns, too.
            if wanted.columns and file.sha256 and has_ranges:
                columns = needed_columns(self._ranges_of(file), file.size or 0, wanted.columns)
                if columns is not None:
                    return Missing(file, local, None, has_ranges, 0, columns)
        can_resume = has_ranges and (file.reports_changes or expected is not None)
        return Missing(file, local, expected, has_ranges, part_bytes(local, file) if can_resume else 0, None)

    def fetch(self, missing: Sequence[Missing]) -> None:
        """Fetch all. A file whose content is not the expected one is set aside, and fetched once more."""
        self._missing = missing
        sizes = [each.size_bytes for each in missing]
        self._total = None if None in sizes else sum(size or 0 for size in sizes)
        self._done = sum(each.part_bytes for each in missing)
        blocks = self._blocks(missing)
        for each in missing:
            if not self._fetched(each, blocks):
                again = each._replace(part_bytes=0)
                self._done -= each.file.size or 0
                if not self._fetched(again, self._blocks([again])):
                    raise InputError(_differs(again))
            self._finished += 1

    def _fetched(self, each: Missing, blocks: Iterator[bytes]) -> bool:
        """Fetch one file. Returns False if its content is not the expected one, and sets it aside then."""
        each.local.parent.mkdir(parents=True, exist_ok=True)
        with PartialFile(each) as part:
            if each.columns is not None:
                next(blocks)  # when a thread has written them
                part.replace_by(_columns_file(each))
                self._report(each.columns.size_bytes)
            elif each.has_ranges:
                for _ in _ranges(each):
                    content = next(blocks)
                    part.write(content)
                    self._report(len(content))
            else:
                self._stream(each, part)
            size, sha256 = part.finish()
        if each.columns is None and each.file.size not in {None, size}:
            part.remove()
            raise InputError(f"{redacted(each.file.path)} ended after {size} of {each.file.size} bytes: try again")
        if each.expected is not None and sha256 != each.expected:
            bad = part.set_aside()
            _log.warning("%s has sha256 %s, not %s; the copy is kept as %s", redacted(each.file.path), sha256,
                         each.expected, bad)  # fmt: skip
            return False
        if each.expected is None and each.columns is None and self._has_changed(each):
            part.remove()
            raise InputError(f"{redacted(each.file.path)} was changed while it was downloaded: try again")
        part.keep(size, sha256)
        return True

    def _has_changed(self, each: Missing) -> bool:
        """Whether the store has another state of a file now. Files of the Hub are those of one listing."""
        if is_hub(self._filesystem):
            return False
        self._filesystem.invalidate_cache()
        return self._look(each.file.path).state != each.file.state

    def _stream(self, each: Missing, part: PartialFile) -> None:
        """Fetch a file whose store does not send parts of it: from the beginning at each try."""

        def fetch() -> None:
            counted = Counted(f"bytes of {each.local.name} downloaded", self._progress)
            self._filesystem.get_file(each.file.path, str(part.path), callback=counted)

        with _converted(each.file.path):
            self._backoff.retried(fetch, redacted(each.file.path), is_interrupted)
        part.hash_from_disk()
        self._report(each.file.size or 0)

    def _ranges_of(self, file: RemoteFile) -> ReadRange:
        """Return a function that reads a range of a file, with retries."""
        shown = redacted(file.path)
        return lambda start, end: self._backoff.retried(
            lambda: read_range(self._filesystem, file, start, end), shown, is_interrupted
        )

    def _all(self, acts: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Return the results of functions that threads call, in order."""
        futures = [self._readers.submit(act) for act in acts]
        return [self._awaited(each) for each in futures]

    def _blocks(self, missing: Iterable[Missing]) -> Iterator[bytes]:
        """Yield the blocks of all files in order. So many as there are connections are read ahead."""
        ahead: deque[Future[bytes]] = deque()
        for each in missing:
            for read in self._reads(each):
                ahead.append(self._readers.submit(read))
                if len(ahead) > CONNECTIONS:
                    yield self._awaited(ahead.popleft())
        while ahead:
            yield self._awaited(ahead.popleft())

    def _reads(self, each: Missing) -> Iterator[Callable[[], bytes]]:
        """Yield what threads do for a file: read its blocks, or fetch its columns."""
        read = self._ranges_of(each.file)

        def block(start: int, end: int) -> bytes:
            with _converted(each.file.path):
                return read(start, end)

        def columns() -> bytes:
            with _converted(each.file.path):
                each.local.parent.mkdir(parents=True, exist_ok=True)
                fetch_columns(read, each.file.size or 0, cast(Columns, each.columns), _columns_file(each))
            return b""

        if each.columns is not None:
            yield columns
        elif each.has_ranges:
            yield from (partial(block, start, end) for start, end in _ranges(each))

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


def _is_current(file: RemoteFile, wanted: Wanted) -> bool:
    """Whether an undamaged copy of a file's present state is here. Raises InputError for a file of another size."""
    note, known = read_note(wanted.local), wanted.known
    if known is not None and file.size not in {None, known.size}:
        raise InputError(
            f"{redacted(file.path)} has {quantity(file.size or 0, 'byte')}, but should have {known.size:,}. The store "
            "has another file under this name: to use that one, name it by its URL"
        )
    if known is not None and file.sha256 not in {None, known.sha256}:
        raise InputError(
            f"{redacted(file.path)} has the sha256 {file.sha256}, but should have {known.sha256}. The store has "
            "another file under this name: to use that one, name it by its URL"
        )
    if note is None or (not note.is_of(file) if known is None else note.stands_for != known):
        return False
    return is_whole(wanted.local, note)


@contextmanager
def _converted(path: str) -> Iterator[None]:
    """Convert the error of a server, which may show a signed URL, or of a transfer that was interrupted too often."""
    try:
        yield
    except Exception as error:
        failed = f"{redacted(path)} cannot be downloaded: {message_of(error)}"
        if is_interrupted(error):
            failed += f", at each of {TRIES} tries. Start again later: what has arrived is kept"
            raise InputError(failed) from None
        if status_of(error) is None:
            raise
        raise InputError(f"{failed}. Check the URL, and whether the server gives you access") from None


def _ranges(each: Missing) -> Iterator[tuple[int, int]]:
    size = each.file.size or 0
    return ((start, min(start + BLOCK_BYTES, size)) for start in range(each.part_bytes, size, BLOCK_BYTES))


def _columns_file(each: Missing) -> Path:
    """Return where the columns of a file are written before they get its name."""
    return each.local.with_name(f".{each.local.name}.columns.tmp")


def _differs(each: Missing) -> str:
    return (
        f"{redacted(each.file.path)} was downloaded twice, and both times its sha256 was not {each.expected}, as "
        f"expected. The last copy is kept as {each.local}.bad. If the store's file was replaced on purpose, set "
        "corpus.revision to a new name"
    )

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
from typing import Any, NamedTuple, cast

from t5train.data.download.parquet_columns import Columns, ReadRange, fetch_columns, needed_columns
from t5train.data.download.partial_file import Missing, PartialFile, is_whole, part_bytes, read_note
from t5train.data.download.remote_reading import (
    TRIES,
    Patience,
    Readers,
    RemoteFile,
    is_busy,
    is_interrupted,
    look_at,
    read_range,
    status_of,
    takes_ranges,
    told,
)
from t5train.data.output_folder import lock_or_wait
from t5train.errors import InputError
from t5train.files.atomic import write_json
from t5train.files.confined import confined
from t5train.host_resources import num_cores, quantity, require_free_space
from t5train.locations import Counted, redacted
from t5train.progress import Progress
from t5train.records.digests import FileDigest

CONNECTIONS = 8
BLOCK_BYTES = 16 << 20
"""Read with one request. There are at most two for each connection in memory."""
DURABLE_BYTES = 64 << 20
"""After so many bytes, a part of a file is written to disk and noted, so that another start continues there."""
_REPORT_SECONDS = 0.5
_LISTING = ".downloaded-files.json"
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

    Raises InputError if a file cannot be transferred, differs from the digest that is known for it twice in a row, or
    changes meanwhile, and StorageError if the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    patience = Patience()
    with _locked(folder):
        for parent in {each.local.parent for each in wanted}:
            for leftover in parent.glob(".*.tmp"):  # of a process that was killed
                leftover.unlink()
        files = _looked_at(filesystem, [each.remote for each in wanted], patience)
        with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
            judged = pool.map(lambda file, each: _missing(filesystem, patience, file, each), files, wanted)
            missing = [each for each in judged if each is not None]
        needed = sum((each.size_bytes or 0) - each.part_bytes for each in missing)
        require_free_space(folder, needed, f"the download of {quantity(len(missing), 'file')}")
        if missing:
            _Transfer(filesystem, patience, progress, missing).run()
        write_json(folder / _LISTING, {"files": [each.local.relative_to(folder).as_posix() for each in wanted]})


def downloaded_before(folder: Path) -> list[str] | None:
    """Return the names of the files that ``download`` last put into a folder; None if it never completed.

    For use without a network: nothing is compared with the store. Raises InputError if a file is missing or differs
    from its note.
    """
    try:
        names = [str(name) for name in json.loads((folder / _LISTING).read_bytes())["files"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / _LISTING} is damaged ({error}). Remove it, and download the text again") from None
    places = [confined(folder, name, str(folder / _LISTING), InputError) for name in names]
    with ThreadPoolExecutor(num_cores()) as pool:
        whole = list(pool.map(_is_noted_whole, places))
    if not all(whole):
        damaged = places[whole.index(False)]
        raise InputError(f"{damaged} is missing or damaged, and there is no network to download it again (offline)")
    return names


def _is_noted_whole(local: Path) -> bool:
    note = read_note(local)
    return note is not None and is_whole(local, note)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_or_wait(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _looked_at(filesystem: Any, paths: Sequence[str], patience: Patience) -> list[RemoteFile]:
    def look(path: str) -> RemoteFile:
        return patience.tried(lambda: look_at(filesystem, path), redacted(path), is_busy)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(look, paths))


def _missing(filesystem: Any, patience: Patience, file: RemoteFile, wanted: Wanted) -> Missing | None:
    """Return what is to be fetched of a file; None if a copy of its present state is here and undamaged."""
    local, known, note = wanted.local, wanted.known, read_note(wanted.local)
    if known is not None and file.size not in {None, known.size}:
        raise InputError(
            f"{redacted(file.path)} has {quantity(file.size or 0, 'byte')}, but {known.size:,} are known for it. The "
            "store has another file under this name: use it by its URL if it is the one that you want"
        )
    if note is not None and (note.state != file.state if known is None else note.content != known):
        note = None
    if note is not None and is_whole(local, note):
        return None
    noted = note.content.sha256 if note is not None else None
    expected = known.sha256 if known is not None else file.sha256 or noted
    with _told(file):
        has_ranges = patience.tried(lambda: takes_ranges(filesystem, file), redacted(file.path), is_interrupted)
        columns = None
        if wanted.columns and known is None and has_ranges:
            columns = needed_columns(_ranges_of(filesystem, patience, file), file.size or 0, wanted.columns)
    if columns is not None:
        return Missing(file, local, None, has_ranges, 0, columns)
    return Missing(file, local, expected, has_ranges, part_bytes(local, file) if has_ranges else 0, None)


def _ranges_of(filesystem: Any, patience: Patience, file: RemoteFile) -> ReadRange:
    """Return a function that reads a range of a file with patience."""
    shown = redacted(file.path)
    return lambda start, end: patience.tried(lambda: read_range(filesystem, file, start, end), shown, is_interrupted)


class _Transfer:
    """Fetches missing files, in order, while threads read ahead."""

    def __init__(self, filesystem: Any, patience: Patience, progress: Progress, missing: Sequence[Missing]) -> None:
        self._filesystem, self._patience, self._progress = filesystem, patience, progress
        self._missing = missing
        sizes = [each.size_bytes for each in missing]
        self._total = None if None in sizes else sum(size or 0 for size in sizes)
        self._done = sum(each.part_bytes for each in missing)
        self._finished = 0

    def run(self) -> None:
        """Fetch all. A file whose content is not the expected one is set aside, and fetched once more."""
        readers = Readers(CONNECTIONS)
        try:
            blocks = self._blocks(readers, self._missing)
            for each in self._missing:
                if not self._fetch(each, blocks):
                    again = each._replace(part_bytes=0)
                    self._done -= each.file.size or 0
                    if not self._fetch(again, self._blocks(readers, [again])):
                        raise InputError(_differs(again))
                self._finished += 1
        finally:
            self._patience.give_up()
            readers.close()

    def _fetch(self, each: Missing, blocks: Iterator[bytes]) -> bool:
        """Fetch one file. Returns False if its content is not the expected one, and sets it aside then."""
        each.local.parent.mkdir(parents=True, exist_ok=True)
        part = PartialFile(each)
        with part:
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
        if sha256 != each.expected and each.expected is not None:
            bad = part.set_aside()
            _log.warning("%s: %s; it is kept as %s", redacted(each.file.path), _mismatch(each, sha256), bad)
            return False
        if sha256 != each.expected and self._now(each).state != each.file.state:
            part.remove()
            raise InputError(f"{redacted(each.file.path)} was changed while it was downloaded: try again")
        part.keep(size, sha256)
        return True

    def _now(self, each: Missing) -> RemoteFile:
        (file,) = _looked_at(self._filesystem, [each.file.path], self._patience)
        return file

    def _stream(self, each: Missing, part: PartialFile) -> None:
        """Fetch a file whose store does not send parts of it: from the beginning at each try."""

        def fetch() -> None:
            counted = Counted(f"bytes of {each.local.name} downloaded", self._progress)
            self._filesystem.get_file(each.file.path, str(part.path), callback=counted)

        with _told(each.file):
            self._patience.tried(fetch, redacted(each.file.path), is_interrupted)
        part.hash_from_disk()
        self._report(each.file.size or 0)

    def _blocks(self, readers: Readers, missing: Iterable[Missing]) -> Iterator[bytes]:
        """Yield the blocks of all files in order. So many as there are connections are read ahead."""
        ahead: deque[Future[bytes]] = deque()
        for each in missing:
            for read in self._reads(each):
                ahead.append(readers.submit(read))
                if len(ahead) > CONNECTIONS:
                    yield self._awaited(ahead.popleft())
        while ahead:
            yield self._awaited(ahead.popleft())

    def _reads(self, each: Missing) -> Iterator[Callable[[], bytes]]:
        """Yield what threads do for a file: read its blocks, or fetch its columns."""
        read_range = _ranges_of(self._filesystem, self._patience, each.file)

        def block(start: int, end: int) -> bytes:
            with _told(each.file):
                return read_range(start, end)

        def columns() -> bytes:
            with _told(each.file):
                each.local.parent.mkdir(parents=True, exist_ok=True)
                fetch_columns(read_range, each.file.size or 0, cast(Columns, each.columns), _columns_file(each))
            return b""

        if each.columns is not None:
            yield columns
        elif each.has_ranges:
            yield from (partial(block, start, end) for start, end in _ranges(each))

    def _awaited(self, block: Future[bytes]) -> bytes:
        while wait([block], timeout=_REPORT_SECONDS).not_done:
            self._report(0)
        return block.result()

    def _report(self, newly_done: int) -> None:
        self._done += newly_done
        number = len(self._missing)
        files = f", {self._finished:,} of {number:,} files complete" if number > 1 else ""
        self._progress(f"bytes downloaded{files}", self._done, self._total)


@contextmanager
def _told(file: RemoteFile) -> Iterator[None]:
    """Convert the error of a server, which may show a signed URL, or of a transfer that was interrupted too often."""
    try:
        yield
    except Exception as error:
        failed = f"{redacted(file.path)} cannot be downloaded: {told(error)}"
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


def _mismatch(each: Missing, sha256: str) -> str:
    return f"its content has sha256 {sha256}, but {each.expected} is known for it"


def _differs(each: Missing) -> str:
    return (
        f"{redacted(each.file.path)} was downloaded twice, and neither time had the sha256 that is known for it, "
        f"{each.expected}. The last copy is kept as {each.local}.bad. If the store's file was replaced on purpose, set "
        "corpus.revision to a new name"
    )

"""Reads remote files through fsspec, and retries what fails for a reason that may pass."""

import errno
import logging
import posixpath
import queue
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import fsspec

from t5train.data.formats.compressed import COMPRESSIONS, use_in_fsspec
from t5train.errors import InputError, printable

READER = "download-reader"
"""Name of the threads that read."""
TRIES = 8
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
LONGEST_ASKED_SECONDS = 600.0
"""A store that asks for a longer pause than this is asked again after it."""
CONNECT_SECONDS, SILENT_SECONDS = 30.0, 60.0
_BUSY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_LOST_CONNECTION = {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT}
_LOST_CLASSES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
    "HTTPClientError",
    "LocalEntryNotFoundError",
}
"""Base classes of such errors in aiohttp (the first two), httpx, botocore and the Hub's client.

The last one means that the Hub did not answer a question about a file. ``datasets`` removes its cause."""
_ARCHIVE_BLOCK_BYTES = 1 << 20
_MOST_LINKS = 40
"""As Linux follows."""
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class RemoteFile(NamedTuple):
    """What a store says of a file."""

    path: str
    size: int | None
    """In bytes; None if the store does not report it."""
    state: str
    """Changes when the file changes, if the store reports such changes."""
    sha256: str | None
    """The digest of its content, which only some stores know."""
    reports_changes: bool
    """Whether the store reports them."""


def storage_options(source: str) -> dict[str, Any]:
    """Return how fsspec is to reach a source.

    Web servers get limits for silence in place of aiohttp's five minutes for a whole transfer, which a large file
    exceeds. Some call the compression of a file its Content-Encoding: compressed files are kept as they are stored.
    """
    if urlsplit(source).scheme not in {"http", "https"} or "::" in source:
        return {}
    from aiohttp import ClientTimeout  # slow to import, and only needed here

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
    is_compressed = PurePosixPath(urlsplit(source).path).suffix in COMPRESSIONS
    as_stored = {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}} if is_compressed else {}
    return {"client_kwargs": {"timeout": timeout, **as_stored}}


def filesystem_of(source: str) -> tuple[Any, str]:
    """Return fsspec's filesystem of a source, and the path in it.

    Raises InputError for a damaged .tar archive, and for a path with ``::``, of which fsspec would drop what follows.
    """
    first, separator, _ = source.partition("::")
    if separator and "://" not in first and first not in fsspec.available_protocols():
        raise InputError(
            f"{printable(source)} has ::, which separates a file in an archive from the archive, as in "
            "tar://a.txt::/data/a.tar. Rename what has :: in its name, or name the folder that it is in"
        )
    use_in_fsspec()  # for archives that are compressed
    filesystem, path = fsspec.core.url_to_fs(source, **storage_options(source))
    _require_whole_archive(filesystem)
    return filesystem, path


def _require_whole_archive(filesystem: Any) -> None:
    """Raise InputError if a .tar archive lacks the zeros at its end, or goes on after them or a damaged header."""
    if not is_tar(filesystem):
        return
    archive = filesystem.tar
    archive.getmembers()
    archive.fileobj.seek(archive.offset)
    place = archive.offset
    if not archive.fileobj.read(tarfile.BLOCKSIZE):
        raise InputError(
            f"the .tar archive ends at byte {place:,}, without the block of zeros that marks its end, so files may be "
            "missing. Fetch or write the archive again"
        )
    archive.fileobj.seek(place)
    while block := archive.fileobj.read(_ARCHIVE_BLOCK_BYTES):
        if rest := block.lstrip(b"\0"):
            raise InputError(
                f"the .tar archive cannot be read to its end: byte {place + len(block) - len(rest):,} is neither the "
                "header of a file nor padding. Fetch or write the archive again, or unpack it if it is several in one"
            )
        place += len(block)


class Backoff:
    """Retries what may succeed later. If a store is busy, all threads that share this object pause.

    The pause doubles with each try, from one second to a minute, and is at least as long as the store asks for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._failures = 0
        """Since a thread last succeeded."""
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let threads fail at their next error instead of waiting."""
        self._given_up.set()

    def retried(self, act: Callable[[], Result], what: str, is_transient: Callable[[Exception], bool]) -> Result:
        """Return the result of ``act``. Its error is raised if it is not transient.

        It is also raised at the eighth try, unless another thread has succeeded since eight tries ago: a store that is
        busy sends some answers.
        """
        for attempt in count(1):
            self._given_up.wait(max(0.0, self._paused_until - time.monotonic()))
            try:
                result = act()
            except Exception as error:
                self._failures += 1
                is_hopeless = attempt >= TRIES and self._failures >= TRIES
                if is_hopeless or self._given_up.is_set() or not is_transient(error):
                    raise
                self._pause(what, error, attempt)
            else:
                self._failures = 0
                return result
        raise AssertionError  # the loop has no end

    def _pause(self, what: str, error: Exception, attempt: int) -> None:
        doubled = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
        seconds = max(doubled, min(_asked_seconds(error), LONGEST_ASKED_SECONDS))
        with self._lock:
            now = time.monotonic()
            is_new, self._paused_until = now >= self._paused_until, max(self._paused_until, now + seconds)
        if is_new:  # said by one of the threads
            _log.warning("%s: %s; trying again in %.0f s", what, message_of(error), seconds)


def is_busy(error: BaseException | None) -> bool:
    """Whether a server said that another try may succeed. fsspec hides this behind its own error."""
    return any(status_of(each) in _BUSY_STATUS for each in _with_causes(error))


def is_interrupted(error: BaseException | None) -> bool:
    """Whether a request failed in a way that another one may not: the server is busy, or the connection was lost."""
    return is_busy(error) or any(map(_is_lost, _with_causes(error)))


def _is_lost(error: BaseException) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    is_lost = isinstance(error, ConnectionError | TimeoutError) or not names.isdisjoint(_LOST_CLASSES)
    return is_lost or getattr(error, "errno", None) in _LOST_CONNECTION


def _with_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, each once: in some that ``datasets`` raises, they form a circle."""
    found = list[BaseException]()
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__
    return found


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of aiohttp or of the Hub's client is about; None for any other error."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def message_of(error: BaseException) -> str:
    """Return what an error of a transfer says, without the URL, which may be signed after a redirection."""
    causes = _with_causes(error)
    if (status := next(filter(None, map(status_of, causes)), None)) is not None:
        return f"the server answered with status {status}"
    said = " ".join(str(causes[-1]).split())
    return said if said and "://" not in said else f"the transfer failed ({type(causes[-1]).__name__})"


def look_at(filesystem: Any, path: str) -> RemoteFile:
    """Return what the store says of a file. For web servers, ETag and Last-Modified show whether it changed.

    Stores that list whole folders answer from the listing that they have: invalidate their cache first.
    """
    info = filesystem.info(path)
    changes = [str(info[key]) for key in ("ETag", "Last-Modified") if key in info]
    return RemoteFile(
        path,
        size=info.get("size"),
        state=":".join([filesystem.ukey(path), *changes]),
        sha256=getattr(info.get("lfs"), "sha256", None),
        reports_changes=bool(changes) or not is_web(filesystem),
    )


def is_for_threads(filesystem: Any) -> bool:
    """Whether several threads may read from a filesystem, each from any place in a file, without reading all before it.

    Those of archives, FTP and some others must not be used so: they share one connection or one position.
    """
    return bool(filesystem.async_impl) or is_hub(filesystem)


def takes_ranges(filesystem: Any, file: RemoteFile) -> bool:
    """Whether the store can send a part of a file. Asks web servers, some of which ignore that a part is requested."""
    if not file.size or not is_for_threads(filesystem):
        return False
    if not is_web(filesystem):
        return True
    try:
        return len(read_range(filesystem, file, file.size - 1, file.size)) == 1
    except ValueError:  # of fsspec
        return False


def read_range(filesystem: Any, file: RemoteFile, start: int, end: int) -> bytes:
    """Read the bytes from ``start`` to before ``end``. Raises ConnectionError if the store sends fewer."""
    if is_web(filesystem) or is_hub(filesystem):
        # Their cat_file would read any answer to its end before looking at its status, or read ahead.
        options = {"block_size": end - start, "size": file.size} if is_web(filesystem) else {}
        with filesystem.open(file.path, "rb", cache_type="none", **options) as opened:
            opened.seek(start)
            content = bytes(opened.read(end - start))
    else:
        content = bytes(filesystem.cat_file(file.path, start=start, end=end))
    if len(content) != end - start:
        raise ConnectionError(f"{len(content):,} of {end - start:,} bytes arrived")
    return content


def is_web(filesystem: Any) -> bool:
    """Whether a filesystem reads from web servers."""
    return "http" in filesystem.protocol


def is_hub(filesystem: Any) -> bool:
    """Whether a filesystem reads from the Hugging Face Hub."""
    return "hf" in _protocols(filesystem)


def is_tar(filesystem: Any) -> bool:
    """Whether a filesystem reads from a .tar archive."""
    return "tar" in _protocols(filesystem)


def linked_members(filesystem: Any, paths: Iterable[str]) -> dict[str, str | None]:
    """Return which member of a .tar archive each path leads to through links; None for one that is no link."""
    members = {posixpath.normpath(each.name): each for each in filesystem.tar}

    def linked(path: str) -> str | None:
        found, steps = posixpath.normpath(path), 0
        while (member := members.get(found)) and (member.islnk() or member.issym()) and steps < _MOST_LINKS:
            folder = posixpath.dirname(found) if member.issym() else ""
            found, steps = posixpath.normpath(posixpath.join(folder, member.linkname)), steps + 1
        return found if steps else None

    return {each: linked(each) for each in paths}


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


class Readers:
    """Threads that read. Those of ThreadPoolExecutor would keep an interrupted process from ending before them."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for _ in range(number):
            threading.Thread(target=self._work, name=READER, daemon=True).start()

    def submit(self, read: Callable[[], Result]) -> Future[Result]:
        """Let the next free thread call ``read``."""
        future: Future[Result] = Future()
        self._jobs.put((future, read))
        return future

    def close(self) -> None:
        """Let the threads end after what they are reading. What has not begun is not read."""
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            pass
        for _ in range(self._number):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, read = job
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)  # for the main thread


def _asked_seconds(error: BaseException | None) -> float:
    """Return for how long a server asked to wait (Retry-After, in seconds; its other form, a date, is not read)."""
    for each in _with_causes(error):
        headers = getattr(each, "headers", None) or getattr(getattr(each, "response", None), "headers", None) or {}
        asked = str(headers.get("Retry-After", "")) if hasattr(headers, "get") else ""
        if asked.isdigit():
            return float(asked)
    return 0.0

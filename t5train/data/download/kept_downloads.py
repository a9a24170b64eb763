"""Complete downloads in their cache folder, each with a note of its state, size and sha256 beside it.

The last download of a whole text also leaves a list of its files.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from t5train.data.download.remote_reading import RemoteFile
from t5train.errors import DigestMismatch, InputError
from t5train.files.atomic import write_json
from t5train.files.confined import confined, require_distinct
from t5train.files.output_folder import DOWNLOADED, lock_or_wait
from t5train.host_resources import num_cores
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, verify_file
from t5train.records.locations import redacted

_LISTING = ".downloaded-files.json"
_log = logging.getLogger(__name__)


def cache_folder(source: str, revision: str, root: Path, more: Sequence[str] = ()) -> Path:
    """Return the folder for the downloads of a source. ``more`` are further settings that choose its text."""
    key = hashlib.sha256("\n".join([redacted(source), revision, *more]).encode()).hexdigest()[:16]
    return root.absolute() / "cache" / key


def download_places(folder: Path, names: list[str], shown: str) -> list[Path]:
    """Return the local paths of downloads. All names are checked first, because the server chooses them."""
    require_distinct(names, shown, InputError)
    places = [confined(folder, name, shown, InputError) for name in names]
    for parent in {parent for place in places for parent in place.parents if parent.is_relative_to(folder)}:
        if parent.is_symlink():
            raise InputError(
                f"{parent} is a symbolic link, so {shown} would be downloaded to the link's target. Remove the link"
            )
    return places


class Note(NamedTuple):
    """What is known of a complete download."""

    state: str
    """The store's state of the file that it is a copy of."""
    content: FileDigest
    whole: FileDigest | None
    """What the download stands for: if only columns were fetched, the whole file, as the store states its digest; of
    rows that were streamed, their lines before compression. None for a copy."""

    @property
    def stands_for(self) -> FileDigest:
        """The digest that identifies the text, however it was transferred."""
        return self.whole or self.content

    def is_of(self, file: RemoteFile) -> bool:
        """Whether this is a copy of the present state of a file."""
        if file.sha256 is not None:
            return self.stands_for.sha256 == file.sha256
        return self.state == file.state and file.size in {None, self.stands_for.size}


def read_note(local: Path) -> Note | None:
    """Return the note of a download; None if there is none, or if it is damaged."""
    try:
        noted = json.loads(_note(local).read_bytes())
        content = FileDigest(size=noted["size"], sha256=noted["sha256"])
        return Note(str(noted["state"]), content, FileDigest(**noted["whole"]) if noted.get("whole") else None)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
            raise
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("the record of the download of %s is damaged: %s", local, error)
        return None


def write_note(local: Path, note: Note) -> None:
    """Write the note of a complete download."""
    whole = {} if note.whole is None else {"whole": note.whole.model_dump()}
    write_json(_note(local), {"state": note.state, **note.content.model_dump(), **whole})


def whole_digest(local: Path) -> FileDigest | None:
    """Return the digest of what a download stands for; None for a copy, and for any other file."""
    note = read_note(local)
    return None if note is None else note.whole


def is_whole(local: Path, note: Note) -> bool:
    """Return whether a download has the content that was noted. Raises Unreadable if it cannot be read now."""
    try:
        verify_file(local, note.content)
    except DigestMismatch as error:
        _log.warning("the download of %s is damaged: %s", local, error)
        return False
    return True


def whole_copies(places: Sequence[Path]) -> list[bool]:
    """Return for each place whether a download is there that has the content that was noted."""

    def is_intact(place: Path) -> bool:
        note = read_note(place)
        return note is not None and is_whole(place, note)

    with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
        return list(pool.map(is_intact, places))


def is_current(local: Path, file: RemoteFile, known: FileDigest | None) -> bool:
    """Whether an undamaged copy of a file's present state is here.

    Raises InputError if ``known`` is what it should be, and the store has another file.
    """
    note = read_note(local)
    if known is not None:
        _require_known(file, known)
    if note is None or (not note.is_of(file) if known is None else note.stands_for != known):
        return False
    return is_whole(local, note)


def _require_known(file: RemoteFile, known: FileDigest) -> None:
    """Raise InputError if the store says that it has another file."""
    if file.size not in {None, known.size}:
        other = f"{quantity(file.size or 0, 'byte')}, but should have {known.size:,}"
    elif file.sha256 not in {None, known.sha256}:
        other = f"the sha256 {file.sha256}, but should have {known.sha256}"
    else:
        return
    raise InputError(
        f"{redacted(file.path)} has {other}. The store has another file under this name: to use that one, name it by "
        "its URL"
    )


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


def forget_completed(folder: Path) -> None:
    """Record that the files of a text are not all of one state, until ``note_completed`` is called again."""
    (folder / _LISTING).unlink(missing_ok=True)


def _note(local: Path) -> Path:
    return local.with_name(f"{local.name}{DOWNLOADED}")

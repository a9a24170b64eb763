"""What lies where something is to be published, and whether it could be published there at all."""

import logging
import secrets
import shutil
import tempfile
from pathlib import Path

from t5train.certificate import CERTIFICATE
from t5train.errors import DigestMismatch, PublicationError, RecordError, StorageError
from t5train.locations import explained, local_folder, redacted, remote_folder
from t5train.records import MANIFEST, Publication, Record
from t5train.verify import object_names, parse_manifest

_log = logging.getLogger(__name__)


def check_destination(url: str, needed_bytes: int = 0, spec_fingerprint: str | None = None) -> None:
    """Refuse now what ``publish`` would refuse after the training.

    Raises PublicationError when the protocol's package is missing, the place cannot be written, holds something
    else, or a publication of another spec than ``spec_fingerprint``; StorageError when a local disk has less space
    than ``needed_bytes``. A store is asked by writing an empty object beside the destination and removing it.
    """
    published = publication_at(url)
    if published is None:
        _try_writing(url, needed_bytes)
    elif spec_fingerprint is not None and published.inputs.get("spec") != spec_fingerprint:
        raise PublicationError(f"{redacted(url)} holds {described(published)}: publish to another place")


def publication_at(url: str) -> Publication | None:
    """The publication whose manifest lies there, not verified; None where nothing does.

    Raises PublicationError for anything else: a folder in use, another kind of record, a damaged manifest.
    """
    folder = local_folder(url)
    content = _stored_manifest(url) if folder is None else _local_manifest(folder)
    if content is None:
        return None
    try:
        record = parse_manifest(content, f"{redacted(url)}/{MANIFEST}")
    except (RecordError, DigestMismatch) as error:
        raise PublicationError(f"{redacted(url)} is in the way: {error}. Publish to another place") from error
    if not isinstance(record, Publication):
        raise PublicationError(f"{redacted(url)} holds {described(record)}: publish to another place")
    return record


def described(record: Record) -> str:
    """What is in the way, in words."""
    return f"another {record.kind} ({record.fingerprint[:12]}, made {record.provenance.created_at})"


def _local_manifest(folder: Path) -> bytes | None:
    """The manifest's content; None for a folder that is absent or empty."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise PublicationError(
            f"{folder} is there and not a publication ({MANIFEST}: {error.strerror}): publish to another folder"
        ) from error


def _stored_manifest(url: str) -> bytes | None:
    """The manifest's content; None where nothing is, or what an upload left that was cut off: its certificate tells."""
    filesystem, folder = remote_folder(url)
    with explained(url, "cannot be read"):
        path = f"{folder}/{MANIFEST}"
        if filesystem.exists(path):
            return bytes(filesystem.cat_file(path))
        present = object_names(filesystem, folder)
    if present and CERTIFICATE not in present:
        raise PublicationError(
            f"{redacted(url)} holds {', '.join(sorted(present)[:5])}, and no publication: publish to another place"
        )
    return None


def _try_writing(url: str, needed_bytes: int) -> None:
    folder = local_folder(url)
    if folder is None:
        _try_store(url)
    else:
        _try_folder(folder, needed_bytes)


def _try_folder(folder: Path, needed_bytes: int) -> None:
    """Write a nameless file into the nearest folder that is there already.

    The publication takes its place by a rename, which neither a link nor a mounted disk gives way to.
    """
    if folder.is_symlink() or folder.is_mount():
        raise PublicationError(f"{folder} is a link or a mounted disk: publish to a folder inside what it stands for")
    nearest = next(parent for parent in folder.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        raise PublicationError(f"{folder} cannot be made: {nearest} is not writable ({error.strerror})") from error
    if free < needed_bytes:
        raise StorageError(
            f"{folder} needs {needed_bytes:,} bytes and {nearest} has {free:,} left: free some, or publish elsewhere"
        )


def _try_store(url: str) -> None:
    """Beside the destination, not in it: what may write need not be allowed to remove."""
    filesystem, folder = remote_folder(url)
    suffix = f".write-check-{secrets.token_hex(4)}"
    with explained(url, "cannot be written"):
        filesystem.pipe_file(folder + suffix, b"")
    try:
        filesystem.rm_file(folder + suffix)
    except Exception as error:  # fsspec's filesystems have no error in common
        _log.warning("the empty object %s%s is left behind: %s", redacted(url), suffix, type(error).__name__)

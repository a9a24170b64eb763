"""Putting the files of a publication into a store: the claim first, the manifest last, each read back."""

import logging
import os
from pathlib import Path
from typing import Any

from t5train.certificate import CERTIFICATE
from t5train.errors import DigestMismatch, PublicationError
from t5train.locations import Counted, explained, remote_folder
from t5train.progress import Progress, silent
from t5train.records import MANIFEST, FileDigest, Publication
from t5train.verify import object_names, verify_object

_log = logging.getLogger(__name__)


def upload(source: Path, record: Publication, url: str, progress: Progress = silent) -> None:
    """Make ``record`` come true at ``url`` with the files of the folder ``source``.

    The certificate goes first and claims the place: it is of one export, so an upload that was cut off can be told
    from what somebody else put there, and is completed. Raises PublicationError when the place is not free, or the
    store fails; nothing that is not of this export is ever overwritten.
    """
    filesystem, folder = remote_folder(url)
    with explained(url, "cannot be written"):
        present = _claim(filesystem, folder, (source / CERTIFICATE).read_bytes(), record)
        for name, digest in record.files.items():
            target, shown = f"{folder}/{name}", f"{record.url}/{name}"
            if name in present and _is_there(filesystem, target, digest, shown, progress):
                continue
            counted = Counted(f"bytes of {name} sent", progress)
            filesystem.put_file(os.fspath(source / name), target, callback=counted)
            verify_object(filesystem, target, digest, shown, progress)
        _create(filesystem, f"{folder}/{MANIFEST}", record.manifest_text().encode(), record.url)


def _claim(filesystem: Any, folder: str, certificate: bytes, record: Publication) -> set[str]:
    """Names that an earlier upload of the same export left, once its certificate is there."""
    present = set(object_names(filesystem, folder))
    if not present:
        if not filesystem.async_impl:  # object stores have no folders to make, and might make a bucket
            filesystem.makedirs(folder, exist_ok=True)
        _create(filesystem, f"{folder}/{CERTIFICATE}", certificate, record.url)
        return {CERTIFICATE}
    foreign = sorted(present - record.files.keys())
    if foreign or CERTIFICATE not in present or filesystem.cat_file(f"{folder}/{CERTIFICATE}") != certificate:
        raise PublicationError(
            f"{record.url} holds {', '.join((foreign or sorted(present))[:5])}, and no publication: "
            "publish to another place, or remove that yourself"
        )
    _log.info("%s holds %d files of an unfinished upload: it is completed", record.url, len(present))
    return present


def _is_there(filesystem: Any, target: str, digest: FileDigest, shown: str, progress: Progress) -> bool:
    try:
        verify_object(filesystem, target, digest, shown, progress)
    except DigestMismatch as error:
        _log.warning("%s: it is sent again", error)
        return False
    return True


def _create(filesystem: Any, path: str, content: bytes, shown: str) -> None:
    """Write a small object that must not be there yet: the store itself refuses a second one where it can.

    Stores refuse in words of their own, and a request that was sent twice finds the object of its first attempt, so
    what lies there afterwards decides.
    """
    try:
        filesystem.pipe_file(path, content, mode="create")
    except Exception:  # stores have no error in common; it stands unless the object is there, and is then compared
        filesystem.invalidate_cache()
        if not filesystem.exists(path):
            raise
    if filesystem.cat_file(path) != content:
        raise PublicationError(
            f"{shown}/{Path(path).name} is not what was sent: another process is publishing there, or the store is "
            "not reliable; see what is there, then try again"
        )

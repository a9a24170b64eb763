"""Publishes a certified export to a folder, to S3 (``t5train.release.object_store``) or to another store.

The destination is checked before a run trains. Stores other than S3 are written through fsspec: the certificate is
uploaded first, to claim the destination, and ``manifest.json`` last. Each uploaded file is read back. Files that are
not of this export are never overwritten.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from t5train.errors import CertificationError, DigestMismatch, PublicationError, StorageError
from t5train.files.atomic import copy_durably, filling, try_writing
from t5train.files.confined import require_distinct
from t5train.files.os_errors import explain
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, verify_file
from t5train.records.identity import current_provenance, fingerprint
from t5train.records.locations import Counted, explained, local_folder, redacted, remote_folder, require_location
from t5train.records.stage_records import MANIFEST, Export, Publication
from t5train.release.certificate import CERTIFICATE, vouching_certificate
from t5train.release.object_store.bucket import BucketFolder, InsistentBucket, is_in_s3
from t5train.release.object_store.bucket_publication import publish_to_bucket, published_in
from t5train.release.object_store.measured_file import measure
from t5train.release.object_store.published_manifest import difference, not_empty, occupied, published_as
from t5train.release.object_store.write_check import check_writing
from t5train.release.verification import object_names, verify, verify_object

_log = logging.getLogger(__name__)


def upload(source: Path, record: Publication, url: str, progress: Progress = silent) -> None:
    """Upload the files of the folder ``source`` to ``url``, and ``record`` as their manifest.

    The certificate is uploaded first and claims the destination. It belongs to one export, so it distinguishes an
    interrupted upload, which is completed, from other content. Files that are not of this export are never overwritten.
    Raises PublicationError if the destination holds anything else, or if the store fails.
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
    """Ensure that the export's certificate is there, and return the names of files that are already uploaded."""
    present = set(object_names(filesystem, folder))
    if not present:
        if not filesystem.async_impl:  # object stores have no folders, and makedirs might create a bucket
            filesystem.makedirs(folder, exist_ok=True)
        _create(filesystem, f"{folder}/{CERTIFICATE}", certificate, record.url)
        return {CERTIFICATE}
    foreign = sorted(present - record.files.keys())
    if foreign or CERTIFICATE not in present or filesystem.cat_file(f"{folder}/{CERTIFICATE}") != certificate:
        raise not_empty(record.url, foreign or sorted(present))
    _log.info("completing an unfinished upload: %s holds %d of the export's files", record.url, len(present))
    return present


def _is_there(filesystem: Any, target: str, digest: FileDigest, shown: str, progress: Progress) -> bool:
    try:
        verify_object(filesystem, target, digest, shown, progress)
    except DigestMismatch as error:
        _log.warning("uploading a file again, because its copy is damaged: %s", error)
        return False
    return True


def _create(filesystem: Any, path: str, content: bytes, shown: str) -> None:
    """Write a small object that must not exist yet; the store itself refuses to overwrite one if it can.

    Stores refuse with different errors, and a retried request may find its own object. Therefore the object is read
    back, and PublicationError is raised if its content differs.
    """
    try:
        filesystem.pipe_file(path, content, mode="create")
    except Exception:  # stores share no base error; raise it unless the object exists, which is then compared
        filesystem.invalidate_cache()
        if not filesystem.exists(path):
            raise
    if filesystem.cat_file(path) != content:
        raise PublicationError(
            f"{shown}/{Path(path).name} is not what was uploaded: another process is publishing there, or the store is "
            "not reliable. Make sure that nothing else publishes there, then try again"
        )


def check_destination(url: str, needed_bytes: int = 0, spec_fingerprint: str | None = None) -> None:
    """Check a destination before training, and raise the errors that ``publish`` would raise after it.

    Raises PublicationError if the protocol's package is missing, or if the destination cannot be written, holds
    something else, or holds a publication of another spec than ``spec_fingerprint``; StorageError if a local disk has
    less space than ``needed_bytes``. A store is checked by writing an empty object beside the destination and removing
    it.
    """
    published = publication_at(url)
    if published is None:
        _try_writing(url, needed_bytes)
    elif spec_fingerprint is not None and published.inputs.get("spec") != spec_fingerprint:
        raise occupied(url, published)


def publication_at(url: str) -> Publication | None:
    """Return the publication at a destination, without verifying it; None if there is nothing.

    Raises PublicationError for anything else: a folder with other files, another kind of record, a damaged manifest.
    """
    require_location(url)
    if is_in_s3(url):
        return published_in(BucketFolder(url), Publication)
    folder = local_folder(url)
    content = _stored_manifest(url) if folder is None else _local_manifest(folder)
    return None if content is None else published_as(Publication, content, url)


def _local_manifest(folder: Path) -> bytes | None:
    """Return the manifest's content; None if the folder is missing or empty."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise PublicationError(
            f"{folder} exists and is not a publication ({MANIFEST}: {error.strerror}): publish to another folder"
        ) from error


def _stored_manifest(url: str) -> bytes | None:
    """Return the manifest's content; None if there is nothing, or an interrupted upload, which has a certificate."""
    filesystem, folder = remote_folder(url)
    with explained(url, "cannot be read"):
        path = f"{folder}/{MANIFEST}"
        if filesystem.exists(path):
            return bytes(filesystem.cat_file(path))
        present = object_names(filesystem, folder)
    if present and CERTIFICATE not in present:
        raise not_empty(url, present)
    return None


def _try_writing(url: str, needed_bytes: int) -> None:
    folder = local_folder(url)
    if is_in_s3(url):
        check_writing(BucketFolder(url))
    elif folder is None:
        _warn_of_no_guarantee(url)
        _try_store(url)
    else:
        _try_folder(folder, needed_bytes)


def _try_folder(folder: Path, needed_bytes: int) -> None:
    """Check that a publication can be created, with a temporary file in the nearest existing parent folder.

    Publishing ends with a rename to the final path, which can replace neither a symbolic link nor a mount point.
    """
    if folder.is_symlink() or folder.is_mount():
        raise PublicationError(f"{folder} is a symbolic link or a mount point: publish to a folder inside it")
    nearest = next(parent for parent in folder.parents if parent.exists())
    try:
        free = shutil.disk_usage(nearest).free
        if free >= needed_bytes:
            try_writing(nearest)
    except OSError as error:
        raise PublicationError(
            f"{folder} cannot be created: {nearest} is not writable ({error.strerror}). Make {nearest} writable, or "
            "publish elsewhere"
        ) from error
    if free < needed_bytes:
        raise StorageError(
            f"{folder} needs {needed_bytes:,} bytes, but {nearest} has {free:,} free. Free some space, or publish "
            "elsewhere"
        )


def _try_store(url: str) -> None:
    """Check that a store can be written. The test object is beside the destination, because it may not be removable."""
    filesystem, folder = remote_folder(url)
    suffix = f".write-check-{secrets.token_hex(4)}"
    with explained(url, "cannot be written"):
        filesystem.pipe_file(folder + suffix, b"")
    try:
        filesystem.rm_file(folder + suffix)
    except Exception as error:  # fsspec's filesystems share no base error
        _log.warning(
            "the store can be written, but the empty object %s%s that tested this could not be removed (%s). Remove it "
            "yourself",
            redacted(url), suffix, type(error).__name__,
        )  # fmt: skip


def publish(export: Export, url: str, progress: Progress = silent) -> Publication:
    """Copy a certified export to a folder or an object store.

    A local folder appears atomically, by one rename, and a publication in S3 by one conditional write. An intact
    publication of the same files is reused; only its certificate may be another one. Secrets in the URL never appear in
    records, logs or errors.

    Args:
        export: The certified export.
        url: Folder, ``s3://BUCKET/FOLDER`` or another fsspec URL.
        progress: Called with the number of bytes copied or sent, and verified.

    Returns:
        The record of the publication.

    Raises:
        PublicationError: There is no passing certificate for exactly these files, the destination holds something else,
            or the store fails.
        StorageError: The local folder cannot be written, or is too small.

    """
    require_location(url)
    if CERTIFICATE not in export.files:
        raise PublicationError(f"{export.path} cannot be published, because it has no certificate. Certify it first")
    if is_in_s3(url):
        bucket = InsistentBucket(url)
        require_distinct([*export.files, MANIFEST], str(export.path), PublicationError)
        with _naming_export(export):
            _require_certificate(export)
            published_in(bucket, Publication)  # to report at once what is missing, before the files are read
            files = measure(export.path, export.files, progress)
            return publish_to_bucket(bucket, export.path, _record(export, url), files, progress)
    with _naming_export(export):
        export.verify(progress)
        _require_certificate(export)
    record = _record(export, url)
    if (existing := _existing(url, record, progress)) is not None:
        return existing
    folder = local_folder(url)
    if folder is None:
        _warn_of_no_guarantee(url)
        upload(export.path, record, url, progress)
        return record
    _copy(export, record, folder, progress)
    return record.model_copy(update={"path": folder, "url": str(folder)})


def _warn_of_no_guarantee(url: str) -> None:
    _log.warning(
        "%s is not in S3: its store has no write that only one of several processes can do. Let only one run publish "
        "there at a time. Readers should wait for %s and verify its files",
        redacted(url), MANIFEST,
    )  # fmt: skip


def _record(export: Export, url: str) -> Publication:
    """Return the manifest. The URL of a local folder is ``.``, because the folder can be moved."""
    return Publication(
        path=Path(),
        url="." if local_folder(url) is not None else redacted(url).rstrip("/"),
        fingerprint=fingerprint({"stage": "publication", "schema_version": 1, "export": export.fingerprint}),
        inputs={**export.inputs, "export": export.fingerprint},
        files=export.files,
        counts=export.counts,
        provenance=current_provenance(),
    ).sealed()


@contextmanager
def _naming_export(export: Export) -> Iterator[None]:
    try:
        yield
    except (CertificationError, DigestMismatch) as error:
        raise PublicationError(f"{export.path} cannot be published: {error}") from error


def _require_certificate(export: Export) -> None:
    """Raise CertificationError if the certificate does not vouch for the digests of all files."""
    verify_file(export.path / CERTIFICATE, export.files[CERTIFICATE])
    vouching_certificate(export.path, export.fingerprint, export.files)


def _existing(url: str, record: Publication, progress: Progress) -> Publication | None:
    """Return the verified publication of the same files. Raises PublicationError if something else is there."""
    found = publication_at(url)
    if found is None:
        return None
    if (other := difference(found, record, url)) is not None:
        raise other
    try:
        verified = verify(url, progress)
    except (DigestMismatch, PublicationError) as error:
        raise PublicationError(f"{redacted(url)} holds a damaged copy of this publication: {error}") from error
    return Publication.model_validate(verified).model_copy(update={"reused": True})


def _copy(export: Export, record: Publication, folder: Path, progress: Progress) -> None:
    total, done = sum(digest.size for digest in record.files.values()), 0
    try:
        with filling(folder) as partial:
            for name, digest in record.files.items():
                copy_durably(export.path / name, partial / name)
                verify_file(partial / name, digest)
                done += digest.size
                progress("bytes published", done, total)
            record.commit(partial)
    except OSError as error:
        raise PublicationError(f"{folder} cannot be written: {explain(error)}") from error

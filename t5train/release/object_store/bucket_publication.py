"""Publishes an export or a checkpoint to a bucket, so that readers see all of it or nothing.

The objects are uploaded first, into a folder that only this attempt uses. Then one conditional write of
``manifest.json``, which succeeds only if there is none, decides. Readers trust only the manifest, which names the
folder.
"""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path

from t5train.errors import CertificationError, DigestMismatch, PublicationError, StoreError
from t5train.progress import Progress
from t5train.records.stage_records import MANIFEST, Publication, Published
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.file_upload import FileUploads
from t5train.release.object_store.measured_file import MeasuredFile
from t5train.release.object_store.published_manifest import P, difference, not_empty, published_as, require_only
from t5train.release.object_store.store_errors import CONTENDED, PRECONDITION_FAILED, TRANSIENT, UNKNOWN_UPLOAD
from t5train.release.object_store.stored_objects import prove, read_back
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.object_store.write_check import compares_checksums, ignores_conditions

PART_BYTES = 64 << 20
_COMMIT_TRIES, _COMMIT_SECONDS = 6, 900.0
_FIRST_PAUSE_SECONDS = 0.5
_ATTEMPT = re.compile("[0-9a-f]{12}-[0-9a-f]{16}")
_log = logging.getLogger(__name__)


def publish_to_bucket(
    bucket: BucketFolder, folder: Path, record: P, files: Mapping[str, MeasuredFile], progress: Progress,
    part_bytes: int = PART_BYTES,
) -> P:  # fmt: skip
    """Upload a certified export or a checkpoint, or continue an interrupted upload of it, and commit its manifest.

    Args:
        bucket: The destination.
        folder: The folder with the files.
        record: The record to publish.
        files: Its files, which have the digests in it.
        progress: Called with the number of bytes that are sent.
        part_bytes: Files that are larger are sent in parts of this size.

    Returns:
        The record at the destination. It is reused if it was there already, or if another process was first.

    Raises:
        DigestMismatch: A file was changed since it was read, or its object is not the file.
        PublicationError: The destination holds something else, or something else was published there meanwhile.
        StoreError: The server refuses, or does not answer. Publishing again continues.

    """
    with UploadJournal.opened(folder, f"{bucket.endpoint} {bucket.url}") as journal:
        found, is_new = published_in(bucket, type(record)), False
        bucket.compares_checksums = _compares_checksums(bucket, is_published=found is not None)
        if found is None:
            attempt = journal.continue_attempt(record.fingerprint, record.files)
            uploads = FileUploads(bucket, attempt, files, part_bytes, progress)
            found = _publication_of_another(bucket, uploads, type(record))
            if found is None:
                found = _commit(bucket, record.model_copy(update={"folder": attempt}).sealed())
            is_new = found.folder == attempt and found.files == record.files
            if is_new:
                uploads.send_missing()
        other = difference(found, record, bucket.url)
        if other is None and not is_new:
            _prove(bucket, found, files)
        if _is_cleaned_up(bucket, journal, found):
            journal.remove()
        if other is not None:
            raise other
    return found.model_copy(update={"reused": not is_new})


def published_in(bucket: BucketFolder, kind: type[P]) -> P | None:
    """Return the record of what is published in a bucket's folder, without verifying it; None if there is nothing.

    Raises PublicationError for anything else: other files, another kind of record, a damaged manifest.
    """
    present = bucket.names(below=False)  # to read what does not exist may be denied
    if MANIFEST in present:
        return _manifest_in(bucket, kind)
    if present:
        raise not_empty(bucket.url, present)
    return None


def _manifest_in(bucket: BucketFolder, kind: type[P]) -> P | None:
    """Return the record in the manifest; None if there is no manifest. Raises as ``published_in`` does."""
    try:
        content = bucket.read(MANIFEST)
    except DigestMismatch as error:
        raise PublicationError(str(error)) from error
    return None if content is None else published_as(kind, content, bucket.url)


def _compares_checksums(bucket: BucketFolder, *, is_published: bool) -> bool:
    try:
        return compares_checksums(bucket)
    except StoreError:
        if not is_published:
            raise
        return False  # what is there can be proven without the right to write


def _publication_of_another(bucket: BucketFolder, uploads: FileUploads, kind: type[P]) -> P | None:
    """Upload the files. Returns the publication of another process that was first, if it removed what was uploaded."""
    try:
        uploads.send()
        uploads.send_missing()
    except (DigestMismatch, StoreError) as error:
        if isinstance(error, StoreError) and error.code != UNKNOWN_UPLOAD:
            raise
        try:
            found = _manifest_in(bucket, kind)
        except StoreError:
            raise error from None  # the cause, which may be a damaged file
        if found is None:
            raise
        return found
    return None


def _commit(bucket: BucketFolder, record: P) -> P:
    """Write the manifest if there is none, and return the one that is there then.

    After an error, only the server knows whether the manifest was written, so it is asked. A manifest that was just
    written, or that the server refused to replace, is there: it is read without asking for a list, which may be stale.
    """
    content, started = record.manifest_text().encode(), time.monotonic()
    for number in range(_COMMIT_TRIES):
        failure = None
        try:
            bucket.put(MANIFEST, content, ContentType="application/json", IfNoneMatch="*")
        except StoreError as error:
            failure = error
        is_there = failure is None or failure.code in PRECONDITION_FAILED
        try:
            found = _manifest_in(bucket, type(record)) if is_there else published_in(bucket, type(record))
        except StoreError as error:
            if error.code not in TRANSIENT:
                raise
            failure, found = error, None
        if found is not None:
            return found
        if failure is not None and failure.code not in (*CONTENDED, *PRECONDITION_FAILED, *TRANSIENT):
            raise failure
        if time.monotonic() - started > _COMMIT_SECONDS:  # each request insists for minutes
            break
        time.sleep(_FIRST_PAUSE_SECONDS * 2**number)
    raise failure or PublicationError(
        f"{bucket.url}/{MANIFEST} was written, but the server does not return it. Check the server, then publish again"
    )


def _is_cleaned_up(bucket: BucketFolder, journal: UploadJournal, found: Published) -> bool:
    """Whether what other uploads left was removed. If it was not, that changes nothing of what is published."""
    try:
        _clean_up(bucket, journal, found)
        _remove_orphans(bucket, found)
    except PublicationError as error:
        _log.warning(
            "%s is published, but what other uploads left there could not be removed: %s. To remove it, publish again",
            bucket.url, error,
        )  # fmt: skip
        return False
    return True


def _clean_up(bucket: BucketFolder, journal: UploadJournal, found: Published) -> None:
    """Remove what can no longer become a publication: all unfinished uploads, and the objects of other own attempts."""
    for name, upload_id in bucket.uploads():
        if _ATTEMPT.fullmatch(name.partition("/")[0]):
            bucket.abort(name, upload_id)
    for attempt in journal.attempts:
        if not _ATTEMPT.fullmatch(attempt.name):
            continue
        objects = [f"{attempt.name}/{file}" for file in attempt.files]
        for name, upload_id in (upload for each in objects for upload in bucket.uploads(each)):
            bucket.abort(name, upload_id)
        if attempt.name != found.folder:
            _log.warning(
                "%s is published from %s, which was first: removing what was uploaded to %s",
                bucket.url, found.folder or "an earlier version", attempt.name,
            )  # fmt: skip
            for each in objects:
                bucket.call("delete_object", each)


def _remove_orphans(bucket: BucketFolder, found: Published) -> None:
    """Remove the objects of other uploads of what is published, whose journals may be lost with their machines.

    One of them may still be going on, but as long as the manifest of ``found`` is there, it cannot be committed, and
    its process will use that publication. If somebody removes the manifest, that process sends again what is missing.
    Nothing is removed from servers that would replace the manifest.
    """
    orphans = {
        name: folder
        for name in bucket.sizes(f"{found.fingerprint[:12]}-")
        if _ATTEMPT.fullmatch(folder := name.partition("/")[0]) and folder != found.folder
    }
    if not orphans or ignores_conditions(bucket):
        return
    _log.warning(
        "removing what uploads that were not published left in %s: %s",
        bucket.url, ", ".join(sorted({*orphans.values()})),
    )  # fmt: skip
    for name in orphans:
        # Asked each time: if somebody has removed the manifest, the upload may be committed.
        now = published_in(bucket, type(found))
        if now is None or now.seal != found.seal:
            return
        bucket.call("delete_object", name)


def _prove(bucket: BucketFolder, found: Published, files: Mapping[str, MeasuredFile]) -> None:
    """Raise PublicationError unless the publication's objects are what its manifest says, and no others are with them.

    The server's checksums prove those that are the files here. Others, such as a certificate that was made again, are
    read. A certificate has to vouch for all files of an export.
    """
    require_only(found, bucket.names(found.folder, below=bool(found.folder)), bucket.url)
    try:
        for name, digest in found.files.items():
            stored, here = found.name_beside_manifest(name), files.get(name)
            if here is not None and here.digest == digest:
                prove(bucket, stored, here)
            else:
                read_back(bucket, stored, digest)
        if not isinstance(found, Publication):
            return
        where = found.name_beside_manifest(CERTIFICATE)
        certificate = Certificate.parse(bucket.read(where) or b"", f"{bucket.url}/{where}")
        certificate.require_vouching(found.inputs.get("export", ""), found.files, f"{bucket.url}/{where}")
    except (CertificationError, DigestMismatch) as error:
        raise PublicationError(f"{bucket.url} holds a damaged copy of this publication: {error}") from error

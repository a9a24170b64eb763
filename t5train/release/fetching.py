"""Restores a publication from S3 to a local folder."""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from t5train.errors import InputError, PublicationError, RecordError, StorageError
from t5train.files.atomic import filling
from t5train.files.confined import confined, require_distinct
from t5train.files.os_errors import explain
from t5train.files.presence import files_below, is_folder, is_there
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest
from t5train.records.locations import redacted, require_location
from t5train.records.stage_records import MANIFEST, Publication, Published
from t5train.release.certificate import CERTIFICATE
from t5train.release.object_store.bucket import BucketFolder, is_in_s3
from t5train.release.object_store.stored_objects import differs, expected_chunks
from t5train.release.object_store.transfers import ByteCount, run_jobs
from t5train.release.verification import manifest_in, require_certified, verify_local

_CHUNK_BYTES = 1 << 20


def fetch(url: str, folder: Path, progress: Progress = silent) -> Published:
    """Copy a publication or a checkpoint from S3 to a new local folder, as if it had been published there.

    The folder appears once every file has the size and sha256 in the manifest. The certificate of a publication has to
    vouch for its files. What an interrupted call has copied is kept beside it, and the next call continues.

    Args:
        url: ``s3://BUCKET/FOLDER`` of a publication, or of one checkpoint.
        folder: Folder to create. One that holds this publication already is verified and left as it is.
        progress: Called with the number of bytes that are on disk.

    Returns:
        The record of the folder.

    Raises:
        InputError: The URL is not one of S3.
        RecordError: There is no publication.
        DigestMismatch: The manifest is damaged, or an object is not what the manifest says.
        PublicationError: The folder holds something else, the publication is not certified, or the server refuses.
        StorageError: The folder cannot be written, or is too small.

    """
    require_location(url)
    require_location(str(folder))
    if not is_in_s3(url):
        raise InputError(
            f"{redacted(url)} is not in S3: copy it with the tools of its store, then `t5-pretrain verify` the copy"
        )
    bucket, folder = BucketFolder(url), folder.absolute()
    published = manifest_in(bucket)
    if is_there(folder) and not is_folder(folder):
        raise PublicationError(f"{folder} is a file: fetch to another folder")
    if is_there(folder) and any(folder.iterdir()):
        return _already_there(folder, published, progress)
    if isinstance(published, Publication):
        content = bucket.read(published.name_beside_manifest(CERTIFICATE)) or b""
        require_certified(published, content, bucket.url)
    copy = published.model_copy(update={"folder": "", "url": "."}).sealed()
    with copied(bucket, published, folder, progress) as unfinished:
        copy.commit(unfinished)
    return copy.model_copy(update={"path": folder, "url": str(folder)})


def _already_there(folder: Path, published: Published, progress: Progress) -> Published:
    try:
        found = type(published).load(folder)
    except RecordError as error:
        raise PublicationError(f"{folder} is not empty and holds no publication: fetch to another folder") from error
    if found.files != published.files:
        raise PublicationError(f"{folder} holds another publication: fetch to another folder")
    return type(published).model_validate(verify_local(folder, progress)).model_copy(update={"reused": True})


@contextmanager
def copied(bucket: BucketFolder, published: Published, folder: Path, progress: Progress) -> Iterator[Path]:
    """Copy the files of a publication to a new folder, which appears after the block. An interrupted copy is continued.

    Every file is verified as it is written. Raises DigestMismatch, StoreError, and StorageError if the folder cannot be
    written or is too small, or if a name leads elsewhere.
    """
    require_names_for(folder, published, bucket)
    try:
        with filling(folder, keep_unfinished=True) as unfinished:
            _copy_files(bucket, published, unfinished, progress)
            yield unfinished
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {explain(error)}") from error


def require_names_for(folder: Path, published: Published, bucket: BucketFolder) -> None:
    """Raise StorageError if a file of a publication would lead out of a folder, or two have the same name there."""
    source = f"{bucket.url}/{MANIFEST}"
    for name in published.files:
        confined(folder, name, source)
    require_distinct([*published.files, MANIFEST], source)


def _copy_files(bucket: BucketFolder, published: Published, folder: Path, progress: Progress) -> None:
    """Copy all files. Files of other names are removed from the folder."""
    _remove_others(folder, published)
    copy_files(bucket, published, published.files, folder, progress)


def copy_files(
    bucket: BucketFolder, published: Published, names: Iterable[str], folder: Path, progress: Progress
) -> None:
    """Copy some files of a publication, several at a time. ``require_names_for`` has checked their names.

    What is there of a file is verified and continued. Raises DigestMismatch, StoreError and StorageError.
    """
    files = {name: published.files[name] for name in names}
    there = sum((folder / name).stat().st_size for name in files if (folder / name).exists())
    total = sum(digest.size for digest in files.values())
    if (free := shutil.disk_usage(folder).free) < total - there:
        raise StorageError(
            f"{folder} needs {total - there:,} more bytes, but {free:,} are free. Free some space, or fetch elsewhere"
        )
    count = ByteCount("bytes fetched", total, progress, bucket.stopping)

    def copy(name: str, digest: FileDigest) -> None:
        _copy_file(bucket, published.name_beside_manifest(name), folder / name, digest, count.add)

    run_jobs((partial(copy, name, digest) for name, digest in files.items()), count)


def _remove_others(folder: Path, published: Published) -> None:
    """Remove what is not a file of this publication: what was fetched of another one, links, and files of other users.

    To append to a file that has a second name elsewhere would change it there.
    """
    owner = folder.stat().st_uid
    for name in files_below(folder):
        found = (folder / name).lstat()
        is_own = stat.S_ISREG(found.st_mode) and (found.st_nlink, found.st_uid) == (1, owner)
        if name not in published.files or not is_own:
            (folder / name).unlink()
    for parent, _, _ in os.walk(folder, topdown=False):
        if Path(parent) != folder and not any(Path(parent).iterdir()):
            Path(parent).rmdir()


def _copy_file(
    bucket: BucketFolder, stored: str, path: Path, expected: FileDigest, count: Callable[[int], None]
) -> None:
    """Complete a file. Starts over once if what was there is not its beginning. ``count`` is called with sizes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > expected.size:
        path.unlink()
    was_begun = path.exists()
    found = _completed(bucket, stored, path, expected, count)
    if found != expected and was_begun:
        path.unlink()
        count(-found.size)
        found = _completed(bucket, stored, path, expected, count)
    if found != expected:
        path.unlink()
        raise differs(f"{bucket.url}/{stored}", found, expected)


def _completed(
    bucket: BucketFolder, stored: str, path: Path, expected: FileDigest, count: Callable[[int], None]
) -> FileDigest:
    """Append to a file what it lacks, and return its digest."""
    sha256 = hashlib.sha256()
    # Somebody may have put a link there meanwhile.
    with open(path, "a+b", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            count(len(chunk))
        size = file.tell()
        for chunk in expected_chunks(bucket, stored, expected, size) if size < expected.size else ():
            file.write(chunk)
            sha256.update(chunk)
            size += len(chunk)
            count(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size=size, sha256=sha256.hexdigest())

"""Compares a local folder, or one in an object store, with its manifest, byte by byte."""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from t5train.errors import (
    CertificationError,
    DigestMismatch,
    PublicationError,
    RecordError,
    StoreError,
    T5TrainError,
)
from t5train.files.confined import confined
from t5train.files.presence import ABSENT, files_below, is_folder, is_there, names_in, reading
from t5train.files.run_folder import RUN
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, digest_safetensors_stream
from t5train.records.locations import explained, local_folder, redacted, remote_folder, require_location
from t5train.records.stage_records import MANIFEST, Publication, Published, Record, parse_manifest
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.release.object_store.bucket import BucketFolder, is_in_s3
from t5train.release.object_store.published_manifest import require_only
from t5train.release.object_store.stored_objects import Digest, differs, missing, read_back
from t5train.release.object_store.transfers import ByteCount, run_jobs

_CHUNK_BYTES = 8 << 20
_SHOWN_FAULTS = 50


def verify(path_or_url: str | Path, progress: Progress = silent) -> Record:
    """Check that every file of a folder or URL has the recorded size and sha256.

    A publication must also hold no other files, an unchanged manifest, and a passing certificate for its files.

    Args:
        path_or_url: Folder of any finished stage, or folder or fsspec URL of a publication.
        progress: Called with the number of bytes verified.

    Returns:
        The record of the stage.

    Raises:
        InputError: The URL is not one.
        RecordError: There is no manifest, or it is damaged.
        DigestMismatch: Files differ or are missing. The error names all of them, and any other fault.
        PublicationError: The publication holds files that are not in the record, or is not certified.

    """
    url = str(path_or_url)
    require_location(url)
    folder = local_folder(url)
    if folder is not None:
        return verify_local(folder, progress)
    return verify_bucket(BucketFolder(url), progress) if is_in_s3(url) else verify_remote(url, progress)


def verify_local(folder: Path, progress: Progress = silent) -> Record:
    """``verify`` for a folder on this machine."""
    try:
        with reading(folder / MANIFEST):
            content = (folder / MANIFEST).read_bytes()
    except ABSENT as error:
        raise RecordError(
            f"{folder / MANIFEST} cannot be read ({error.strerror}): {folder} "
            f"{'is not the folder of a finished stage' if folder.is_dir() else 'does not exist'}. Check the path"
        ) from None
    record = parse_manifest(content, str(folder / MANIFEST))
    holds_files = folder / record.folder if isinstance(record, Publication) else folder
    record = record.model_copy(update={"path": holds_files})
    faults: list[T5TrainError] = list(record.faults(progress))
    if isinstance(record, Publication):
        present = files_below(holds_files)
        if record.folder:  # as in S3, only the folder that the manifest names counts, and what is beside the manifest
            present += [name for name in names_in(folder) if not is_folder(folder / name)]
        faults += _faults_of(_require_whole, record, present, str(folder))
        if is_there(holds_files / CERTIFICATE):  # otherwise a fault by now
            with reading(holds_files / CERTIFICATE):
                content = (holds_files / CERTIFICATE).read_bytes()
            faults += _faults_of(require_certified, record, content, str(folder))
        record = record.model_copy(update={"url": str(folder)})
    _raise_all(faults, str(folder))
    return record


def verify_remote(url: str, progress: Progress = silent) -> Record:
    """``verify`` for any other URL that fsspec can read. Files are streamed and not stored."""
    filesystem, folder = remote_folder(url)
    top = where = redacted(url).rstrip("/")
    beside = list[str]()
    with explained(url, "cannot be read"):
        try:
            content = filesystem.cat_file(f"{folder}/{MANIFEST}")
        except FileNotFoundError:
            raise RecordError(
                f"{where}/{MANIFEST} does not exist: no stage was finished there. Check the URL"
            ) from None
        record = parse_manifest(content, f"{where}/{MANIFEST}")
        for name in record.files:  # a corpus may name files anywhere, but only on its own machine
            confined(Path(folder), name, f"{where}/{MANIFEST}", RecordError)
        if isinstance(record, Publication) and record.folder:
            beside = [name for name in object_names(filesystem, folder) if "/" not in name]
            folder, where = f"{folder}/{record.folder}", f"{where}/{record.folder}"
        faults: list[T5TrainError] = []
        for name, digest in record.files.items():
            faults += _faults_of(verify_object, filesystem, f"{folder}/{name}", digest, f"{where}/{name}", progress)
        if isinstance(record, Publication):
            faults += _faults_of(_require_whole, record, [*object_names(filesystem, folder), *beside], top)
            if filesystem.exists(f"{folder}/{CERTIFICATE}"):  # otherwise a fault by now
                content = filesystem.cat_file(f"{folder}/{CERTIFICATE}")
                faults += _faults_of(require_certified, record, content, where)
            record = record.model_copy(update={"url": where})
        _raise_all(faults, where)
    return record


def verify_bucket(bucket: BucketFolder, progress: Progress = silent) -> Record:
    """``verify`` for a folder of an S3 bucket. Several objects are read at a time, and not stored."""
    where = bucket.url
    record = manifest_in(bucket)
    faults: list[T5TrainError] = []
    total = sum(digest.size for digest in record.files.values())
    read = ByteCount("bytes verified", total, progress, bucket.stopping)

    def compare(name: str, digest: FileDigest) -> None:
        faults.extend(_faults_of(read_back, bucket, record.name_beside_manifest(name), digest, read.add))

    run_jobs((partial(compare, name, digest) for name, digest in record.files.items()), read)
    faults.sort(key=str)  # threads find them in any order
    present = bucket.names(record.folder)
    if record.folder:
        present += bucket.names(below=False)
    if isinstance(record, Publication):
        faults += _faults_of(_require_whole, record, present, where)
        faults += _faults_of(_require_certified_in, bucket, record)
    else:
        faults += _faults_of(require_only, record, present, where)
    _raise_all(faults, where)
    return record.model_copy(update={"url": where})


def _require_certified_in(bucket: BucketFolder, record: Publication) -> None:
    if (content := bucket.read(record.name_beside_manifest(CERTIFICATE))) is not None:  # otherwise a fault by now
        require_certified(record, content, bucket.url)


def manifest_in(bucket: BucketFolder) -> Published:
    """Return the record of what is published in a bucket's folder.

    Raises RecordError if there is nothing, and DigestMismatch if the manifest is damaged.
    """
    where = f"{bucket.url}/{MANIFEST}"
    if (content := bucket.read(MANIFEST)) is None:
        raise RecordError(f"{where} does not exist: {_instead_of_manifest(bucket)}")
    record = parse_manifest(content, where)
    if not isinstance(record, Published):
        raise RecordError(f"{where} is that of a {record.kind}. Only publications can be read from S3: check the URL")
    return record


def _instead_of_manifest(bucket: BucketFolder) -> str:
    """Say what to do without a manifest. In the folder of a run, each checkpoint has one."""
    if RUN not in bucket.names(below=False):
        return "nothing is published there. Check the URL"
    checkpoints = sorted(name.partition("/")[0] for name in bucket.names() if name.endswith(f"/{MANIFEST}"))
    return f"{bucket.url} holds the checkpoints of a run. Name one of them: {', '.join(checkpoints) or 'there is none'}"


def _faults_of(require: Callable[..., None], *given: Any) -> list[T5TrainError]:
    """Call a function that raises DigestMismatch or PublicationError for a fault, and return the fault, if any.

    A store that does not answer is no fault of the data, so StoreError is raised.
    """
    try:
        require(*given)
    except StoreError:
        raise
    except (DigestMismatch, PublicationError) as fault:
        return [fault]
    return []


def _raise_all(faults: list[T5TrainError], where: str) -> None:
    """Raise an error that names all faults, of the class of the first one."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        more = f"; and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
        named = "; ".join(str(fault) for fault in faults[:_SHOWN_FAULTS])
        raise type(faults[0])(f"{where} has {len(faults)} faults: {named}{more}")


def verify_object(filesystem: Any, path: str, expected: Digest, shown: str, progress: Progress) -> None:
    """Read the object at ``path``, and raise DigestMismatch unless it has this size and digest."""

    def report(size: int) -> None:
        progress(f"bytes of {PurePosixPath(path).name} verified", size, expected.size)

    try:
        with filesystem.open(path, "rb", block_size=_CHUNK_BYTES) as file:
            found = (
                _digest(file, report) if isinstance(expected, FileDigest) else digest_safetensors_stream(file, report)
            )
    except FileNotFoundError:
        raise missing(shown, expected) from None
    if found != expected:
        raise differs(shown, found, expected)


def _digest(file: IO[bytes], report: Callable[[int], None]) -> FileDigest:
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        report(size)
    return FileDigest(size=size, sha256=digest.hexdigest())


def object_names(filesystem: Any, folder: str) -> list[str]:
    """Return the names of all objects below ``folder``, relative to it."""
    if "http" in filesystem.protocol or "https" in filesystem.protocol:
        return []  # a web server may not list its folders
    prefix = filesystem._strip_protocol(folder).rstrip("/") + "/"
    return [str(path).removeprefix(prefix) for path in filesystem.find(folder)]


def _require_whole(record: Publication, present: Iterable[str], where: str) -> None:
    """Raise PublicationError unless the record lists a certificate, and only listed files are present."""
    if CERTIFICATE not in record.files:
        raise PublicationError(
            f"{where} is not certified: {MANIFEST} lists no {CERTIFICATE}. Certify the export and publish to another "
            "destination, or remove this publication first"
        )
    require_only(record, present, where)


def require_certified(record: Publication, content: bytes, where: str) -> None:
    """Raise PublicationError unless ``content`` is a certificate that vouches for the record's files."""
    try:
        certificate = Certificate.parse(content, f"{where}/{CERTIFICATE}")
        certificate.require_vouching(record.inputs.get("export", ""), record.files, f"{where}/{CERTIFICATE}")
    except CertificationError as error:
        raise PublicationError(f"{where} is not certified: {error}") from error

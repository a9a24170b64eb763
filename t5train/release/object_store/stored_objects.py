"""Proves that an object of a bucket is the file that it should be."""

import hashlib
from collections.abc import Callable, Iterator

from t5train.errors import DigestMismatch, StoreError
from t5train.records.digests import FileDigest, SafetensorsDigest
from t5train.records.stage_records import MANIFEST
from t5train.release.object_store.bucket import BucketFolder, encoded, insistent_chunks
from t5train.release.object_store.measured_file import MeasuredFile
from t5train.release.object_store.store_errors import MISSING

_CRC = "ChecksumCRC64NVME"
Digest = FileDigest | SafetensorsDigest
_REMEDY = f"restore the object, or remove the publication (its {MANIFEST} first) and publish again"


def prove(bucket: BucketFolder, name: str, expected: MeasuredFile) -> None:
    """Raise DigestMismatch unless an object has this size and the checksum that the server computed itself.

    If the server returns no such checksum, or does not compare it with what it receives, the object is read back, and
    its sha256 compared.
    """
    try:
        found = bucket.call("head_object", name, ChecksumMode="ENABLED")
    except StoreError as error:
        # 403 is also the answer for a missing object, without permission to list the whole bucket.
        if error.code in MISSING or (error.code == "403" and name not in bucket.sizes(name)):
            raise missing(f"{bucket.url}/{name}", expected.digest) from None
        raise
    if (crc := found.get(_CRC)) is None or not bucket.compares_checksums:
        read_back(bucket, name, expected.digest)
    elif (found["ContentLength"], crc) != (expected.size, encoded(expected.crc)):
        raise DigestMismatch(
            f"{bucket.url}/{name} has {found['ContentLength']:,} bytes and CRC64NVME {crc}, but {expected.size:,} "
            f"bytes and {encoded(expected.crc)} were sent: publish again"
        )


def is_proven(bucket: BucketFolder, name: str, expected: MeasuredFile) -> bool:
    """Whether ``prove`` accepts the object."""
    try:
        prove(bucket, name, expected)
    except DigestMismatch:
        return False
    return True


def read_back(
    bucket: BucketFolder, name: str, expected: FileDigest, count: Callable[[int], None] = lambda _: None
) -> None:
    """Read an object, and raise DigestMismatch unless it has this size and sha256. ``count`` is called with sizes."""
    sha256, size = hashlib.sha256(), 0
    for chunk in expected_chunks(bucket, name, expected):
        sha256.update(chunk)
        size += len(chunk)
        count(len(chunk))
    if (found := FileDigest(size=size, sha256=sha256.hexdigest())) != expected:
        raise differs(f"{bucket.url}/{name}", found, expected)


def expected_chunks(bucket: BucketFolder, name: str, expected: FileDigest, start: int = 0) -> Iterator[bytes]:
    """Yield the content of an object from ``start`` on, until it is longer than expected.

    Content that does not have the server's own checksum is yielded, too: the caller compares its digest. Raises
    DigestMismatch if there is no such object, and StoreError as ``insistent_chunks`` does.
    """
    size = start
    try:
        for chunk in insistent_chunks(bucket, name, start):
            yield chunk
            size += len(chunk)
            if size > expected.size:
                return
    except StoreError as error:
        if error.code in MISSING:
            raise missing(f"{bucket.url}/{name}", expected) from None
        raise
    except DigestMismatch:  # found by the client after the last byte: the caller says more
        return


def differs(url: str, found: Digest, expected: Digest) -> DigestMismatch:
    """The error for an object with other content."""
    return DigestMismatch(
        f"{url} has {found.size:,} bytes and {found}, but {expected.size:,} bytes and {expected} were recorded, so the "
        f"store received other bytes than were sent, or the object was changed or damaged since: {_REMEDY}"
    )


def missing(url: str, expected: Digest) -> DigestMismatch:
    """The error for an object that does not exist."""
    return DigestMismatch(f"{url} is missing, but {expected.size:,} bytes were recorded: {_REMEDY}")

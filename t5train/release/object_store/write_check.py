"""Checks a bucket by what publishing needs: write, conditional write, read, delete and list."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from t5train.errors import PublicationError, StoreError
from t5train.release.object_store.bucket import BucketFolder, crc_of, encoded
from t5train.release.object_store.store_errors import PRECONDITION_FAILED, TRANSIENT, WRONG_CHECKSUM

_CONTENT = b"t5-pretrain writes, reads and deletes this object to check that it can publish here.\n"
_log = logging.getLogger(__name__)


def check_writing(bucket: BucketFolder) -> None:
    """Write, read and delete an object, and list unfinished uploads. Raises StoreError for what is not possible.

    Warns of a server that ignores the condition of a write, where two processes could both publish, and of one that
    does not compare checksums.
    """
    with _probe(bucket) as name:
        found = bucket.read(name)
        is_conditional = _is_refused(bucket, name)
    if found != _CONTENT:
        raise PublicationError(
            f"{bucket.url}/{name} was not what had been written there: the store is not reliable. Check the server"
        )
    if not is_conditional:
        _log.warning(
            "%s ignores the condition that an object must not exist yet (If-None-Match), so %s can be published twice. "
            "Let only one run publish there at a time",
            bucket.endpoint, bucket.url,
        )  # fmt: skip
    compares_checksums(bucket)
    bucket.uploads()


def compares_checksums(bucket: BucketFolder) -> bool:
    """Whether the server refuses an object whose checksum is wrong; warns if it does not. Raises StoreError.

    A server that only stores the checksum returns it for any content, so there it proves nothing.
    """
    for _ in range(2):
        code = _answer_to_wrong_checksum(bucket)
        if code in WRONG_CHECKSUM:
            return True
        if code is None:
            break
        name = _probe_name()
        bucket.put(name, _CONTENT)  # servers may have another code: is the right checksum accepted?
        bucket.call("delete_object", name)
    else:
        if code not in TRANSIENT:
            return True
    _log.warning(
        "%s does not refuse an object with a wrong checksum (CRC64NVME), so what is published to %s is read back, "
        "which takes as long again",
        bucket.endpoint, bucket.url,
    )  # fmt: skip
    return False


def _answer_to_wrong_checksum(bucket: BucketFolder) -> str | None:
    """The error's code; None if the server accepts the object, which is then deleted."""
    name, wrong = _probe_name(), encoded(crc_of(_CONTENT) ^ 1)
    try:  # without insisting: an answer that is usually transient may be to the checksum here
        BucketFolder.call(bucket, "put_object", name, Body=_CONTENT, ChecksumCRC64NVME=wrong)
    except StoreError as error:
        return error.code
    bucket.call("delete_object", name)
    return None


def ignores_conditions(bucket: BucketFolder) -> bool:
    """Whether the server replaces an object although it must not exist yet. Raises StoreError."""
    with _probe(bucket) as name:
        return not _is_refused(bucket, name)


def require_replacing(bucket: BucketFolder) -> None:
    """Raise PublicationError if the server replaces an object although it is not the one that the writer has read."""
    with _probe(bucket) as name:
        try:
            bucket.put(name, _CONTENT, IfMatch=f'"{"0" * 32}"')
        except StoreError as error:
            if error.code not in PRECONDITION_FAILED:
                raise
        else:
            raise PublicationError(
                f"{bucket.endpoint} ignores the condition that an object must not have changed (If-Match), so two "
                "heads could change the checkpoints of one run. Use another server, or leave "
                "storage.publish_checkpoints_under out"
            )


@contextmanager
def _probe(bucket: BucketFolder) -> Iterator[str]:
    """The name of an object that exists in the block. An error of the block is raised, and not one of its removal."""
    name = _probe_name()
    try:
        bucket.put(name, _CONTENT)
        yield name
    except BaseException:
        with suppress(StoreError):
            bucket.call("delete_object", name)
        raise
    bucket.call("delete_object", name)


def _probe_name() -> str:
    return f"write-check-{secrets.token_hex(8)}/probe.txt"


def _is_refused(bucket: BucketFolder, name: str) -> bool:
    """Whether the server refuses to create an object that exists."""
    try:
        bucket.put(name, _CONTENT, IfNoneMatch="*")
    except StoreError as error:
        if error.code in PRECONDITION_FAILED:
            return True
        raise
    return False

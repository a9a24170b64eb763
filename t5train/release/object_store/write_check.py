"""Checks a bucket before a run trains, by what publishing needs: write, read and delete."""

import secrets

from t5train.errors import PublicationError
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.checksums import crc_of, encoded

_CONTENT = b"t5-pretrain writes, reads and deletes this object to check that it can publish here.\n"


def check_writing(bucket: BucketFolder) -> None:
    """Write, read and delete an object, and list unfinished uploads. Raises StoreError for what is not possible."""
    name = f"write-check-{secrets.token_hex(8)}/probe.txt"
    bucket.call("put_object", name, Body=_CONTENT, IfNoneMatch="*", ChecksumCRC64NVME=encoded(crc_of(_CONTENT)))
    try:
        found = bucket.read(name)
    finally:
        bucket.call("delete_object", name)
    if found != _CONTENT:
        raise PublicationError(
            f"{bucket.url}/{name} was not what had been written there: the store is not reliable. Check the server"
        )
    bucket.uploads()

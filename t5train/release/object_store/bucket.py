"""A folder of an S3 bucket. Endpoint, region, profile and credentials are those that boto3 finds by itself.

Small objects are written with their CRC64NVME, the checksum of whole objects that S3 servers compute, compare and
return. ``InsistentBucket`` outlasts a store that is busy, restarting or unreachable for some minutes.
"""

import base64
import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from http import HTTPStatus
from pathlib import Path
from typing import Any

from t5train.errors import DigestMismatch, PublicationError, StoreError
from t5train.files.confined import confined
from t5train.records.locations import redacted
from t5train.release.object_store.store_errors import (
    BEYOND_END,
    DAMAGED_ANSWER,
    MISSING,
    TRANSIENT,
    UNKNOWN_UPLOAD,
    store_error,
)

_SCHEMES = ("s3://", "s3a://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_FIRST_BYTE = re.compile(r"bytes (\d+)-")
_TRIES = 8
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 64 << 20
_VERBS = {"get": "read", "head": "read", "list": "read", "delete": "deleted"}
_MOST_CONNECTIONS = 10  # one for each thread that transfers, and for the thread that renews a lease
INSIST_SECONDS = 600.0
"""How long one request is tried again after transient failures, and a stream since its last byte."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0
_log = logging.getLogger(__name__)


def is_in_s3(url: str) -> bool:
    """Whether a URL names a folder of a bucket."""
    return url.startswith(_SCHEMES)


def crc_of(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC64NVME of data in memory, which follow what has the CRC ``before``."""
    from awscrt.checksums import crc64nvme

    return int(crc64nvme(data, before))


def encoded(crc: int) -> str:
    """Return a CRC as it is in S3's headers."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


class BucketFolder:
    """A folder of a bucket, and the client for it. Threads can share it."""

    compares_checksums = True
    """Whether the server compares checksums with what it receives. If not, those that it returns prove nothing."""

    def __init__(self, url: str, tries: int | None = None, wait_seconds: float = _READ_SECONDS) -> None:
        """``tries`` is how often a request is sent before it fails; None: eight times.

        ``wait_seconds`` is how long an answer may take each time.

        Raises PublicationError if the URL names no bucket or boto3 is missing, StoreError if it has no settings.
        """
        self._bucket, _, folder = url.partition("://")[2].partition("/")
        if "@" in self._bucket:
            raise PublicationError(
                "a URL of S3 has a user or a key before its bucket: remove it, and give credentials where boto3 reads "
                "them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws)"
            )
        if not _BUCKET.fullmatch(self._bucket):  # it may be a key, so the URL is not shown
            raise PublicationError(
                "a URL of S3 names no bucket: write s3://BUCKET/FOLDER, and give credentials where boto3 reads them "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws)"
            )
        self.url, self._own = redacted(url).rstrip("/"), ""
        if redacted(url) != url:
            raise PublicationError(f"{self.url} was given with a query, a fragment or a key: write s3://BUCKET/FOLDER")
        if folder := folder.rstrip("/"):
            _require_names_of_folders(folder, self.url)
            self._own = f"{folder}/"
        self._client = _client(self.url, tries or _TRIES, wait_seconds)
        self.stopping = threading.Event()
        """Set when requests should neither go on nor be tried again, because another thread has failed."""

    def below(self, folder: str) -> "BucketFolder":
        """Return the folder of this name in this one. The client is shared."""
        below = copy(self)
        below.url, below._own, below.stopping = f"{self.url}/{folder}", f"{self._own}{folder}/", threading.Event()
        return below

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return redacted(str(self._client.meta.endpoint_url))

    def call(self, operation: str, name: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request about the object ``name``, or about the bucket. Raises StoreError."""
        if name is not None:
            arguments["Key"] = self._own + name
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except Exception as error:  # boto3's errors share no base; a chained one would show what servers wrote
            raise store_error(error, self._subject(operation, name), self.endpoint) from None
        return answer

    def put(self, name: str, content: bytes, **arguments: str) -> str:
        """Write a small object with a checksum that the server compares, and return its ETag. Raises StoreError."""
        crc = encoded(crc_of(content))
        return str(self.call("put_object", name, Body=content, ChecksumCRC64NVME=crc, **arguments)["ETag"])

    def chunks(self, name: str, start: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from ``start`` on, whatever the server sends of it. Raises StoreError.

        Raises DigestMismatch after the last byte if the server returned another checksum than that of what arrived.
        """
        from_start = {"Range": f"bytes={start}-"} if start else {}
        answer = self.call("get_object", name, **from_start)
        with closing(answer["Body"]):
            superfluous = start - self._first_byte(answer, name, start)
            for chunk in self._read(answer, name):
                if wanted := chunk[superfluous:]:
                    yield wanted
                elif self.stopping.is_set():
                    return
                superfluous = max(0, superfluous - len(chunk))

    def _first_byte(self, answer: dict[str, Any], name: str, start: int) -> int:
        """Where the content in an answer begins. Servers may ignore the Range header, and send the whole object."""
        if not start:
            return 0
        is_whole = answer["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.OK
        given = "bytes 0-" if is_whole else str(answer.get("ContentRange", "no Content-Range"))
        found = _FIRST_BYTE.match(given)
        if found is None or int(found[1]) > start:
            raise StoreError(
                f"{self.url}/{name} cannot be read: asked for the bytes from {start:,} on, the server sent {given!r}. "
                "Check the server, and proxies before it"
            )
        if int(found[1]) < start:
            _log.warning(
                "%s/%s is read from byte %s on, and not from byte %s: %s ignores Range headers",
                self.url, name, found[1], start, self.endpoint,
            )  # fmt: skip
        return int(found[1])

    def _read(self, answer: dict[str, Any], name: str) -> Iterator[bytes]:
        try:
            yield from answer["Body"].iter_chunks(_CHUNK_BYTES)
        except Exception as error:  # as above
            failure = store_error(error, self._subject("get_object", name), self.endpoint)
            raise DigestMismatch(str(failure)) if failure.code == DAMAGED_ANSWER else failure from None

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist. Raises as ``content_of`` does."""
        try:
            return self.content_of(self.call("get_object", name), name)
        except StoreError as error:
            if error.code in MISSING:
                return None
            raise

    def content_of(self, answer: dict[str, Any], name: str) -> bytes:
        """Return the content of a small object from the answer to ``get_object``.

        Raises DigestMismatch if the content does not have the checksum that the server returned, and StoreError.
        """
        content = b""
        for chunk in self._read(answer, name):
            content += chunk
            if len(content) > _SMALL_BYTES:
                raise StoreError(
                    f"{self.url}/{name} has more than {_SMALL_BYTES:,} bytes, so no publication has it: check the URL"
                )
        return content

    def names(self, folder: str = "", *, below: bool = True) -> list[str]:
        """Return the names of the objects in ``folder``, relative to it; unless ``below``, not those in its folders.

        Objects that stand for folders, which some programs make, are left out.
        """
        prefix = f"{self._own}{folder}/" if folder else self._own
        return [*self._sizes(prefix, {"Prefix": prefix} | ({} if below else {"Delimiter": "/"}))]

    def sizes(self, beginning: str = "") -> dict[str, int]:
        """Return the sizes of the objects whose names begin so, those in folders included, by name.

        Objects that stand for folders are left out.
        """
        return self._sizes(self._own, {"Prefix": self._own + beginning})

    def _sizes(self, above: str, arguments: dict[str, str]) -> dict[str, int]:
        pages = self._pages("list_objects_v2", "Contents", {"ContinuationToken": "NextContinuationToken"}, arguments)
        found = {str(entry["Key"]): int(entry["Size"]) for entry in pages}
        return {key.removeprefix(above): size for key, size in found.items() if not key.endswith("/")}

    def uploads(self, beginning: str = "") -> list[tuple[str, str]]:
        """Return the names and ids of the unfinished multipart uploads of objects whose names begin so.

        Some servers list only those of one object, so ask for it by its whole name.
        """
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        pages = self._pages("list_multipart_uploads", "Uploads", following, {"Prefix": self._own + beginning})
        return [(str(entry["Key"]).removeprefix(self._own), str(entry["UploadId"])) for entry in pages]

    def parts(self, name: str, upload_id: str) -> dict[int, tuple[str, int]]:
        """Return ETag and size of the parts that the server has of a multipart upload, by number."""
        following = {"PartNumberMarker": "NextPartNumberMarker"}
        arguments = {"Key": self._own + name, "UploadId": upload_id}
        pages = self._pages("list_parts", "Parts", following, arguments)
        return {entry["PartNumber"]: (entry["ETag"], entry["Size"]) for entry in pages}

    def abort(self, name: str, upload_id: str) -> None:
        """Abort a multipart upload; one that the server does not know is ignored. Raises StoreError."""
        try:
            self.call("abort_multipart_upload", name, UploadId=upload_id)
        except StoreError as error:
            if error.code not in (UNKNOWN_UPLOAD, *MISSING):
                raise

    def _pages(
        self, operation: str, entries: str, following: dict[str, str], arguments: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        while True:
            page = self.call(operation, **arguments)
            yield from page.get(entries, [])
            if not page.get("IsTruncated") or not page.keys() >= set(following.values()):
                return  # SeaweedFS does not say where the next page of uploads begins
            markers = {marker: page[found] for marker, found in following.items()}
            if markers.items() <= arguments.items():
                raise StoreError(f"{self._subject(operation, None)}: the server repeats a page of its list. Check it")
            arguments = arguments | markers

    def _subject(self, operation: str, name: str | None) -> str:
        return f"{self.url}{f'/{name}' if name else ''} cannot be {_VERBS.get(operation.partition('_')[0], 'written')}"


class InsistentBucket(BucketFolder):
    """A folder of a bucket whose requests are repeated for minutes, in addition to the client's own repetitions.

    A store that has never answered is not waited for, because its URL may be wrong.
    """

    _has_answered = False

    def call(self, operation: str, name: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request until it is answered. Raises StoreError for other failures, and after ``INSIST_SECONDS``."""
        patience = _Patience(self.stopping)
        while True:
            try:
                answer = super().call(operation, name, **arguments)
            except StoreError as error:
                if not self._has_answered or not patience.waits_after(error, "retrying"):
                    raise
                if not isinstance(body := arguments.get("Body", b""), bytes):
                    body.seek(0)  # botocore does that only between its own tries
            else:
                self._has_answered = True
                return answer


def insistent_chunks(bucket: BucketFolder, name: str, start: int = 0) -> Iterator[bytes]:
    """Yield the content of an object from ``start`` on. A stream that breaks is continued where it broke.

    Raises StoreError for failures that are not transient, and after ``INSIST_SECONDS`` without a byte.
    """
    patience = _Patience(bucket.stopping)
    while True:
        try:
            for chunk in bucket.chunks(name, start):
                start += len(chunk)
                yield chunk
                patience.renew()
        except StoreError as error:
            if start and error.code in BEYOND_END:
                return  # nothing is left, and a digest shows whether that is right
            if not patience.waits_after(error, f"retrying from byte {start:,}"):
                raise
        else:
            return


class _Patience:
    """Waits between tries, ever longer, until they have failed for ``INSIST_SECONDS``."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self.renew()

    def renew(self) -> None:
        """Reset the deadline and the pause between attempts, because a request has succeeded."""
        self._ends, self._pause = time.monotonic() + INSIST_SECONDS, _FIRST_PAUSE_SECONDS

    def waits_after(self, error: StoreError, doing: str) -> bool:
        """Wait, and return whether to try again: not after lasting failures, or if another thread has failed."""
        left = self._ends - time.monotonic()
        if error.code not in TRANSIENT or left <= 0:
            return False
        _log.warning("%s for up to %.0f s: %s", doing, left, error)
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return not self._stopping.wait(min(left, pause * random.uniform(0.5, 1)))


def _require_names_of_folders(prefix: str, url: str) -> None:
    try:
        confined(Path(), prefix, "the URL of S3", PublicationError)
    except PublicationError:
        raise PublicationError(
            f"{url} has a folder without a name, one named . or .., or a character that names cannot have: write "
            "s3://BUCKET/FOLDER"
        ) from None


def _client(url: str, tries: int, wait_seconds: float) -> Any:
    """Return a client with boto3's own settings for everything but retries, time limits and the payload's signature.

    All payloads have a checksum that the server compares, and a signature covers the checksum. Without ``https``, a
    signature of the payload would take another sha256 of each byte.
    """
    try:
        import awscrt.checksums  # noqa: F401 - checked here, because botocore and the upload need it
        from boto3 import __version__
        from boto3.session import Session
        from botocore.config import Config
    except ImportError as error:
        raise PublicationError(
            f"{url} needs a package that is not installed ({error}): pip install 'boto3>=1.40,<2' 'awscrt>=0.38,<1'"
        ) from None
    config = Config(
        retries={"mode": "standard", "total_max_attempts": tries},
        connect_timeout=min(_CONNECT_SECONDS, wait_seconds),
        read_timeout=wait_seconds,
        max_pool_connections=_MOST_CONNECTIONS,
        user_agent=f"t5-pretrain boto3/{__version__}",  # botocore's own takes a tenth of a small request's CPU time
        s3={"payload_signing_enabled": False},
    )
    try:
        return Session().client("s3", config=config)
    except Exception as error:  # boto3's errors share no base
        raise store_error(error, f"{url} cannot be reached") from None

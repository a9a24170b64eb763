"""Requests that insist: they outlast a store that is busy, restarting or unreachable for some minutes."""

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

from t5train.errors import StoreError
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.file_body import FileBody
from t5train.release.object_store.store_errors import BEYOND_END, TRANSIENT

INSIST_SECONDS = 600.0
"""How long one request is tried again after transient failures, and a stream since its last byte."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0
_log = logging.getLogger(__name__)


class InsistentBucket(BucketFolder):
    """A folder of a bucket whose requests are repeated for minutes, in addition to the client's own repetitions.

    A store that has never answered is not waited for, because its URL may be wrong.
    """

    _has_answered = False

    def call(self, operation: str, name: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request until it is answered. Raises StoreError for other failures, and after ``INSIST_SECONDS``."""
        started, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = super().call(operation, name, **arguments)
            except StoreError as error:
                left = started + INSIST_SECONDS - time.monotonic()
                if error.code not in TRANSIENT or not self._has_answered or left <= 0:
                    raise
                _log.warning("retrying for up to %.0f s: %s", left, error)
                if self.stopping.wait(min(left, pause * random.uniform(0.5, 1))):
                    raise
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                if isinstance(body := arguments.get("Body"), FileBody):
                    body.seek(0)  # botocore does that only between its own tries
            else:
                self._has_answered = True
                return answer


def insistent_chunks(bucket: BucketFolder, name: str, start: int = 0) -> Iterator[bytes]:
    """Yield the content of an object from ``start`` on. A stream that breaks is continued where it broke.

    Raises StoreError for failures that are not transient, and after ``INSIST_SECONDS`` without a byte.
    """
    last, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    while True:
        try:
            for chunk in bucket.chunks(name, start):
                start += len(chunk)
                yield chunk
                last, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        except StoreError as error:
            if start and error.code in BEYOND_END:
                return  # nothing is left, and a digest shows whether that is right
            left = last + INSIST_SECONDS - time.monotonic()
            if error.code not in TRANSIENT or left <= 0:
                raise
            _log.warning("retrying from byte %s for up to %.0f s: %s", f"{start:,}", left, error)
            if bucket.stopping.wait(min(left, pause * random.uniform(0.5, 1))):
                raise
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        else:
            return

"""Publishes in child processes that are killed at a chosen moment, as a program: ``EXPORT PART_BYTES``.

For every line ``URL NUMBER before`` or ``URL NUMBER after`` on standard input, a new child publishes there. It is
killed right before it sends the request of that number, or after the answer. With ``URL SECONDS at``, it is killed so
many seconds after its start. The child's exit code is printed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from t5train.records.stage_records import Export
from t5train.release import publication
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish


def killing_calls(left: int, when: str) -> Callable[..., Any]:
    """Return a replacement of ``BucketFolder.call`` that kills this process at the request after ``left`` others."""
    counting, numbers, send = threading.Lock(), count(), BucketFolder.call

    def call(bucket: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        with counting:
            is_last = next(numbers) == left
            if is_last and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            return send(bucket, operation, name, **arguments)
        finally:  # also after a refusal
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

    return call


def main(export: str, part_bytes: str) -> None:
    send = publication.publish_to_bucket

    def in_small_parts(*given: Any) -> Any:
        return send(*given, int(part_bytes))

    patch.object(publication, "publish_to_bucket", in_small_parts).start()
    for line in sys.stdin:
        url, moment, when = line.split()
        if (child := os.fork()) == 0:
            if when != "at":
                patch.object(BucketFolder, "call", killing_calls(int(moment), when)).start()
            publish(Export.load(Path(export)), url)
            os._exit(0)
        if when == "at":
            time.sleep(float(moment))
            os.kill(child, signal.SIGKILL)  # if it has ended, it is a zombie until the next line
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

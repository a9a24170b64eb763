"""Publishes exports to one URL in as many processes at a time, as a program: ``EXPORT ...``.

For every URL on standard input, each export is published there by a child of its own. The children wait for each other
right before they write the manifest. Printed is one word for each: ``new``, ``reused`` or ``lost``.
"""

import multiprocessing
import os
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

from t5train.errors import PublicationError
from t5train.records.stage_records import MANIFEST, Export
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish


def waiting_calls(barrier: Barrier) -> Any:
    """Return a replacement of ``BucketFolder.call`` that waits for the other processes before it writes a manifest."""
    call = BucketFolder.call

    def wait_and_call(bucket: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        if (operation, name) == ("put_object", MANIFEST):
            barrier.wait(60)
        return call(bucket, operation, name, **arguments)

    return wait_and_call


def outcome(export: str, url: str) -> str:
    """Publish, and return what came of it."""
    try:
        return "reused" if publish(Export.load(Path(export)), url).reused else "new"
    except PublicationError as error:
        return "lost" if "holds another publication" in str(error) else str(error).replace(" ", "_")


def main(exports: list[str]) -> None:
    for line in sys.stdin:
        barrier, ends = multiprocessing.get_context("fork").Barrier(len(exports)), []
        for export in exports:
            read, write = os.pipe()
            if os.fork() == 0:
                patch.object(BucketFolder, "call", waiting_calls(barrier)).start()
                os.write(write, outcome(export, line.strip()).encode())
                os._exit(0)
            os.close(write)
            ends.append(read)
        outcomes = [os.read(end, 4096).decode() or "killed" for end in ends]
        for end in ends:
            os.close(end)
            os.wait()
        sys.stdout.write(" ".join(outcomes) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

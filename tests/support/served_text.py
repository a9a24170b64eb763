"""A text on a web server, for a client with small blocks and short waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from t5train.data.download import downloads, remote_reading
from tests.support.web_server import Web, serving

LINES = b"".join(b"line %d of a text that takes many requests\n" % number for number in range(40_000))
BLOCK, DURABLE = 64 << 10, 256 << 10
NUM_BLOCKS = -(-len(LINES) // BLOCK)


@contextmanager
def serving_text() -> Iterator[Web]:
    """Serve LINES as ``/text.txt``, and set the client's sizes and waits."""
    with pytest.MonkeyPatch.context() as patch, serving(Web({"/text.txt": LINES})) as web:
        patch.setattr(downloads, "BLOCK_BYTES", BLOCK)
        patch.setattr(downloads, "DURABLE_BYTES", DURABLE)
        patch.setattr(remote_reading, "FIRST_WAIT_SECONDS", 0.01)
        patch.setattr(remote_reading, "LONGEST_WAIT_SECONDS", 0.02)
        yield web

"""Buffers that are hashed in the background while the next one is filled."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

BUFFER_BYTES = 8 << 20
_NUM_BUFFERS = 4


class Digest(Protocol):
    """A running hash, such as hashlib's."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""
        ...


class HashingBuffers:
    """A few buffers, used in turn; each digest sees its data in order, and two digests run side by side.

    hashlib lets go of the interpreter's lock, so that hashing, reading and writing overlap. A context manager;
    digests are final once it is left.
    """

    def __init__(self, num_digests: int) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="digest") for _ in range(num_digests)]
        self._busy: deque[tuple[memoryview, list[Future[None]]]] = deque()

    def take(self) -> memoryview:
        """A buffer of BUFFER_BYTES that nobody reads any more."""
        if len(self._busy) < _NUM_BUFFERS:
            return memoryview(bytearray(BUFFER_BYTES))
        buffer, hashed = self._busy.popleft()
        for future in hashed:
            future.result()
        return buffer

    def hash(self, buffer: memoryview, data: memoryview, digests: Sequence[Digest]) -> None:
        """Begin to hash ``data``, which lies in ``buffer``, each digest in a thread of its own."""
        futures = [thread.submit(digest.update, data) for thread, digest in zip(self._threads, digests, strict=True)]
        self._busy.append((buffer, futures))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True)
        if error is None:
            for _, hashed in self._busy:
                for future in hashed:
                    future.result()

"""Buffers that several threads look at while the next one is filled."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

BUFFER_BYTES = 1 << 20  # all that is done with a buffer is done while it is in the processor's cache
_NUM_BUFFERS = 16


class SharedBuffers:
    """A few buffers, used in turn. Each of ``num_readers`` threads gets every buffer, in order.

    Hashing, checking and file access let go of the interpreter's lock, so that they overlap. A context manager:
    what a reader raises is raised from ``take`` or when the context is left, after which all readers are done.
    """

    def __init__(self, num_readers: int) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="reader") for _ in range(num_readers)]
        self._shared: deque[tuple[memoryview, list[Future[None]]]] = deque()

    def take(self) -> memoryview:
        """A buffer of BUFFER_BYTES that nobody reads any more."""
        return memoryview(bytearray(BUFFER_BYTES)) if len(self._shared) < _NUM_BUFFERS else self._reclaim()

    def share(self, buffer: memoryview, readers: Sequence[Callable[[], None]]) -> None:
        """Begin one piece of work in each thread; the buffer comes back from ``take`` when all are done."""
        work = [thread.submit(reader) for thread, reader in zip(self._threads, readers, strict=True)]
        self._shared.append((buffer, work))

    def _reclaim(self) -> memoryview:
        buffer, work = self._shared.popleft()
        for reader in work:
            reader.result()
        return buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=error is not None)
        while self._shared and error is None:
            self._reclaim()

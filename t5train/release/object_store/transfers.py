"""Work on several objects at a time, and its progress."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from t5train.progress import Progress

_THREADS = 8  # each holds at most 1 MiB in memory, and mostly waits for the server
_REPORT_SECONDS = 0.5


class Stopped(BaseException):
    """Another thread has failed, or the user has interrupted the command.

    It is no Exception, so that botocore does not take it for a failure of the connection, and try again.
    """


class ByteCount:
    """The number of bytes that all threads have transferred, and where they notice that they should stop."""

    def __init__(
        self, what: str, total: int, progress: Progress, stopping: threading.Event | None = None
    ) -> None:  # fmt: skip
        """``stopping`` is set by ``stop``, for what else should end then."""
        self._what, self._total, self._progress = what, total, progress
        self._counting, self._done = threading.Lock(), 0
        self._stopping = stopping or threading.Event()

    def add(self, size: int) -> None:
        """Add bytes, from any thread. Raises Stopped after ``stop``, so call it for each piece of a large file."""
        with self._counting:
            self._done += size
        if self._stopping.is_set():
            raise Stopped

    def stop(self) -> None:
        """Let threads end soon."""
        self._stopping.set()

    def report(self) -> None:
        """Report the progress."""
        self._progress(self._what, self._done, self._total)


def run_jobs(jobs: Iterable[Callable[[], object]], count: ByteCount) -> None:
    """Run jobs in a few threads. This thread reports the progress.

    Only a few are begun ahead, because they may be many: an interruption waits for none of the others.

    The first error is raised after the running jobs have ended, which they do when they next read or send bytes.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="transfer") as threads:
        running, left = set[Future[object]](), iter(jobs)
        try:
            while running := running | {threads.submit(job) for job in islice(left, 2 * _THREADS - len(running))}:
                finished, running = wait(running, _REPORT_SECONDS, FIRST_COMPLETED)
                for job in finished:
                    job.result()
                count.report()
        except BaseException:
            count.stop()
            threads.shutdown(wait=False, cancel_futures=True)
            raise

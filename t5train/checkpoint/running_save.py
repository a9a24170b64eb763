"""The checkpoint that is written while training goes on. There is at most one at a time.

A thread does what needs no other rank: it writes, syncs and hashes the rank's files, then writes the sidecar. Whatever
needs all ranks happens between two steps: each step's collective carries whether the rank has written its part.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from t5train.checkpoint.saving import note_saved, prune
from t5train.engine.collectives import barrier
from t5train.files.heartbeat import Heartbeat
from t5train.spec.rank_job import TrainJob


class RunningSave:
    """This rank's part of the checkpoint that is being written, if there is one."""

    def __init__(self, job: TrainJob, heart: Heartbeat) -> None:
        self._job, self._heart = job, heart
        self._thread = ThreadPoolExecutor(1, "save")
        self._work: Future[None] | None = None
        self._step: int | None = None

    def begin(self, step: int, write: Callable[[], None]) -> None:
        """Call ``write``, which must use no collective, in the thread. No other save may be running."""
        self._heart.note_writing(step)
        self._step, self._work = step, self._thread.submit(self._write, write)

    def is_written(self) -> bool:
        """Whether this rank has written its part, and that was not yet concluded. Raises the error that ended it."""
        if self._work is None or not self._work.done():
            return False
        self._work.result()
        return self._step is not None

    def conclude(self) -> None:
        """Begin to record the checkpoint as complete, after all ranks have written theirs, and to prune older ones.

        The thread does so, because a step has a shorter deadline than a disk may need.
        """
        step, self._step = self._step, None
        if step is not None:
            self._work = self._thread.submit(self._record, step)

    def finish(self) -> None:
        """Wait until the running save, if there is one, is recorded, and older checkpoints are pruned. A collective.

        Raises the error that ended it.
        """
        if self._work is not None:
            self._work.result()
        if self._step is not None:
            barrier()
            self.conclude()
            self.finish()

    def _record(self, step: int) -> None:
        note_saved(self._job, step)
        prune(self._job, step)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            self._heart.note_writing(None)

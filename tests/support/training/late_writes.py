"""A disk that writes a checkpoint only after training has gone on: files must not have values of later steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from deepspeed import comm

from t5train.checkpoint import host_copies, running_save, tags
from t5train.checkpoint.running_save import RunningSave
from t5train.files.run_folder import tag_of
from t5train.spec.rank_job import TrainJob
from t5train.train import loop

_SECONDS = 300.0


@contextmanager
def late_writes(*, rank_1_waits: bool = False) -> Iterator[list[int]]:
    """Make ranks write a checkpoint after the next step, and before the step after that, with memory for copies.

    If ``rank_1_waits``, rank 1 writes only when it waits for the checkpoint. Yields the steps whose checkpoints were
    written after a later step. Raises AssertionError if a checkpoint is recorded that is not complete.
    """
    may_write, late, begun = threading.Event(), list[int](), list[RunningSave]()
    begin, finish, take_step = RunningSave.begin, RunningSave.finish, loop.Trainer._take_step
    note_saved = running_save.note_saved

    def begin_late(self: RunningSave, step: int, write: Callable[[], None]) -> None:
        def write_late() -> None:
            assert may_write.wait(_SECONDS)
            write()

        may_write.clear()
        begun.append(self)
        begin(self, step, write_late)

    def finish_now(self: RunningSave) -> None:
        may_write.set()
        finish(self)

    def take_step_first(self: loop.Trainer, batches: Any) -> Any:
        taken, save = take_step(self, batches), self._running_save
        if save._step is not None and not may_write.is_set() and not (rank_1_waits and comm.get_rank() == 1):
            late.append(save._step)
            may_write.set()
            assert save._work is not None
            save._work.result(_SECONDS)
        return taken

    def note_complete(job: TrainJob, step: int) -> None:
        assert job.node_local or comm.get_rank() or tags.is_complete(job.checkpoints_folder / tag_of(step))
        note_saved(job, step)

    with (
        mock.patch.object(host_copies, "available_host_memory_bytes", return_value=1 << 50),
        mock.patch.object(RunningSave, "begin", begin_late),
        mock.patch.object(RunningSave, "finish", finish_now),
        mock.patch.object(loop.Trainer, "_take_step", take_step_first),
        mock.patch.object(running_save, "note_saved", note_complete),
    ):
        try:
            yield late
        finally:  # as when the process of a rank ends
            may_write.set()
            for save in begun:
                save._thread.shutdown()

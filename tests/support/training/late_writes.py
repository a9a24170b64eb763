"""A disk that writes a checkpoint only after training has gone on: files must not have values of later steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from t5train.checkpoint.running_save import RunningSave
from t5train.train import loop


@contextmanager
def late_writes() -> Iterator[list[int]]:
    """Make ranks write a checkpoint only when another step was taken, or when they wait for the checkpoint.

    Yields the steps whose checkpoints were written after another step. At the end of the block, what was begun is
    written.
    """
    may_write, late, threads = threading.Event(), list[int](), list[RunningSave]()
    begin, finish, take_step = RunningSave.begin, RunningSave.finish, loop.Trainer._take_step

    def begin_late(self: RunningSave, step: int, write: Callable[[], None]) -> None:
        def write_late() -> None:
            assert may_write.wait(300)
            write()

        may_write.clear()
        threads.append(self)
        begin(self, step, write_late)

    def finish_now(self: RunningSave) -> None:
        may_write.set()
        finish(self)

    def take_step_first(self: loop.Trainer, batches: Any) -> Any:
        taken = take_step(self, batches)
        if threads and threads[-1]._step is not None and not may_write.is_set():
            late.append(threads[-1]._step)
        may_write.set()
        return taken

    with (
        mock.patch.object(RunningSave, "begin", begin_late),
        mock.patch.object(RunningSave, "finish", finish_now),
        mock.patch.object(loop.Trainer, "_take_step", take_step_first),
    ):
        try:
            yield late
        finally:
            may_write.set()
            for each in threads:
                each._thread.shutdown()

"""The program that every rank runs: ``python -m t5train.train --spec spec.json`` under a launcher."""

import argparse
import faulthandler
import gc
import logging
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from t5train.errors import Preempted
from t5train.files.error_report import report, reportable
from t5train.files.heartbeat import Heartbeat
from t5train.files.run_folder import RANK_FILES
from t5train.spec.rank_job import TrainJob

_IMPORTED = ("deepspeed", "t5train.train.loop", "torch._dynamo")
"""What every rank imports: DeepSpeed's optimizers need torch's compiler, whether the model is compiled or not."""
_IMPORTED_FOR_ZERO = ("deepspeed.runtime.zero.muon.muon_optimizer",)
"""What DeepSpeed's ZeRO imports to check any optimizer: it compiles a function, for which it imports Inductor."""
_LOOK_SECONDS = 0.02
_log = logging.getLogger(__name__)


class StopRequest:
    """A context manager for the main thread: records SIGTERM, which asks to end after the current step is saved."""

    def __init__(self) -> None:
        self._was_received = False

    def __call__(self) -> bool:
        """Whether SIGTERM was received."""
        return self._was_received

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._was_received = True


def main() -> int:
    """Run the training job. Returns exit code 0 only if the last checkpoint and the witness are on disk."""
    parser = argparse.ArgumentParser(prog="python -m t5train.train", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of one training attempt")
    parser.add_argument(
        "--await-spec", type=float, metavar="SECONDS", help="import within SECONDS, and wait until that file is there"
    )
    given = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # torch warns about renamed collectives, once per rank and call; only DeepSpeed could use the new names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    faulthandler.register(signal.SIGUSR1)  # the guard sends it to a rank that hangs, to get its traceback into the log
    try:
        with StopRequest() as stop_request:
            if given.await_spec is not None:
                _await(given.spec, given.await_spec, stop_request)
            job = TrainJob.read(given.spec)
            with Heartbeat.of_rank(dict(job.spec.cluster.deadlines)) as heart:
                _import(_IMPORTED)
                if job.spec.layout.zero_stage:
                    with suppress(Exception):  # raised again where DeepSpeed uses it, if this version of it does
                        _import(_IMPORTED_FOR_ZERO)
                _train(job, heart, stop_request)
    except BaseException as error:
        if (reported := reportable(error)) is not None:
            # Log it first, because a report cannot be written to a failed disk.
            _log.error("%s: %s", type(reported).__name__, reported)
        if rank_files := os.environ.get(RANK_FILES):
            report(Path(rank_files), error)
        if not isinstance(error, Exception):
            raise
        if reported is None:
            traceback.print_exc()
        return 1
    return 0


def _import(names: Iterable[str]) -> None:
    """Import modules without collecting garbage: there is next to none, and looking for it takes a fifth of the time.

    What they hold is never garbage later, either.
    """
    gc.disable()
    try:
        for name in names:
            import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _await(spec: Path, import_seconds: float, is_stop_requested: Callable[[], bool]) -> None:
    """Import what takes seconds while the head still verifies the checkpoint, and wait until it has written the job.

    The head may take as long as it needs. The guard ends this rank if the head fails or ``import_seconds`` are over.
    Raises Preempted if this rank is asked to stop before.
    """
    with Heartbeat.of_rank({"start_seconds": import_seconds}):
        _import(_IMPORTED)
    with Heartbeat.of_rank({"start_seconds": math.inf}):
        while not spec.exists():
            if is_stop_requested():
                raise Preempted(
                    "the ranks were asked to stop (SIGTERM) before they had begun, and the rank saved no checkpoint. "
                    "The same command continues from the last one, or begins at step 0 without one"
                )
            time.sleep(_LOOK_SECONDS)


def _train(job: TrainJob, heart: Heartbeat, stop_request: StopRequest) -> None:
    import deepspeed
    from deepspeed import comm

    from t5train.train.accelerator_lock import lock_accelerator
    from t5train.train.loop import Trainer
    from t5train.train.loopback_store import listen_on_loopback

    lock_accelerator()
    store = listen_on_loopback()
    deepspeed.init_distributed()
    Trainer(job, heart, stop_request).run()
    comm.barrier()
    # Skipped after an error, because ranks would wait for each other. The end of the process frees everything.
    comm.destroy_process_group()
    del store  # the other ranks used it until here


if __name__ == "__main__":
    if (code := main()) != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: Python would first wait until a thread has written its part of a checkpoint

"""Records PyTorch's profiler traces of the steps in ``profile.steps``, on rank 0."""

import gzip
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from t5train.errors import Preempted, StorageError
from t5train.files.atomic import replacing
from t5train.spec.monitor_spec import ProfileSpec, Steps

_log = logging.getLogger(__name__)


def recorded_activities() -> list[Any] | None:
    """Return what torch's profiler is to record: all that it can, and only the CPU where there is no accelerator."""
    from deepspeed.accelerator import get_accelerator
    from torch.profiler import ProfilerActivity

    return None if get_accelerator().device_name() != "cpu" else [ProfilerActivity.CPU]  # None: all there are


def trace_name(steps: Steps) -> str:
    """Return the file name of the trace of these steps."""
    return f"steps-{steps.first:08d}-{steps.last:08d}.trace.json.gz"


class StepProfile:
    """The trace of a range of steps; a context manager. What cannot be recorded is logged, and training continues.

    An attempt that resumes within the range records the steps that are left. An attempt that is asked to stop writes
    what it has recorded.
    """

    def __init__(self, steps: Steps, folder: Path | None) -> None:
        """``folder`` is that of the trace; None on ranks that record nothing."""
        self._steps, self._folder = steps, folder
        self._profiler: Any = None
        self._annotation: Any = None
        self._recorded_to = 0

    @classmethod
    def of(cls, spec: ProfileSpec, folder: Path | None, resume_step: int) -> Self | None:
        """Return the profile of the steps that an attempt takes after ``resume_step``; None if it takes none."""
        if (steps := spec.range) is None:
            return None
        if steps.last <= resume_step:
            if folder is not None:
                _log.info("training resumes after step %d, so steps %s are not profiled again", resume_step, steps)
            return None
        return cls(steps._replace(first=max(steps.first, resume_step + 1)), folder)

    def begin(self, step: int) -> None:
        """Record the step that begins now, if it is in the range."""
        if self._folder is None or not self._steps.first <= step <= self._steps.last:
            return
        from torch.profiler import record_function

        if self._profiler is None and not self._started():
            return
        self._annotation = record_function(f"step {step}")
        self._annotation.__enter__()

    def _started(self) -> bool:
        """Start to record. Returns whether that was possible."""
        from torch.profiler import profile

        profiler: Any = profile(activities=recorded_activities())
        try:
            profiler.__enter__()
        except RuntimeError as error:
            _log.warning("steps %s are not profiled, training continues: %s", self._steps, error)
            self._folder = None
            return False
        self._profiler = profiler
        return True

    def end(self, step: int) -> bool:
        """Note that the step has ended. Returns whether it was the last of the range, so that ``write`` is due."""
        if self._profiler is not None:
            self._annotation.__exit__(None, None, None)
            self._recorded_to = step
        return step == self._steps.last

    def write(self) -> None:
        """Write the trace of the recorded steps, if there are any."""
        if self._profiler is None or self._folder is None:
            return
        profiler, self._profiler = self._profiler, None
        recorded = self._steps._replace(last=self._recorded_to)
        path = self._folder / trace_name(recorded)
        plain = path.with_name(f".{path.stem}")  # compressed here, as torch would need space for it in /tmp
        try:
            profiler.__exit__(None, None, None)
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(plain))
            _require_whole(plain)
            with open(plain, "rb") as found, replacing(path) as file, gzip.GzipFile(fileobj=file, mode="wb") as packed:
                shutil.copyfileobj(found, packed)
        except (OSError, RuntimeError, StorageError) as error:
            _log.warning("the trace of steps %s is not written, training continues: %s", recorded, error)
        else:
            _log.info("the profiler trace of steps %s is %s", recorded, path)
        finally:
            with suppress(OSError):
                plain.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Preempted):
            self.write()
        elif self._profiler is not None:
            with suppress(RuntimeError):  # the error that ends training matters
                self._profiler.__exit__(None, None, None)


def _require_whole(trace: Path) -> None:
    """Raise StorageError for a trace that is cut off: torch does not say so if the disk is full."""
    with open(trace, "rb") as file:
        file.seek(-min(16, trace.stat().st_size), os.SEEK_END)
        if not file.read().rstrip().endswith(b"}"):
            raise StorageError(f"{trace.parent} has too little space for it. Free some disk space")

"""One trial: an operation in its own forked process, on a fresh copy of its files."""

import gc
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from t5train.errors import T5TrainError
from t5train.files.os_errors import explain
from tests.acceptance.io_faults import interposer
from tests.acceptance.io_faults.interposer import Call, Fault, Region

SECONDS = 60.0
"""A trial that takes longer counts as hung."""


@dataclass(frozen=True)
class Ending:
    """How an operation ended: it returned a value, failed (or its process died), or hung."""

    value: Any = None
    error: str | None = None
    text: str = ""
    is_deliberate: bool = False
    """Whether the error is one of this project's, or an OSError."""
    hung: bool = False

    @property
    def succeeded(self) -> bool:
        return self.error is None and not self.hung


class Operation(Protocol):
    """Something that the project does with files, and a check that no fault made it do the wrong thing."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make the files that it works on, in an empty folder, which is then moved and copied."""

    def set_up(self, folder: Path) -> Callable[[], Any]:
        """Do the setup that is not under test, once for all trials in that folder; return the operation itself.

        It must start no threads, because processes are forked afterwards.
        """

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:
        """What is wrong after calls on the paths ``failed`` failed; each text begins with "lost: " or "wrong: "."""


class Trials:
    """Trials of one operation in one folder, one after the other."""

    def __init__(self, operation: Operation, template: Path, folder: Path) -> None:
        self.operation, self._template, self._folder = operation, template, folder
        self._trial = folder / "trial"
        self._region = Region(folder / "region", self._trial)
        self._operate: Callable[[], Any] | None = None

    def calls(self) -> list[Call]:
        """The calls that it makes when none fails. Raises AssertionError if it then fails or goes wrong."""
        self._region.record()
        with self._fresh_copy():
            ending = self._run_operation()
            problems = self.operation.problems(self._trial, ending, self._region.failed_paths)
        assert ending.succeeded, f"{self.operation.name} fails without a fault: {ending.text}"
        assert not problems, f"{self.operation.name} goes wrong without a fault: {problems}"
        return self._region.calls()

    def outcome(self, fault: Fault) -> dict[str, Any]:
        """Run a trial with a fault; return its outcome, in the form of a journal line."""
        began = time.monotonic()
        self._region.inject(fault)
        with self._fresh_copy():
            ending = self._run_operation()
            problems = self.operation.problems(self._trial, ending, self._region.failed_paths)
        named = names_a_path(ending.text, self._region.failed_paths, self._trial.resolve())
        return {
            "fired": self._region.fired,
            "result": _result(ending, named),
            "problems": problems,
            "error": ending.error,
            "text": ending.text[-2000:],
            "seconds": round(time.monotonic() - began, 3),
        }

    @contextmanager
    def _fresh_copy(self) -> Iterator[None]:
        shutil.rmtree(self._trial, ignore_errors=True)
        shutil.copytree(self._template, self._trial, symlinks=True)
        yield
        shutil.rmtree(self._trial)

    def _run_operation(self) -> Ending:
        if self._operate is None:
            self._operate = self.operation.set_up(self._trial)
            gc.freeze()  # otherwise, a collection in a fork would write to most memory pages, and so copy them
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _run_trial(self._operate, self._region.path, write)
        os.close(write)
        content = _read_until(read, time.monotonic() + SECONDS)
        if content is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ending(hung=True, text=f"still running after {SECONDS:g} s")
        _, status = os.waitpid(child, 0)
        if not content:
            return Ending(error="died", text=f"its process exited with {os.waitstatus_to_exitcode(status)}")
        return Ending(**json.loads(content))


class ReportedFailure(T5TrainError):
    """The operation was not done; a line on standard error or in the log says why."""


@contextmanager
def warnings_as_errors(logger: str) -> Iterator[None]:
    """Raise ReportedFailure for warnings of a module that continues after a failure, as training does after pruning."""
    messages = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    logging.getLogger(logger).addHandler(handler)
    yield
    if messages:
        raise ReportedFailure("\n".join(messages))


def run_in_child(work: Callable[[], None]) -> None:
    """Do work in a forked process, so that this one stays as it is. Raises AssertionError if it fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{work} failed"


def names_a_path(text: str, failed: list[str], trial: Path) -> bool:
    """Whether a message names one of these paths, the final name of a temporary file, or the file's own folder.

    The folder of the whole trial does not count.
    """
    wanted = set[str]()
    for path in map(Path, failed):
        wanted |= {str(path), str(path.with_name(_final_name(path.name)))}
        if path.parent != trial and trial in path.parents:
            wanted.add(str(path.parent))
    return any(each in text for each in wanted)


def _final_name(name: str) -> str:
    """Return ``name`` for ``.name.1a2b3c4d.tmp``, ``.name.part``, ``.name.partial`` and ``.name.discarded``."""
    if not name.startswith("."):
        return name
    for suffix in (".part", ".partial", ".discarded"):
        name = name.removesuffix(suffix)
    return name[1:].removesuffix(".tmp").rpartition(".")[0] if name.endswith(".tmp") else name[1:]


def _result(ending: Ending, named: bool) -> str:
    if ending.hung:
        return "hang"
    if ending.succeeded:
        return "success"
    return "named" if named and ending.is_deliberate else "unnamed"


def _run_trial(work: Callable[[], Any], region: Path, descriptor: int) -> None:
    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    interposer.attach(region)
    try:
        ending = Ending(value=work())
    except BaseException as error:
        interposer.detach()
        deliberate = isinstance(error, T5TrainError | OSError)
        if isinstance(error, OSError) and not isinstance(error, T5TrainError):
            text = explain(error)  # as commands, tasks and ranks do at their top level
        else:
            text = str(error) if deliberate else "".join(traceback.format_exception(error))
        ending = Ending(error=type(error).__name__, text=text, is_deliberate=deliberate)
    interposer.detach()
    content = json.dumps(ending.__dict__).encode()
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os._exit(0)


def _read_until(descriptor: int, deadline: float) -> bytes | None:
    """All that is written to a pipe until it is closed; None if that takes too long."""
    import select

    content = b""
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while (seconds_left := deadline - time.monotonic()) > 0:
            if select.select([file], [], [], seconds_left)[0]:
                more = file.read(1 << 16)
                if not more:
                    return content
                content += more
    return None

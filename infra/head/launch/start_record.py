"""The record of a run's last start: which process held the run, and how that ended. ``status`` reads it.

``{run}/last-start.json`` is written when the run is held, when a stage begins, and before the run is released. A record
without an end, of a process that no longer holds the run, is that of a process that was killed. The record is only
information: a file that cannot be written never makes a run fail. It is overwritten in place, in bytes that were
reserved at the start, so that the end is recorded on a full disk, too.
"""

import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from infra.node.attempts.attempt import now
from infra.node.attempts.rank_environment import redact
from infra.node.processes import boot_id
from t5train.errors import Preempted, RecordError, RunChanged
from t5train.files.presence import ABSENT, reading
from t5train.files.run_folder import LAST_START
from t5train.report.failure_report import Failure

PROGRAM = "t5-pretrain"
_RESERVED_BYTES = 32 << 10
_MOST_CHARACTERS = 2000
"""Of an error or a command: at most 6 bytes each in JSON, so that both fit into the reserved bytes."""
_READ_AGAIN_SECONDS = 0.02
_CANCELLED = "the run was cancelled"
_log = logging.getLogger(__name__)


class Ending(StrEnum):
    """How a start of a run ended."""

    FINISHED = "finished"
    """It did all that its command was to do."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By Ctrl-C or SIGTERM."""
    CANCELLED = "cancelled"
    """In Prefect."""


@dataclass(frozen=True)
class Start:
    """A start of a run: the process that held the run, and how that ended."""

    command: str
    working_folder: str
    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    started_at: str = field(default_factory=now)
    stage: str | None = None
    """Title of the last stage that began; None if the command is not made of stages, or none has begun."""
    ended_at: str | None = None
    """None if it has not ended, or if the process was killed."""
    how: Ending | None = None
    error: str | None = None
    schema_version: Literal[1] = 1

    @property
    def is_own_program(self) -> bool:
        """Whether ``command`` is one of t5-pretrain, which can be typed again."""
        return self.command.partition(" ")[0] == PROGRAM


@contextmanager
def recording_start(run_folder: Path) -> Iterator[None]:
    """Record that this process holds a run within the block, and how the block ends.

    If it ends with RunChanged, the run itself was not started: the record of the start before is restored.
    """
    before = _content(run_folder)
    _try_to_write(run_folder, _this_start())
    try:
        yield
    except RunChanged:
        _try_to_restore(run_folder, before)
        raise
    except BaseException as error:
        _try_to_end(run_folder, _ending(error), _text(error))
        raise
    _try_to_end(run_folder, Ending.FINISHED, None)


def note_stage(run_folder: Path, title: str) -> None:
    """Record that a stage of the run has begun in this process. Does nothing if this process does not hold the run."""
    if (this := _own(run_folder)) is not None:
        _try_to_write(run_folder, replace(this, stage=title))


def note_cancelled(error: BaseException) -> None:
    """Add to the exception that ends a run that somebody cancelled the run."""
    error.add_note(_CANCELLED)


def is_cancelled(error: BaseException) -> bool:
    """Return whether ``note_cancelled`` was called for the exception."""
    return _CANCELLED in getattr(error, "__notes__", ())


def read_start(run_folder: Path) -> Start | None:
    """The last start of a run; None if it was started by a version that does not record this, or never.

    Raises Unreadable, and RecordError if the file is damaged.
    """
    try:
        return _read(run_folder)
    except ValueError:
        time.sleep(_READ_AGAIN_SECONDS)  # it may just be overwritten
    try:
        return _read(run_folder)
    except ValueError as error:
        path = run_folder / LAST_START
        raise RecordError(f"{path} is damaged ({error}). The next start of the run writes it again") from error


def _read(run_folder: Path) -> Start | None:
    path = run_folder / LAST_START
    try:
        with reading(path):
            found = json.loads(path.read_bytes())
    except ABSENT:
        return None
    try:
        known = {one.name: found[one.name] for one in fields(Start) if one.name in found}
        return Start(**{**known, "how": known.get("how") and Ending(known["how"])})
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _this_start() -> Start:
    name, *arguments = sys.argv or [""]
    is_own = Path(name).name == PROGRAM or Path(name).parts[-2:] == ("cli", "__main__.py")
    program = PROGRAM if is_own else name
    command = redact(shlex.join([program, *arguments]))
    if len(command) > _MOST_CHARACTERS:
        command = f"a command of {len(command):,} characters"
    return Start(command, _working_folder())


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def _ending(error: BaseException) -> Ending:
    if is_cancelled(error):
        return Ending.CANCELLED
    is_signal = not isinstance(error, Exception | SystemExit)  # also one raised while another is handled, as Prefect's
    if isinstance(error, Preempted) or is_signal:
        return Ending.INTERRUPTED
    return Ending.FAILED


def _text(error: BaseException) -> str | None:
    """The whole message, as the person who started the run saw it; None for Ctrl-C and SIGTERM, which have none."""
    if not isinstance(error, Exception):
        return None
    failure = Failure.of(error)
    said = redact(str(error) if failure.is_expected and str(error) else failure.cause)
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]} ..."


def _own(run_folder: Path) -> Start | None:
    try:
        found = _read(run_folder)
    except Exception:  # the record must never make a run fail
        return None
    this = None if found is None else (found.host, found.boot_id, found.pid, found.ended_at)
    return found if this == (socket.gethostname(), boot_id(), os.getpid(), None) else None


def _try_to_end(run_folder: Path, how: Ending, error: str | None) -> None:
    if (this := _own(run_folder)) is not None:
        _try_to_write(run_folder, replace(this, ended_at=now(), how=how, error=error))


def _try_to_restore(run_folder: Path, before: bytes | None) -> None:
    if before is not None:
        _try_to_write_bytes(run_folder, before)
        return
    try:
        (run_folder / LAST_START).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", run_folder / LAST_START, error)


def _content(run_folder: Path) -> bytes | None:
    try:
        return (run_folder / LAST_START).read_bytes()
    except OSError:
        return None


def _try_to_write(run_folder: Path, start: Start) -> None:
    text = json.dumps(asdict(start), indent=1, ensure_ascii=False)
    _try_to_write_bytes(run_folder, text.encode("utf-8", "replace"))  # arguments may be no valid Unicode


def _try_to_write_bytes(run_folder: Path, content: bytes) -> None:
    path = run_folder / LAST_START
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, content.ljust(_RESERVED_BYTES), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("%s cannot be written, so `status` does not show this start: %s", path, error)

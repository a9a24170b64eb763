"""Programs that take the place of ranks under a guard, and what the guard records of them."""

import sys

from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause
from infra.node.attempts.process_guard import MODULE
from t5train.files import heartbeat

HANG_SECONDS = 120.0
"""Only a guard that hangs takes as long to end, however busy the machine is."""

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
# Ignores SIGTERM, and so does its child.
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
    "print('ready', flush=True); time.sleep(600)"
)
SAVING_SLOWLY = """
import os, signal, time
from pathlib import Path
from t5train.files.heartbeat import Heartbeat
may_end = Path(os.environ["T5_RANK_FILES"]).parent / "may-end"
def save(*_):
    heart.enter("save", 7)
    while not may_end.exists():
        time.sleep(0.02)
    print("saved", flush=True)
    heart.enter("step", 8)
signal.signal(signal.SIGTERM, save)
deadlines = {f"{phase}_seconds": 600 for phase in ("start", "compile", "step", "save")}
with Heartbeat.of_rank(deadlines) as heart:
    print("ready", flush=True)
    while True:
        time.sleep(600)
"""
"""Writes heartbeats as ranks do. On SIGTERM it saves until ``end_saves``, and then goes on as if not told."""


def saves(this: Attempt, *ranks: str) -> bool:
    """Whether these ranks are saving a checkpoint."""
    beats = [heartbeat.read(heartbeat.beat_file(this.rank_files(rank))) for rank in ranks]
    return all(beat is not None and beat.phase == "save" for beat in beats)


def end_saves(this: Attempt) -> None:
    """Let all saves of an attempt's ranks end."""
    (this.folder / "may-end").touch()


def guard_arguments(this: Attempt, program: str, *options: str) -> list[str]:
    """The arguments of a Python that guards a Python program."""
    return ["-m", MODULE, *options, str(this.folder), sys.executable, "-c", program]


def recorded_exit(this: Attempt, name: str = "rank-00000") -> tuple[Cause, str, int | None]:
    record = this.exit_record(name)
    assert record is not None
    return record.cause, record.reason, record.returncode

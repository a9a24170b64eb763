"""Programs that take the place of ranks under a guard, and what the guard records of them."""

import sys

from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause
from infra.node.attempts.process_guard import MODULE

HANG_SECONDS = 120.0
"""Only a guard that hangs takes as long to end, however busy the machine is."""

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
# Ignores SIGTERM, and so does its child.
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
    "print('ready', flush=True); time.sleep(600)"
)
SAVING_SLOWLY = """
import signal, time
from types import SimpleNamespace
from t5train.rank.heartbeat import Heartbeat
def save(*_):
    heart.enter("save", 7)
    time.sleep(5)
    print("saved", flush=True)
    heart.enter("step", 8)
signal.signal(signal.SIGTERM, save)
deadlines = SimpleNamespace(start_seconds=60, compile_seconds=60, step_seconds=60, save_seconds=60)
with Heartbeat.of_rank(deadlines) as heart:
    print("ready", flush=True)
    while True:
        time.sleep(600)
"""
"""Writes heartbeats as ranks do. On SIGTERM it saves for five seconds, and then goes on as if it had not been told."""


def guard_arguments(this: Attempt, program: str, *options: str) -> list[str]:
    """The arguments of a Python that guards a Python program."""
    return ["-m", MODULE, *options, str(this.folder), sys.executable, "-c", program]


def recorded_exit(this: Attempt) -> tuple[Cause, str, int | None]:
    record = this.exit_record("rank-00000")
    assert record is not None
    return record.cause, record.reason, record.returncode

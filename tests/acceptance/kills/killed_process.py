"""Run work in processes that are killed, forked from one that has already imported what takes long."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_IMPORTED = [
    *("deepspeed", "deepspeed.runtime.zero.muon.original_muon", "torch._dynamo", "torch._inductor.compile_fx"),
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "fsspec.implementations.local"),
    *(
        "t5train.train.loop",
        "t5train.checkpoint.consolidate",
        "t5train.release.publication",
        "infra.head.storage.run_storage",
    ),
]
_LONGEST_WAIT_SECONDS = 30.0
Work = Callable[..., None]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(_IMPORTED)


def measure_seconds(work: Work, *arguments: Any) -> float:
    """How many seconds the work takes in its own process. Raises AssertionError if it fails."""
    process, receiver = _start(work, *arguments)
    began, ended = receiver.recv(), receiver.recv()
    process.join()
    assert process.exitcode == 0, f"{work.__name__} exited with {process.exitcode}"
    return float(ended - began)


def was_killed(work: Work, *arguments: Any, moment: float) -> bool:
    """Run work in its own process, and kill it after ``moment`` seconds; False if it had already ended."""
    process, receiver = _start(work, *arguments)
    receiver.recv()
    time.sleep(moment)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def await_end_of_processes(folder: Path) -> None:
    """Wait until no process has the folder in its command line: a killed process may have started others."""
    deadline, own_pid, wanted = time.monotonic() + _LONGEST_WAIT_SECONDS, str(os.getpid()), os.fsencode(folder)
    while any(wanted in _command_line(each) for each in Path("/proc").glob("[0-9]*") if each.name != own_pid):
        assert time.monotonic() < deadline, f"processes that use {folder} are still running"
        time.sleep(0.02)


def _start(work: Work, *arguments: Any) -> tuple[Any, Connection]:
    receiver, sender = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _run(connection: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    logging.disable(logging.WARNING)
    connection.send(time.monotonic())
    work(*arguments)
    connection.send(time.monotonic())


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""

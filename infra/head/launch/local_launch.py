"""Starts the ranks of a run under DeepSpeed's launcher, watches them, and leaves none behind.

::

    head (this process) ── guard ── deepspeed.launcher.runner ── deepspeed.launcher.launch ──┬─ guard ── rank 0
                                                                                             └─ guard ── rank 1

The head ends everything when a rank or the launcher fails; the guards do when the head is gone. SIGTERM, to the head or
to the launcher's guard, ends it too, but gives the ranks time to save. Whether the ranks did their work is told by
their exit records alone: DeepSpeed's launcher exits 0 when it was killed.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.head.launch.failures import failure_of
from infra.head.stop_signal import is_stop, stoppable, undisturbed
from infra.node import ports, processes
from infra.node.attempts import attempt, attempt_actions
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.process_guard import LAUNCHER_OPTION
from infra.node.attempts.rank_environment import rank_environment
from infra.node.compiled_operators import clear_stale_locks, missing
from infra.node.processes import ProcessIdentity

_TICK_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_LAUNCHER_END_SECONDS = 5.0
_GUARDS_SECONDS = 3.0
_ADDRESS = "127.0.0.1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchSpec:
    """What to start, and how often."""

    program: Callable[[Path], tuple[str, ...]]
    """Given the folder of the attempt: arguments of the Python interpreter in every rank, such as ``("-m",
    "t5train.train", "--spec", "{folder}/spec.json")``. Called once, just before the start."""
    run_folder: Path
    num_ranks: int
    accelerator: str | None = None
    """DeepSpeed's name for it; found by DeepSpeed when None."""
    master_port: int | None = None
    """Where the ranks meet; a free port when None."""
    grace_seconds: float = 30.0
    """How long the ranks may take to save when they are told to end."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks, beyond what infra.node.attempts.rank_environment lets through."""
    operators: tuple[str, ...] = ()
    """DeepSpeed's compiled operators that ranks load."""


def launch(spec: LaunchSpec, on_tick: Callable[[], None] = lambda: None) -> Attempt:
    """Run every rank to its end; ``on_tick`` is called about twice a second meanwhile.

    Hold ``run_lock`` around it. Raises SpecError if the port is taken, the error that a rank reported, or
    LaunchError with the first rank that failed. However it is left, no process of the attempt is left.
    """
    port = _port(spec)
    attempt_actions.remove_all(_ADDRESS, port)  # nothing listens there, so what lies there is a dead run's
    if spec.accelerator == "cpu":
        attempt_actions.require_room(spec.num_ranks)
    spec = replace(spec, master_port=port)
    this = attempt.begin(spec.run_folder, ProcessIdentity.of(os.getpid()), grace_seconds=spec.grace_seconds)
    environment = rank_environment(this, num_ranks=spec.num_ranks, accelerator=spec.accelerator, extra=spec.environment)
    clear_stale_locks(environment)
    if to_compile := missing(spec.operators, environment):
        _log.warning("%s compiles %s, which takes about a minute each", this.host, ", ".join(to_compile))
    with stoppable():
        launcher = _start(this, command(spec, this.folder), environment)
        succeeded = _supervise(this, spec, launcher, on_tick)
    if not succeeded:
        raise failure_of(this, spec.num_ranks)
    return this


def command(spec: LaunchSpec, attempt_folder: Path) -> list[str]:
    """The command line of DeepSpeed's launcher for an attempt."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", os.devnull),  # not a regular file, so none: left out, /job/hostfile would be taken if there
        *("--num_gpus", str(spec.num_ranks)),
        *("--master_addr", _ADDRESS, "--master_port", str(spec.master_port or "FREE_PORT")),
        *("--no_local_rank", "--module", "infra.node.attempts.process_guard", str(attempt_folder)),
        *(sys.executable, *spec.program(attempt_folder)),
    ]


def _port(spec: LaunchSpec) -> int:
    if spec.master_port is None:
        return ports.free_port()
    ports.require_free(spec.master_port)
    return spec.master_port


def _start(this: Attempt, argv: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher's guard; nothing of it is inherited from, or signalled with, this process."""
    _log.info("attempt %s: %s", this.folder.name, " ".join(argv))
    with open(this.log(attempt.LAUNCHER), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "infra.node.attempts.process_guard", LAUNCHER_OPTION, str(this.folder), *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _supervise(this: Attempt, spec: LaunchSpec, launcher: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> bool:
    """Watch the ranks to their end, see to it, and leave nothing of them; whether all succeeded."""
    try:
        return _watch(this, spec.num_ranks, launcher, on_tick)
    except BaseException as error:
        if is_stop(error) and not _stop(this, spec.num_ranks, launcher):
            _end(this, launcher, spec.master_port)
            _log.warning("%s", failure_of(this, spec.num_ranks))
        raise
    finally:
        _end(this, launcher, spec.master_port)


def _watch(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> bool:
    """Wait until every rank has ended, or one has failed, or the launcher is gone; whether all succeeded."""
    while (succeeded := _outcome(this, num_ranks, launcher)) is None:
        if this.is_stop_ordered:
            return _stop(this, num_ranks, launcher)
        on_tick()
        time.sleep(_TICK_SECONDS)
    if succeeded:
        _await(launcher)
    return succeeded


def _outcome(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes]) -> bool | None:
    """Whether all ranks succeeded; None while that is open, which it is no more when one has failed."""
    launcher_gone = launcher.poll() is not None  # asked before the records, which it outlives
    read = [this.exit_record(attempt.rank_name(rank)) for rank in range(num_ranks)]
    records = [record for record in read if record is not None]
    if len(records) == num_ranks:
        return all(record.succeeded for record in records)
    # A rank that ended as it was told to leaves others the time to.
    return False if launcher_gone or any(record.is_failure for record in records) else None


def _stop(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes]) -> bool:
    """Tell all ranks to save and end, and give them the time for it; whether all had done their work already."""
    _log.warning("SIGTERM: ranks have %.0f s to save and end", this.grace_seconds)
    # Guards see to that time; they are given some more to say so.
    told, deadline = set[ProcessIdentity](), time.monotonic() + this.grace_seconds + _GUARDS_SECONDS
    while (succeeded := _outcome(this, num_ranks, launcher)) is None and time.monotonic() < deadline:
        for guard in set(this.guards()) - told:  # some may just be starting
            guard.send(signal.SIGTERM)
            told.add(guard)
        time.sleep(_LOOK_SECONDS)
    return bool(succeeded)


def _await(launcher: subprocess.Popen[bytes]) -> None:
    """Let the launcher notice by itself, which looks once a second, so that its log ends in peace."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_LAUNCHER_END_SECONDS)


def _end(this: Attempt, launcher: subprocess.Popen[bytes], port: int | None) -> None:
    """End what is left: guards first, who end their programs and write down how, then all that is left at once."""
    with undisturbed("ending the ranks, which takes some seconds"):
        _end_here(this, launcher, port)


def _end_here(this: Attempt, launcher: subprocess.Popen[bytes], port: int | None) -> None:
    deadline = time.monotonic() + _GUARDS_SECONDS
    for guard in this.guards():
        guard.send(signal.SIGINT)
    launcher.send_signal(signal.SIGINT)
    while (this.guards() or launcher.poll() is None) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    if left := processes.end(processes.in_run(this.run_id), grace_seconds=0):
        _log.error("processes %s of %s do not end, not even by SIGKILL", sorted(left), this.folder)
    else:
        launcher.wait()
        attempt_actions.remove_all(_ADDRESS, port or 0)  # of ranks whose guard was killed too

"""Starts the ranks of a run on this machine, watches them, and leaves no process behind.

::

    head (this process) ── guard ── launcher ──┬─ guard ── rank 0
                                               └─ guard ── rank 1

The launcher does what DeepSpeed's does on a host, without seconds of imports (infra.node.attempts.local_launcher).
The head ends everything when a rank or the launcher fails. The guards do so when the head is gone. Ctrl-C, or SIGTERM
to the head or to the launcher's guard, also ends everything, but gives the ranks time to save. Only exit records show
whether the ranks did their work.
"""

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from infra.head.launch.rank_evidence import evidence_of
from infra.head.launch.verdict import verdict
from infra.head.stop_signal import is_stop, stoppable, stopping_line, undisturbed
from infra.node import ports, processes
from infra.node.attempts import attempt, local_launcher, shared_memory
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.local_launcher import ADDRESS
from infra.node.attempts.process_guard import LAUNCHER_OPTION, MODULE
from infra.node.attempts.rank_environment import rank_environment
from infra.node.compiled_operators import clear_stale_locks, missing, unwritable, unwritable_text
from infra.node.processes import ProcessIdentity
from t5train.errors import StorageError

_TICK_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_LAUNCHER_END_SECONDS = 5.0
_GUARDS_SECONDS = 3.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchSpec:
    """What to start, and how many ranks."""

    program: Callable[[Path], tuple[str, ...]]
    """Called with the attempt's folder; returns the arguments of the Python interpreter for every rank, such as
    ``("-m", "t5train.train", "--spec", "{folder}/spec.json", "--await-spec", "600")``. Called once, just before the
    start."""
    run_folder: Path
    num_ranks: int
    accelerator: str | None = None
    """DeepSpeed's name of the accelerator; if None, DeepSpeed detects it."""
    master_port: int | None = None
    """Port of the rendezvous; if None, a free port is used."""
    grace_seconds: float = 30.0
    save_seconds: float = 1800.0
    """How long ranks may take to save when they are ordered to end."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the ranks, in addition to those that infra.node.attempts.rank_environment passes on. May be secret,
    so they are not shown."""
    operators: tuple[str, ...] = ()
    """DeepSpeed's compiled operators that ranks load."""
    prepare: Callable[[Path, Callable[[], None]], object] = lambda _folder, _look: None
    """Called with the attempt's folder once the launcher is started: ranks import meanwhile, and wait for what it
    writes. If it raises an error, they are ended. It must often call its second argument, which raises an exception if
    a rank has failed or all are to stop."""


def launch(spec: LaunchSpec, on_tick: Callable[[], None] = lambda: None) -> Attempt:
    """Run all ranks to their end; ``on_tick`` is called about twice a second while they run.

    The caller must hold ``run_lock``. Raises SpecError if the port is taken, the error that a rank reported, or a
    LaunchError about the first rank that failed, or that of ``prepare``. In any case, no process is left.
    """
    port = _port(spec)
    shared_memory.remove_all(
        ADDRESS, port
    )  # nothing listens on the port, so its segments are left over from a dead run
    if spec.accelerator == "cpu":
        shared_memory.require_free_space(spec.num_ranks)
    spec = replace(spec, master_port=port)
    this = attempt.begin(
        spec.run_folder,
        ProcessIdentity.of(os.getpid()),
        grace_seconds=spec.grace_seconds,
        save_seconds=spec.save_seconds,
    )
    environment = rank_environment(this, num_ranks=spec.num_ranks, accelerator=spec.accelerator, extra=spec.environment)
    if spec.operators and (found := unwritable(environment)):
        raise StorageError(unwritable_text(found))
    clear_stale_locks(environment)
    if to_compile := missing(spec.operators, environment):
        _log.warning(
            "%s compiles DeepSpeed's operators %s first, about a minute each", this.host, ", ".join(to_compile)
        )
    with stoppable():
        launcher = _start(this, command(spec, this.folder), environment)
        succeeded = _supervise(this, spec, launcher, on_tick)
    if not succeeded:
        raise verdict(evidence_of(this, spec.num_ranks))
    return this


def command(spec: LaunchSpec, attempt_folder: Path) -> list[str]:
    """Return the command line of the launcher for an attempt."""
    return [
        *(sys.executable, "-m", local_launcher.MODULE),
        *(f"--ranks={spec.num_ranks}", f"--master_port={spec.master_port or 'FREE_PORT'}", str(attempt_folder)),
        *(sys.executable, *spec.program(attempt_folder)),
    ]


def _port(spec: LaunchSpec) -> int:
    if spec.master_port is None:
        return ports.free_port()
    ports.require_free(spec.master_port)
    return spec.master_port


def _start(this: Attempt, argv: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher's guard in its own session, with its own stdin, output and environment."""
    _log.info("attempt %s starts; its logs are in %s", this.folder.name, this.folder)
    with open(this.log(attempt.LAUNCHER), "ab", buffering=0) as log:
        log.write(f"{shlex.join(argv)}\n".encode())
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, LAUNCHER_OPTION, str(this.folder), *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _supervise(this: Attempt, spec: LaunchSpec, launcher: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> bool:
    """Write what the ranks wait for, watch them until they end, and end what is left; returns whether all succeeded."""
    try:
        with suppress(_Decided):  # then that is found again
            spec.prepare(this.folder, partial(_require_undecided, this, spec.num_ranks, launcher))
        return _watch(this, spec.num_ranks, launcher, on_tick)
    except BaseException as error:
        if is_stop(error) and not _stop(this, spec.num_ranks, launcher):
            _end(this, launcher, spec.master_port)
            _log.warning("%s", verdict(evidence_of(this, spec.num_ranks)))
        raise
    finally:
        _end(this, launcher, spec.master_port)


def _watch(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> bool:
    """Wait until every rank has ended, or one has failed, or the launcher is gone; returns whether all succeeded."""
    while (succeeded := _outcome(this, num_ranks, launcher)) is None:
        if this.is_stop_ordered:
            return _stop(this, num_ranks, launcher)
        on_tick()
        time.sleep(_TICK_SECONDS)
    if succeeded:
        _await(launcher)
    return succeeded


class _Decided(Exception):
    """Raised inside ``LaunchSpec.prepare`` if ranks do not need what it prepares."""


def _require_undecided(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes]) -> None:
    if this.is_stop_ordered or _outcome(this, num_ranks, launcher) is not None:
        raise _Decided


def _outcome(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes]) -> bool | None:
    """Whether all ranks succeeded; None while this is undecided. A failed rank or a dead launcher decides it."""
    launcher_gone = launcher.poll() is not None  # checked before the records: the launcher outlives the ranks
    read = [this.exit_record(attempt.rank_name(rank)) for rank in range(num_ranks)]
    records = [record for record in read if record is not None]
    if len(records) == num_ranks:
        return all(record.succeeded for record in records)
    # A rank that ended as ordered is no failure: the others get time to end, too.
    return False if launcher_gone or any(record.is_failure for record in records) else None


def _stop(this: Attempt, num_ranks: int, launcher: subprocess.Popen[bytes]) -> bool:
    """Order all ranks to save and end, and wait for them; returns whether all did their work to the end."""
    _log.warning("%s", stopping_line(this.grace_seconds))
    with suppress(OSError):  # on a full disk, a save is cut off if this process is killed
        this.order_stop()
    # Guards enforce these limits. They get some more time to record how their ranks ended.
    seconds = this.grace_seconds + this.saving_seconds + _GUARDS_SECONDS
    signalled, deadline = set[ProcessIdentity](), time.monotonic() + seconds
    while (succeeded := _outcome(this, num_ranks, launcher)) is None and time.monotonic() < deadline:
        for guard in set(this.guards()) - signalled:  # including guards that have started since
            guard.send(signal.SIGTERM)
            signalled.add(guard)
        time.sleep(_LOOK_SECONDS)
    return bool(succeeded)


def _await(launcher: subprocess.Popen[bytes]) -> None:
    """Give the launcher time to notice that all guards have ended, so that it ends by itself."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_LAUNCHER_END_SECONDS)


def _end(this: Attempt, launcher: subprocess.Popen[bytes], port: int | None) -> None:
    """End what is left: first the guards, which end their programs and record how, then the rest at once."""
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
        _log.error(
            "processes %s of %s survived SIGKILL, so a disk or driver may hang: restart this machine",
            sorted(left),
            this.folder,
        )
    else:
        launcher.wait()
        shared_memory.remove_all(ADDRESS, port or 0)  # those of ranks whose guards were killed

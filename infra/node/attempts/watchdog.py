"""Decides when a guarded process must be ended. The guard asks once a second, and when a signal arrives.

Only SIGTERM gives a rank time to save, and only while the other ranks are there to save with it. Once the head has
ordered all ranks to stop, a save that has begun is completed, even if the head is killed meanwhile: Prefect kills the
flow of a cancelled run after 30 s.
"""

import os
import signal
import time

from infra.node import processes
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat, beat_file

Verdict = tuple[Cause, str]
"""The cause and the reason of an exit record."""

STOP_REQUESTED = "SIGTERM"
"""The beginning of the reason if the process was told to stop and had time to save."""

_FIRST_BEAT_SECONDS = 600.0
"""Time for a rank to import the code that writes its heartbeat; after that, its own deadlines apply."""

_STOPPED, _IN_THE_KERNEL = "T", "D"


class Watchdog:
    """Watches one process, and remembers what it observed and whether the guard was told to stop."""

    def __init__(self, this: Attempt, name: str, pid: int, parent: int | None) -> None:
        self._this, self._name, self._pid, self._parent = this, name, pid, parent
        self._stop_requested_at: float | None = None
        self._head_died = False
        self._beat: Beat | None = None
        self._sign: tuple[float, int] | None = None
        self._silent_checks, self._began, self._has_beaten = 0, time.monotonic(), False

    def handle_signals(self, numbers: bytes) -> Verdict | None:
        """Handle signals that the guard got. SIGTERM is passed on and gives a rank time to save; any other ends it.

        SIGHUP does not if the kernel sent it because the parent died, and the rank is completing its last save.
        """
        if (verdict := self._check_head_and_parent()) is not None:
            return verdict
        for number in numbers:
            if number == signal.SIGTERM:
                self._begin_stopping()
            elif number != signal.SIGHUP or not self._has_lost_parent:
                return Cause.REQUESTED, signal.Signals(number).name
        return self.check()

    def notice_death_of_head(self) -> None:
        """Take note that the head, which is on this machine, has died."""
        self._head_died = True

    def check(self) -> Verdict | None:
        """Return the first reason to end the process now; None if there is none. Call this once a second."""
        return self._check_head_and_parent() or self._check_liveness() or self._check_grace()

    def verdict_after_exit(self, signal_number: int) -> Verdict:
        """The cause and reason for a process that ended by itself, or by a signal, which is otherwise 0.

        If it was told to stop and another signal killed it, as the OOM killer does during a save, that has failed.
        """
        as_requested = self._stop_requested_at is not None and signal_number in (0, signal.SIGTERM)
        return (Cause.REQUESTED, STOP_REQUESTED) if as_requested else (Cause.EXITED, "exited")

    def _begin_stopping(self) -> None:
        if self._stop_requested_at is not None:
            return
        self._stop_requested_at = time.monotonic()
        if self._name == attempt.LAUNCHER:
            self._this.order_stop()  # only the head, not the launcher, can tell all ranks
        else:
            os.kill(self._pid, signal.SIGTERM)

    def _check_head_and_parent(self) -> Verdict | None:
        tolerated = self._this.lease_seconds
        if tolerated is not None and head_lease.is_ended(
            self._this.folder
        ):  # checked first: ending an attempt can end the parent too
            return Cause.REQUESTED, "the head ended the run"
        if self._this.is_stop_ordered and self._is_saving:
            return None
        if self._head_died:
            return Cause.HEAD, "the head died"
        if self._has_lost_parent:
            return Cause.PARENT, "the guard's parent process died"
        if tolerated is not None and (age := head_lease.age_seconds(self._this.folder)) > tolerated:
            return Cause.HEAD, f"no message from the head for {age:.0f} s"
        return None

    def _check_liveness(self) -> Verdict | None:
        beat = self._last_beat()
        self._silent_checks = self._silent_checks + 1 if self._is_silent(beat) else 0
        self._has_beaten = self._has_beaten or beat is not None
        if not self._has_beaten and self._name != attempt.LAUNCHER and self._seconds > _FIRST_BEAT_SECONDS:
            return (
                Cause.BEAT,
                f"no first sign of life after {self._seconds:.0f} s: it hangs while it imports its program",
            )
        if self._silent_checks > self._this.beat_seconds:
            return Cause.BEAT, f"no sign of life for {self._silent_checks} s: the process is stopped or hangs"
        if beat is not None and (seconds := time.monotonic() - beat.since) > beat.limit:
            where = f"phase {beat.phase!r} of step {beat.step}"
            return Cause.PHASE, f"{where} took {seconds:.0f} s; its deadline is {beat.limit:.0f} s"
        if beat is not None and beat.is_writing and (seconds := time.monotonic() - beat.save_since) > beat.save_limit:
            where = f"writing the checkpoint of step {beat.save_step}"
            return Cause.SAVE, f"{where} took {seconds:.0f} s; its deadline is {beat.save_limit:.0f} s"
        return None

    def _is_silent(self, beat: Beat | None) -> bool:
        """Whether it is stopped, or since the last check wrote no heartbeat, used no CPU and did not wait for a disk.

        Checks are counted, not seconds, so that no process is ended because the machine was suspended or overloaded.
        """
        try:
            activity = processes.activity(self._pid)
        except ProcessLookupError:
            return False
        before, self._sign = self._sign, (beat.beat if beat else 0.0, activity.cpu_ticks)
        if activity.state == _STOPPED:
            return True
        return beat is not None and before == self._sign and activity.state != _IN_THE_KERNEL

    def _check_grace(self) -> Verdict | None:
        if self._stop_requested_at is None or self._name == attempt.LAUNCHER:
            return None
        if (peer := self._this.failed_peer(self._name)) is not None:
            return Cause.REQUESTED, f"{peer} failed"
        if time.monotonic() - self._stop_requested_at > self._this.grace_seconds and not self._is_saving:
            return (
                Cause.REQUESTED,
                f"{STOP_REQUESTED}; it was still running after {self._this.grace_seconds:.0f} s",
            )
        return None

    def _last_beat(self) -> Beat | None:
        self._beat = heartbeat.read(beat_file(self._this.rank_files(self._name))) or self._beat
        return self._beat

    @property
    def _is_saving(self) -> bool:
        """Whether the rank is saving a checkpoint. How long it may take is checked with the other phases."""
        beat = self._last_beat()
        return beat is not None and beat.is_saving

    @property
    def _has_lost_parent(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

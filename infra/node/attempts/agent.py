"""The agent: the node's end of a control channel, over which a head renews its leases here and watches an attempt.

It lives as long as its channel and keeps no state between two channels: the head says where to continue. If it gets no
message from its head for the length of the lease, SIGALRM ends it, whatever it is waiting for at that moment.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from infra.node import processes
from infra.node.attempts import attempt, exit_record, head_lease
from infra.node.attempts.agent_messages import (
    Alive,
    ClaimNotRenewed,
    ClaimRenewed,
    Ended,
    Hello,
    Instruction,
    LeaseNotRenewed,
    NewLines,
    NotWatched,
    Order,
    Ordered,
    RankEnded,
    RankError,
    RankLine,
    RankPhase,
    Renew,
    Report,
    Saved,
    Serve,
    Watch,
)
from infra.node.attempts.attempt import Attempt, rank_name
from infra.node.attempts.attempt_actions import end_attempt
from infra.node.attempts.log_tail import LogTails, Offsets
from infra.node.attempts.run_ownership import ClaimRun, claim
from infra.node.channel import Channel
from infra.node.node_folders import attempt_folder
from infra.node.processes import ProcessIdentity
from t5train.files import heartbeat
from t5train.files.os_errors import explain, in_one_line
from t5train.files.run_folder import ATTEMPT_SPEC, CHECKPOINTS

_TICK_SECONDS = 1.0
_END_SECONDS = 30.0
"""Longer than it can take to end an attempt."""


def serve(request: Serve, head: Channel) -> None:
    """Follow the head's instructions until stdin ends.

    Sends at least one report a second, even if there is no news, to show that this machine is alive.
    """
    agent = _Agent(request.lease_seconds, head)
    while True:
        for instruction in head.receive_within(_TICK_SECONDS, Instruction):
            agent.follow(instruction)
        if head.at_end:
            os._exit(0)  # at once, also while a disk hangs
        agent.report()


class _Agent:
    def __init__(self, lease_seconds: float, head: Channel) -> None:
        self._lease_seconds, self._head = lease_seconds, head
        self._run_disk = _RunDisk(head)
        self._watched: _Watched | None = None
        self._arm(lease_seconds)

    def follow(self, instruction: Instruction) -> None:
        """Follow an instruction of the head."""
        match instruction:
            case Watch(run_id, offsets):
                self._read(run_id, partial(self._watch, run_id, offsets))
            case Renew(run_id, request):
                self._renew(run_id)
                if request is not None:
                    self._run_disk.claims.put(request)
            case Ordered(Order.STOP) if self._watched is not None:
                self._watched.stop()
            case Ordered(Order.END) if self._watched is not None:
                self._arm(_END_SECONDS)
                self._watched.end()
                self._forget()
        self._arm(self._lease_seconds)

    def report(self) -> None:
        """Send what has happened since the last call."""
        if self._watched is None:
            self._head.send(Alive(()))
        else:
            self._read(self._watched.run_id, self._watched.report)

    def _read(self, run_id: str, read: Callable[[], None]) -> None:
        """Read the folder of an attempt. If that fails, the claim to the run must be renewed nevertheless."""
        try:
            read()
        except ConnectionError:  # the head is gone
            raise
        except Exception as error:  # whatever it is, the head is told
            self._forget()
            self._head.send(NotWatched(run_id, in_one_line(error)))

    def _watch(self, run_id: str, offsets: Offsets | None) -> None:
        self._forget()
        folder = attempt_folder(run_id)
        tails = LogTails(folder, offsets)
        hello = Hello(run_id, processes.boot_id(), tails.offsets)
        if not (folder / attempt.ATTEMPT).exists() or head_lease.age_seconds(folder) == float("inf"):
            self._head.send(hello)
            self._head.send(Ended(()))  # not prepared, or ended, perhaps by a reboot: do not renew its lease
            return
        watched, saves = _Watched(attempt.read(folder), tails, self._head), _Saves(folder)
        self._head.send(hello)
        self._watched, self._run_disk.saves = watched, saves

    def _renew(self, run_id: str | None) -> None:
        if self._watched is None:
            return
        if run_id == self._watched.run_id:
            self._watched.renew()
        else:
            self._forget()

    def _forget(self) -> None:
        self._watched = self._run_disk.saves = None

    def _arm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds + _TICK_SECONDS)


class _Watched:
    """An attempt on this machine."""

    def __init__(self, this: Attempt, tails: LogTails, head: Channel) -> None:
        self.run_id = this.run_id
        self._this = this
        self._tails = tails
        self._head = head
        self._reported = set[str]()

    def stop(self) -> None:
        """Make the ranks save and end."""
        with suppress(OSError):  # on a full disk, nothing can be saved here either
            self._this.order_stop()
        for guard in self._this.guards():
            guard.send(signal.SIGTERM)

    def report(self) -> None:
        """Send what has happened since the last call."""
        for report in self._news():
            self._head.send(report)

    def end(self) -> None:
        """End the ranks, and send the last reports."""
        left = sorted(end_attempt(self._this.folder))
        self._reported.clear()  # so that the last report includes the exit records of all ranks, which exist now
        self.report()
        self._head.send(Ended(tuple(left)))

    def renew(self) -> None:
        """Renew the lease."""
        try:
            head_lease.renew(self._this.folder)
        except OSError as error:  # the ranks cannot write there either, and end once the lease expires
            self._head.send(LeaseNotRenewed(explain(error)))

    def _news(self) -> Iterator[Report]:
        gone = self._gone()  # checked before the records, which guards write before they end
        ended = [_end_of(path) for path in self._new("exit")]
        yield from (_error(path) for path in self._new("error"))  # a rank's error is written before its record
        yield from ended
        lines, left_out = self._tails.read()
        if (phase := self._phase()) is not None:
            yield phase
        if lines or left_out:
            yield NewLines(tuple(RankLine(*line) for line in lines), left_out, self._tails.offsets)
        yield Alive(tuple(name for name in gone if f"{name}.exit.json" not in self._reported))

    def _new(self, kind: str) -> list[Path]:
        """Files ``*.{kind}.json`` that were not reported yet."""
        paths = [path for path in sorted(self._this.folder.glob(f"*.{kind}.json")) if path.name not in self._reported]
        self._reported |= {path.name for path in paths}
        return paths

    def _gone(self) -> list[str]:
        """Ranks whose guards have ended. If such a rank has no exit record, its guard was killed."""
        recorded = {path.stem: json.loads(path.read_text("utf-8")) for path in self._this.folder.glob("rank-*.pid")}
        return [name for name, facts in recorded.items() if not ProcessIdentity(**facts["guard"]).is_alive()]

    def _phase(self) -> RankPhase | None:
        beat, now = heartbeat.read(heartbeat.beat_file(self._this.rank_files(rank_name(0)))), time.monotonic()
        if beat is None or now - beat.beat > heartbeat.FRESH_SECONDS:
            return None
        return RankPhase(beat.phase, beat.step, now - beat.since, beat.limit)


class _RunDisk:
    """Does what touches the disk of the run's files, in a thread of its own: if that disk hangs, nothing else must."""

    def __init__(self, head: Channel) -> None:
        self.claims = SimpleQueue[ClaimRun]()
        """Claims to renew. The head puts the next one after the answer to the last one."""
        self.saves: _Saves | None = None
        self._head = head
        threading.Thread(target=self._work, name="disk of the run", daemon=True).start()

    def _work(self) -> None:
        with suppress(BrokenPipeError):  # the head is gone
            while True:
                with suppress(Empty):
                    self._head.send(_renewed(self.claims.get(timeout=_TICK_SECONDS)))
                if count := self._count():
                    self._head.send(Saved(count))

    def _count(self) -> int:
        saves = self.saves
        try:
            return 0 if saves is None else saves.new()
        except OSError:  # the ranks that save there report it
            return 0


def _renewed(request: ClaimRun) -> Report:
    try:
        return ClaimRenewed(claim(request))
    except Exception as error:  # whatever it is, the head waits for the answer
        return ClaimNotRenewed(in_one_line(error))


class _Saves:
    """Counts the sidecars that ranks write to this machine's own disk, if hosts share no storage."""

    def __init__(self, folder: Path) -> None:
        job = json.loads((folder / ATTEMPT_SPEC).read_text("utf-8")) if (folder / ATTEMPT_SPEC).exists() else {}
        self._checkpoints = Path(job["run_folder"], CHECKPOINTS) if job.get("node_local") else None
        self._known = set[tuple[str, int]]()

    def new(self) -> int:
        """How many sidecars were written since the last call."""
        if self._checkpoints is None:
            return 0
        found = {(str(path), at) for path in self._checkpoints.glob("*/rank-*.json") if (at := _written_at(path))}
        new, self._known = found - self._known, found
        return len(new)


def _end_of(path: Path) -> RankEnded:
    return RankEnded(replace(exit_record.parsed(path.read_text("utf-8")), name=_rank_of(path)))


def _error(path: Path) -> RankError:
    reported = json.loads(path.read_text("utf-8"))
    return RankError(_rank_of(path), reported["type"], reported["message"])


def _rank_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _written_at(path: Path) -> int | None:
    """When a file was written, in nanoseconds; None if it was just removed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None

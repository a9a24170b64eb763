"""The node's side of a host session: reports to the head what the ranks do, and carries out the head's orders.

No state is kept here between two sessions: the head says where to continue. If a session gets no message from its head
for the length of the lease, SIGALRM ends it, whatever it is waiting for at that moment.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from infra.node import processes
from infra.node.attempts import attempt, exit_record, head_lease
from infra.node.attempts.attempt import Attempt, rank_name
from infra.node.attempts.attempt_actions import end_attempt
from infra.node.attempts.log_tail import LogTails
from infra.node.attempts.session_messages import (
    Alive,
    Ended,
    Hello,
    Instruction,
    LeaseNotRenewed,
    NewLines,
    Order,
    RankEnded,
    RankError,
    RankLine,
    RankPhase,
    Report,
    Saved,
    Watch,
)
from infra.node.channel import Channel
from infra.node.node_folders import attempt_folder
from infra.node.processes import ProcessIdentity
from t5train.files import heartbeat
from t5train.files.os_errors import explain
from t5train.files.run_folder import ATTEMPT_SPEC, CHECKPOINTS

_TICK_SECONDS = 1.0
_END_SECONDS = 30.0
"""Longer than it can take to end an attempt."""


def watch(request: Watch, head: Channel) -> None:
    """Watch an attempt until stdin ends or the attempt is ended.

    After Hello, sends at least one report a second, even if there is no news, to show that this machine is alive.
    """
    folder = attempt_folder(request.run_id)
    tails = LogTails(folder, request.offsets)
    head.send(Hello(processes.boot_id(), tails.offsets))
    if not (folder / attempt.ATTEMPT).exists() or head_lease.age_seconds(folder) == float("inf"):
        head.send(Ended(()))  # not prepared, or ended, perhaps by a reboot: do not renew its lease
        return
    session = _Session(attempt.read(folder), tails, head)
    while not head.at_end:
        for instruction in head.receive_within(_TICK_SECONDS, Instruction):
            session.obey(instruction.order)
            if session.has_ended:
                return
        session.report()


class _Session:
    def __init__(self, this: Attempt, tails: LogTails, head: Channel) -> None:
        self._this = this
        self._tails = tails
        self._head = head
        self.has_ended = False
        self._reported = set[str]()
        self._saves = _Saves(this.folder)
        self._arm()

    def obey(self, order: Order) -> None:
        """Carry out an order of the head."""
        if order == Order.END:
            self._end()
            return
        if order == Order.STOP:
            with suppress(OSError):  # on a full disk, nothing can be saved here either
                self._this.order_stop()
            for guard in self._this.guards():
                guard.send(signal.SIGTERM)
        if order == Order.RENEW:
            self._renew()
        self._arm()

    def report(self) -> None:
        """Send what has happened since the last call."""
        for report in self._news():
            self._head.send(report)

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)
        left = sorted(end_attempt(self._this.folder))
        self._reported.clear()  # so that the last report includes the exit records of all ranks, which exist now
        self.report()
        self._head.send(Ended(tuple(left)))
        self.has_ended = True

    def _renew(self) -> None:
        try:
            head_lease.renew(self._this.folder)
        except OSError as error:  # the ranks cannot write there either, and end once the lease expires
            self._head.send(LeaseNotRenewed(explain(error)))

    def _news(self) -> Iterator[Report]:
        gone = self._gone()  # checked before the records, which guards write before they end
        ended = [_end_of(path) for path in self._new("exit")]
        yield from (_error(path) for path in self._new("error"))  # a rank's error is written before its record
        yield from ended
        if saved := self._saves.new():
            yield Saved(saved)
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

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, (self._this.lease_seconds or 0) + _TICK_SECONDS)


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

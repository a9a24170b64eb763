"""A host session: reports to the head what an attempt's ranks on this machine do, and carries out its orders for them.

No state is kept here between two sessions; the head says where to continue. A session that gets no message from its
head for the length of the lease is ended by the kernel's alarm, whatever it is waiting for at that moment.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.node import processes
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import end_attempt
from infra.node.attempts.log_tail import LogTails
from infra.node.node_folders import attempt_folder
from infra.node.processes import ProcessIdentity
from t5train.files.os_errors import explain
from t5train.files.run_folder import ATTEMPT_SPEC, CHECKPOINTS

_TICK_SECONDS = 1.0
_END_SECONDS = 30.0
"""Longer than ending an attempt may take."""

Message = dict[str, Any]


def watch(request: Message) -> None:
    """Watch attempt ``run_id``, its logs from ``offsets`` on (see LogTails), until stdin ends or the attempt is ended.

    Lines on stdin: ``renew`` renews the lease, ``stop`` makes ranks save and end, ``end`` ends them. Lines on stdout:
    ``hello`` first; then at least one line a second, even if there is no news, to show that this machine is alive.
    """
    folder = attempt_folder(request["run_id"])
    tails = LogTails(folder, request["offsets"])
    _tell({"hello": {"host": socket.gethostname(), "boot_id": processes.boot_id()}, "offsets": tails.offsets})
    if not (folder / attempt.ATTEMPT).exists() or head_lease.age_seconds(folder) == float("inf"):
        _tell({"ended": {"left": []}})  # never begun, or already ended: its lease must not be renewed
        return
    window = _Window(attempt.read(folder), tails)
    orders = _Orders()
    while not orders.at_end:
        for order in orders.read(_TICK_SECONDS):
            if left := window.obey(order):
                _tell({"ended": left})
                return
        for message in window.news():
            _tell(message)


class _Window:
    def __init__(self, this: Attempt, tails: LogTails) -> None:
        self._this = this
        self._tails = tails
        self._told = set[str]()
        self._saves = _Saves(this.folder)
        self._arm()

    def obey(self, order: Message) -> Message | None:
        """Carry out an order of the head. Returns what is left if the order was to end the attempt."""
        if "end" in order:
            signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)
            left = sorted(end_attempt(self._this.folder))
            self._told.clear()  # exit records exist now: the last news includes all of them
            for message in self.news():
                _tell(message)
            return {"left": left}
        if "stop" in order:
            for guard in self._this.guards():
                guard.send(signal.SIGTERM)
        if "renew" in order:
            try:
                head_lease.renew(self._this.folder)
            except OSError as error:  # ranks cannot write there either; without a renewed lease they end
                _tell({"disk": explain(error)})
        self._arm()
        return None

    def news(self) -> Iterator[Message]:
        """What has happened since the last call."""
        gone = self._gone()  # checked before the records, because a guard writes its record before it ends
        ended = self._new("exit")
        yield from ({"error": error} for error in self._new("error"))  # a rank's error is written before its record
        yield from ({"exit": record} for record in ended)
        if saved := self._saves.new():
            yield {"saved": saved}
        lines, left_out = self._tails.read()
        if lines or left_out:
            yield {"lines": lines, "left_out": left_out, "offsets": self._tails.offsets}
        yield {"gone": [name for name in gone if f"{name}.exit.json" not in self._told]}

    def _new(self, kind: str) -> list[Message]:
        paths = [path for path in sorted(self._this.folder.glob(f"*.{kind}.json")) if path.name not in self._told]
        self._told |= {path.name for path in paths}
        return [json.loads(path.read_text("utf-8")) | {"name": path.name.partition(".")[0]} for path in paths]

    def _gone(self) -> list[str]:
        """Ranks whose guard has ended; if there is no exit record, the guard was killed."""
        recorded = {path.stem: json.loads(path.read_text("utf-8")) for path in self._this.folder.glob("rank-*.pid")}
        return [name for name, facts in recorded.items() if not ProcessIdentity(**facts["guard"]).is_alive()]

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, (self._this.lease_seconds or 0) + _TICK_SECONDS)


class _Saves:
    """Sidecars that ranks write to this machine's own disk, if hosts share no storage."""

    def __init__(self, folder: Path) -> None:
        job = json.loads((folder / ATTEMPT_SPEC).read_text("utf-8")) if (folder / ATTEMPT_SPEC).exists() else {}
        self._checkpoints = Path(job["run_folder"], CHECKPOINTS) if job.get("node_local") else None
        self._known = set[tuple[str, int]]()

    def new(self) -> int:
        """How many were written since the last call."""
        if self._checkpoints is None:
            return 0
        found = {(str(path), at) for path in self._checkpoints.glob("*/rank-*.json") if (at := _written_at(path))}
        new, self._known = found - self._known, found
        return len(new)


class _Orders:
    """Lines from the head, as they arrive."""

    def __init__(self) -> None:
        self.at_end = False
        self._rest = b""

    def read(self, seconds: float) -> list[Message]:
        """Whole lines that arrive within that time; returns as soon as there are any."""
        deadline = time.monotonic() + seconds
        while not self.at_end and select.select([0], [], [], max(0.0, deadline - time.monotonic()))[0]:
            new = os.read(0, 1 << 16)
            self.at_end = not new
            *lines, self._rest = (self._rest + new).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]
        return []


def _written_at(path: Path) -> int | None:
    """When it was written; None if it was just removed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _tell(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()

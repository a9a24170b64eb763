"""Ends attempts on this machine: every process of theirs, whether it has begun its work or not."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra import processes, shared_memory
from infra.attempts import attempt, lease
from infra.node_folder import attempt_folder
from infra.processes import Belongs

GUARDS_SECONDS = 6.0
"""Longer than guards take that end their rank and write down how it ended."""
MEETING = "meeting.json"
"""In the folder of an attempt: address and port at which its ranks meet."""


def end(request: dict[str, Any]) -> dict[str, Any]:
    """End the attempt ``run_id``; ``left`` are pids that outlived SIGKILL."""
    return {"left": sorted(end_attempt(attempt_folder(request["run_id"])))}


def end_attempt(folder: Path) -> set[int]:
    """End one attempt; returns the pids that outlived even SIGKILL.

    A guard that is told to end and finds no lease knows that there is no time to save, ends its rank and writes down
    how; one that starts now starts nothing.
    """
    with suppress(OSError):  # on a disk that cannot be written the lease runs out by itself
        (folder / lease.LEASE).unlink(missing_ok=True)
    # Of a head on this machine that was fenced: on SIGTERM it would end processes of every host by their name.
    processes.end(processes.in_run(attempt.launcher_run_id(folder.name)), grace_seconds=0)
    processes.end(processes.given(str(folder)), GUARDS_SECONDS)
    left = processes.end(of_attempt(folder), grace_seconds=0)
    if not left:
        remove_segments(folder)
    return left


def of_attempt(folder: Path) -> Belongs:
    """Ranks carry the run id; guards, and DeepSpeed's launcher of this machine, were given the folder."""
    in_run, given = processes.in_run(folder.name), processes.given(str(folder))
    return lambda pid: in_run(pid) or given(pid)


def remove_segments(folder: Path) -> None:
    """Remove the shared memory of the attempt's ranks. All of them must have ended, or none have started."""
    if (folder / MEETING).exists():
        meeting = json.loads((folder / MEETING).read_text("utf-8"))
        shared_memory.remove_all(meeting["address"], meeting["port"])

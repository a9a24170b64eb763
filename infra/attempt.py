"""One start of a run's ranks: the folder ``{run}/attempts/NNNN`` and the files in it.

::

    attempt.json            who started it (the head process), and its run id
    launcher.log            output of DeepSpeed's launcher
    rank-00000.log          output of a rank
    rank-00000.pid          its process (also the number of its process group) and its guard's
    rank-00000.exit.json    how it ended; written by its guard
    rank-00000.error.json   the error it raised, if it was one of this project's (t5train.train.error_report)

The launcher has .pid and .exit.json too. Standard library only, as the guards import it.
"""

import json
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from infra.processes import ProcessIdentity
from t5train.atomic import write_json
from t5train.run_files import ATTEMPTS

LAUNCHER = "launcher"


@dataclass(frozen=True)
class ExitRecord:
    """How a guarded process ended, and why."""

    name: str
    returncode: int | None
    """As subprocess has it: minus the signal's number when a signal ended it; None if it never started."""
    reason: str
    """``exited`` of its own accord (a stray signal counts), else what made its guard end it."""
    started_at: str
    ended_at: str

    @property
    def succeeded(self) -> bool:
        """It did all it had to do."""
        return self.returncode == 0 and self.reason == "exited"

    def __str__(self) -> str:
        if self.reason != "exited":
            return f"was ended by its guard ({self.reason})"
        if self.returncode is not None and self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"ended with exit code {self.returncode}"


@dataclass(frozen=True)
class Attempt:
    """One start: its folder, the id that its processes carry, and the process that answers for it."""

    folder: Path
    run_id: str
    head: ProcessIdentity

    def log(self, name: str) -> Path:
        """Output of the rank or launcher of that name."""
        return self.folder / f"{name}.log"

    def write_process(self, name: str, process: ProcessIdentity, guard: ProcessIdentity) -> None:
        """Record the running process of that name."""
        write_json(self.folder / f"{name}.pid", {"process": asdict(process), "guard": asdict(guard)})

    def write_exit(self, record: ExitRecord) -> None:
        """Record how a process ended."""
        write_json(self.folder / f"{record.name}.exit.json", asdict(record))

    def exit_record(self, name: str) -> ExitRecord | None:
        """How the process of that name ended; None while it has not, or if its guard was killed."""
        try:
            return ExitRecord(**json.loads((self.folder / f"{name}.exit.json").read_text("utf-8")))
        except FileNotFoundError:
            return None


def rank_name(rank: int) -> str:
    """``rank-00000``: the stem of a rank's files."""
    return f"rank-{rank:05d}"


def begin(run_folder: Path, head: ProcessIdentity) -> Attempt:
    """Make the next attempt folder of a run (0001, 0002, ...), readable by its owner only."""
    number = max(_numbers(run_folder), default=0) + 1
    folder = attempt_folder(run_folder, number)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    attempt = Attempt(folder, f"{run_folder.name}-{number:04d}-{secrets.token_hex(4)}", head)
    facts = {"run_id": attempt.run_id, "head": asdict(head), "host": socket.gethostname(), "started_at": now()}
    write_json(folder / "attempt.json", facts)
    return attempt


def read(folder: Path) -> Attempt:
    """The attempt that lives in a folder."""
    facts = json.loads((folder / "attempt.json").read_text("utf-8"))
    return Attempt(folder, facts["run_id"], ProcessIdentity(**facts["head"]))


def attempt_folder(run_folder: Path, number: int) -> Path:
    """Where attempt ``number`` of a run lives."""
    return run_folder.absolute() / ATTEMPTS / f"{number:04d}"


def living_processes(run_folder: Path) -> list[int]:
    """Pids of recorded launchers, ranks and their guards, of any attempt of the run, that still run."""
    recorded = [json.loads(path.read_text("utf-8")) for path in (run_folder / ATTEMPTS).glob("*/*.pid")]
    processes = [ProcessIdentity(**facts[role]) for facts in recorded for role in ("process", "guard")]
    return sorted(process.pid for process in processes if process.is_alive())


def now() -> str:
    """UTC, ISO 8601, to the microsecond: sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _numbers(run_folder: Path) -> Iterator[int]:
    return (int(path.name) for path in (run_folder / ATTEMPTS).glob("[0-9]*") if path.name.isdigit())

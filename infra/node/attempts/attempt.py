"""An attempt, which is one start of a run's ranks: its folder, and the files in it.

::

    attempt.json            its run id, the head responsible for it, and its time limits
    launcher.log            output of the launcher
    rank-00000.log          output of a rank
    rank-00000.pid          its process (whose pid is also its session) and its guard
    rank-00000.beat         its heartbeat (t5train.files.heartbeat)
    rank-00000.exit.json    how it ended; written by its guard (infra.node.attempts.exit_record)
    head.beat               what rank 0 did when its host last reported, in the head's clock; with several hosts
    stop                    exists once all ranks are to save and stop
    rank-00000.error.json   the error it raised, if the error is one of this project's (t5train.files.error_report)

The launcher has .log, .pid and .exit.json too. On one machine, the folder is ``{run}/attempts/NNNN``. With several
hosts, each has its own folder (infra.node.node_folders), which also contains ``lease`` (infra.node.attempts.head_lease)
and ``environment.json`` (infra.node.attempts.rank_environment). At the end, the head collects all of these files
in ``{run}/attempts/NNNN``, whose attempt.json names the hosts. Standard library only, as the guards import it.
"""

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.node.attempts import exit_record
from infra.node.attempts.exit_record import ExitRecord
from infra.node.processes import ProcessIdentity
from t5train.files import heartbeat
from t5train.files.atomic import write_json
from t5train.files.run_folder import ATTEMPTS

ATTEMPT = "attempt.json"
LAUNCHER = "launcher"
HEAD = "head"
STOP = "stop"


def now() -> str:
    """The current UTC time in ISO 8601, with microseconds, so that it sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def shown_time(at: str) -> str:
    """Return what ``now`` returned for people, to the second: ``2026-01-31 12:00:00 UTC``."""
    return f"{at[:19].replace('T', ' ')} UTC"


@dataclass(frozen=True)
class Attempt:
    """An attempt as one machine sees it: its folder there, the run id of its processes, and the responsible head."""

    folder: Path
    run_id: str
    run_name: str
    number: int
    head: ProcessIdentity | None
    """The head's process, if the whole run is on one machine."""
    lease_seconds: float | None
    """How long ranks keep training without contact with the head. Exactly one of this and ``head`` is set."""
    grace_seconds: float = 30.0
    """How long ranks that are told to stop may take until they begin to save."""
    save_seconds: float = 0.0
    """How long a save may take."""
    beat_seconds: float = 10.0
    """How long a rank may go without a sign of life."""
    accelerator: str | None = None
    slots: tuple[int, ...] = ()
    """The accelerators of this machine that it uses, in the order of LOCAL_RANK."""
    host: str = field(default_factory=socket.gethostname)
    """This machine's name in the hostfile, or else its hostname."""
    started_at: str = field(default_factory=now)
    code: str | None = None
    """Digest of the code that was sent to the hosts; None if they have the code installed."""
    hosts: Mapping[str, tuple[int, ...]] | None = None
    """Slots by host name, in the order of ranks. Set only in the run's own folder; None if there is one machine."""

    def write(self) -> None:
        """Write attempt.json to its folder, which must exist."""
        facts = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "folder"}
        hosts = self.hosts and list(self.hosts.items())  # a list: the keys of a JSON object would be sorted
        write_json(self.folder / ATTEMPT, facts | {"head": self.head and asdict(self.head), "hosts": hosts})

    def rank_files(self, name: str) -> Path:
        """The path of the files of the rank called ``name``, without their suffixes."""
        return self.folder / name

    def log(self, name: str) -> Path:
        """The path of the log of a rank or the launcher."""
        return self.folder / f"{name}.log"

    def write_process(self, name: str, process: ProcessIdentity, guard: ProcessIdentity) -> None:
        """Record the process and the guard of a rank or the launcher."""
        write_json(self.folder / f"{name}.pid", {"process": asdict(process), "guard": asdict(guard)})

    def reserve_exit(self, name: str) -> None:
        """Reserve disk space for an exit record, which the guard must be able to write even if the disk is full."""
        exit_record.reserve(self.folder, name)

    def write_exit(self, record: ExitRecord) -> None:
        """Record how a process ended."""
        exit_record.write(self.folder, record)

    def exit_record(self, name: str) -> ExitRecord | None:
        """How a rank or the launcher ended; None if it is still running, or if its guard was killed."""
        return exit_record.read(self.folder, name)

    def guards(self) -> list[ProcessIdentity]:
        """The running guards of this machine's ranks."""
        recorded = [json.loads(path.read_text("utf-8")) for path in sorted(self.folder.glob("rank-*.pid"))]
        guards = [ProcessIdentity(**facts["guard"]) for facts in recorded]
        return [guard for guard in guards if guard.is_alive()]

    def failed_peer(self, name: str) -> str | None:
        """Return the name of another rank here that has failed or whose guard was killed; None if there is none."""
        for path in sorted(self.folder.glob("rank-*.pid")):
            if path.stem == name:
                continue
            guard = ProcessIdentity(**json.loads(path.read_text("utf-8"))["guard"])
            is_alive = guard.is_alive()  # checked before the record, which the guard writes before it ends
            record = self.exit_record(path.stem)
            if (record is None and not is_alive) or (record is not None and record.is_failure):
                return path.stem
        return None

    def order_stop(self) -> None:
        """Record that all ranks are to save and stop. The head does so before it tells them.

        The guard of the launcher does so to ask the head.
        """
        (self.folder / STOP).touch(mode=0o600)

    @property
    def saving_seconds(self) -> float:
        """How long ranks that are told to stop may save: first a checkpoint that is being written, then their last."""
        return 2 * self.save_seconds

    @property
    def is_stop_ordered(self) -> bool:
        """Whether all ranks are to save and stop, so that a save is completed even if the head dies."""
        return (self.folder / STOP).exists()


def launcher_run_id(run_id: str) -> str:
    """The run id of the launcher's processes in a run over several hosts.

    It differs from the run id of the ranks because a head that is also a host ends the launcher in another way.
    """
    return f"{run_id}-head"


def rank_name(rank: int) -> str:
    """The stem of a rank's files: ``rank-00000``."""
    return f"rank-{rank:05d}"


def begin(
    run_folder: Path,
    head: ProcessIdentity | None,
    lease_seconds: float | None = None,
    hosts: Mapping[str, tuple[int, ...]] | None = None,
    **facts: Any,
) -> Attempt:
    """Begin the next attempt of a run: create its folder (0001, 0002, ...), readable by its owner only.

    Exactly one of ``head`` and ``lease_seconds`` must be None. ``facts`` are further fields of Attempt.
    """
    number = max(_numbers(run_folder), default=0) + 1
    folder = attempt_folder(run_folder, number)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    run_id = f"{run_folder.name}-{number:04d}-{secrets.token_hex(4)}"
    attempt = Attempt(folder, run_id, run_folder.name, number, head, lease_seconds, hosts=hosts, **facts)
    attempt.write()
    return attempt


def read(folder: Path) -> Attempt:
    """Read the attempt that is recorded in a folder."""
    facts = json.loads((folder / ATTEMPT).read_text("utf-8"))
    head, hosts = facts["head"], facts["hosts"]
    parsed = {
        "head": head and ProcessIdentity(**head),
        "slots": tuple(facts["slots"]),
        "hosts": hosts and {name: tuple(slots) for name, slots in dict(hosts).items()},
    }
    return Attempt(folder=folder, **{**facts, **parsed})


def attempt_folder(run_folder: Path, number: int) -> Path:
    """The folder of attempt ``number`` of a run."""
    return run_folder.absolute() / ATTEMPTS / f"{number:04d}"


def living_processes(run_folder: Path) -> list[int]:
    """Pids of the launchers, ranks and guards, recorded by any attempt of the run, that are still running."""
    recorded = [json.loads(path.read_text("utf-8")) for path in (run_folder / ATTEMPTS).glob("*/*.pid")]
    processes = [ProcessIdentity(**facts[role]) for facts in recorded for role in ("process", "guard")]
    return sorted(process.pid for process in processes if process.is_alive())


def is_saving(run_folder: Path) -> bool:
    """Whether a rank of the last attempt is saving the checkpoint with which it is to stop, on this machine."""
    this = read(attempt_folder(run_folder, max(_numbers(run_folder), default=0)))
    for path in this.folder.glob("rank-*.pid"):
        beat = heartbeat.read(heartbeat.beat_file(this.rank_files(path.stem)))
        rank = ProcessIdentity(**json.loads(path.read_text("utf-8"))["process"])
        if this.is_stop_ordered and beat is not None and beat.is_saving and rank.is_alive():
            return True
    return False


def _numbers(run_folder: Path) -> Iterator[int]:
    return (int(path.name) for path in (run_folder / ATTEMPTS).glob("[0-9]*") if path.name.isdigit())

"""One start of a run's ranks: a folder, and the files in it.

::

    attempt.json            its run id, who answers for it, how long what may take
    launcher.log            output of DeepSpeed's launcher
    rank-00000.log          output of a rank
    rank-00000.pid          its process (also the number of its process group) and its guard's
    rank-00000.beat         its signs of life (t5train.rank.heartbeat)
    rank-00000.exit.json    how it ended; written by its guard (infra.node.attempts.exit_record)
    stop                    there once the launcher was told to end, and thereby all
    rank-00000.error.json   the error it raised, if it was one of this project's (t5train.rank.error_report)

The launcher has .log, .pid and .exit.json too. On one machine that folder is ``{run}/attempts/NNNN``. Over hosts each
has one of its own (infra.node.node_folders), with ``lease`` (infra.node.attempts.head_lease) and ``environment.json``
(infra.node.attempts.rank_environment) besides; at the end all that lies there is gathered in ``{run}/attempts/NNNN``,
whose attempt.json names the hosts. Standard library only, as the guards import it.
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
from t5train.files.atomic import write_json
from t5train.files.run_folder import ATTEMPTS

ATTEMPT = "attempt.json"
LAUNCHER = "launcher"
STOP = "stop"


def now() -> str:
    """UTC, ISO 8601, to the microsecond: sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Attempt:
    """One start, as a machine knows it: its folder there, the id its processes carry, and who answers for it."""

    folder: Path
    run_id: str
    run_name: str
    number: int
    head: ProcessIdentity | None
    """The process that answers for it, where all is on one machine."""
    lease_seconds: float | None
    """How long ranks go on without word from the head, where it is elsewhere. Just one of the two is set."""
    grace_seconds: float = 30.0
    """How long ranks that are told to end may take to save."""
    beat_seconds: float = 10.0
    """How long a rank may be without a sign of life."""
    accelerator: str | None = None
    slots: tuple[int, ...] = ()
    """Accelerators of this machine that it uses, by LOCAL_RANK."""
    host: str = field(default_factory=socket.gethostname)
    """This machine's name in the hostfile, or its own."""
    started_at: str = field(default_factory=now)
    code: str | None = None
    """Digest of the code that its hosts were sent; None where they have it installed."""
    hosts: Mapping[str, tuple[int, ...]] | None = None
    """Slots by the name of the host, in the order of ranks; only in the run's own folder, and None for one machine."""

    def write(self) -> None:
        """Record it in its folder, which must be there."""
        write_json(self.folder / ATTEMPT, self.facts())

    def facts(self) -> dict[str, Any]:
        """What attempt.json tells of it."""
        facts = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "folder"}
        hosts = self.hosts and list(self.hosts.items())  # names of an object would be sorted
        return facts | {"head": self.head and asdict(self.head), "hosts": hosts}

    def rank_files(self, name: str) -> Path:
        """Where a rank of that name leaves files of its own, up to their suffix."""
        return self.folder / name

    def log(self, name: str) -> Path:
        """Output of the rank or launcher of that name."""
        return self.folder / f"{name}.log"

    def write_process(self, name: str, process: ProcessIdentity, guard: ProcessIdentity) -> None:
        """Record the running process of that name."""
        write_json(self.folder / f"{name}.pid", {"process": asdict(process), "guard": asdict(guard)})

    def reserve_exit(self, name: str) -> None:
        """Make room for the exit record of that name, which is to be written although the disk be full by then."""
        exit_record.reserve(self.folder, name)

    def write_exit(self, record: ExitRecord) -> None:
        """Record how a process ended."""
        exit_record.write(self.folder, record)

    def exit_record(self, name: str) -> ExitRecord | None:
        """How the process of that name ended; None while it has not, or if its guard was killed."""
        return exit_record.read(self.folder, name)

    def guards(self) -> list[ProcessIdentity]:
        """Guards of this machine's ranks that still run."""
        recorded = [json.loads(path.read_text("utf-8")) for path in sorted(self.folder.glob("rank-*.pid"))]
        guards = [ProcessIdentity(**facts["guard"]) for facts in recorded]
        return [guard for guard in guards if guard.is_alive()]

    def failed_fellow(self, name: str) -> str | None:
        """Another rank of this machine that has failed, or whose guard was killed; None if there is none."""
        for path in sorted(self.folder.glob("rank-*.pid")):
            if path.stem == name:
                continue
            guard = ProcessIdentity(**json.loads(path.read_text("utf-8"))["guard"])
            is_alive = guard.is_alive()  # asked before the record, which it outlives
            record = self.exit_record(path.stem)
            if (record is None and not is_alive) or (record is not None and record.is_failure):
                return path.stem
        return None

    def order_stop(self) -> None:
        """Have the head tell all ranks to save and end."""
        (self.folder / STOP).touch(mode=0o600)

    @property
    def is_stop_ordered(self) -> bool:
        """Whether somebody had the launcher told to end, and thereby all."""
        return (self.folder / STOP).exists()


def launcher_run_id(run_id: str) -> str:
    """What processes of the launcher over hosts carry: its head may be one of them, and it ends in another way."""
    return f"{run_id}-head"


def rank_name(rank: int) -> str:
    """``rank-00000``: the stem of a rank's files."""
    return f"rank-{rank:05d}"


def begin(
    run_folder: Path,
    head: ProcessIdentity | None,
    lease_seconds: float | None = None,
    hosts: Mapping[str, tuple[int, ...]] | None = None,
    **facts: Any,
) -> Attempt:
    """Make the next attempt folder of a run (0001, 0002, ...), readable by its owner only.

    Of ``head`` and ``lease_seconds`` one is None; ``facts`` are further fields of Attempt.
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
    """The attempt that lives in a folder."""
    return of_facts(folder, json.loads((folder / ATTEMPT).read_text("utf-8")))


def of_facts(folder: Path, facts: Mapping[str, Any]) -> Attempt:
    """The attempt that attempt.json tells of."""
    head, hosts = facts["head"], facts["hosts"]
    parsed = {
        "head": head and ProcessIdentity(**head),
        "slots": tuple(facts["slots"]),
        "hosts": hosts and {name: tuple(slots) for name, slots in dict(hosts).items()},
    }
    return Attempt(folder=folder, **{**facts, **parsed})


def attempt_folder(run_folder: Path, number: int) -> Path:
    """Where attempt ``number`` of a run lives."""
    return run_folder.absolute() / ATTEMPTS / f"{number:04d}"


def living_processes(run_folder: Path) -> list[int]:
    """Pids of recorded launchers, ranks and their guards, of any attempt of the run, that still run."""
    recorded = [json.loads(path.read_text("utf-8")) for path in (run_folder / ATTEMPTS).glob("*/*.pid")]
    processes = [ProcessIdentity(**facts[role]) for facts in recorded for role in ("process", "guard")]
    return sorted(process.pid for process in processes if process.is_alive())


def _numbers(run_folder: Path) -> Iterator[int]:
    return (int(path.name) for path in (run_folder / ATTEMPTS).glob("[0-9]*") if path.name.isdigit())

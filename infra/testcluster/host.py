"""One host: namespaces held by its first process, a disk, and an ``etc`` folder with its settings."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.node import processes
from infra.node.processes import ProcessIdentity
from infra.testcluster import host_files, namespaces, registry
from t5train.errors import TestClusterError


@dataclass(frozen=True)
class Process:
    """A process of a host, with its pid on the machine."""

    pid: int
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    """A host, identified by its name and that of its cluster."""

    name: str
    cluster: str

    @property
    def folder(self) -> Path:
        """The machine's folder for the host's own files."""
        return registry.folder(self.cluster) / self.name

    @property
    def disk(self) -> Path:
        """The path on the machine of the host's own part of its root folder: ``disk / "tmp"`` is its /tmp."""
        return self.folder / "disk"

    @property
    def etc(self) -> Path:
        """The folder with the host's name, keys and settings, which survives a new disk."""
        return self.folder / "etc"

    @property
    def _record(self) -> Path:
        return self.folder / "init.json"

    @property
    def _console(self) -> Path:
        return self.folder / "console"

    @property
    def init(self) -> ProcessIdentity | None:
        """The host's first process; None while the host is off."""
        try:
            found = ProcessIdentity(**json.loads(self._record.read_text("utf-8")))
        except FileNotFoundError:
            return None
        return found if found.is_alive() else None

    def make(self, user_key: Path, hosts: list[str]) -> None:
        """Create folders, keys and a disk if they do not exist; write the names of all hosts and a new boot id."""
        self.etc.mkdir(parents=True, exist_ok=True)
        if not self.disk.exists():
            host_files.make_disk(self.disk)
        host_files.write_etc(self.etc, self.name, hosts)
        host_files.write_server(self.etc, user_key)

    def remove_disk(self) -> None:
        """Remove the host's disk; the next boot creates a new, empty one."""
        shutil.rmtree(self.disk)

    def switch_on(self, share: str | None) -> subprocess.Popen[bytes]:
        """Start the first process. Call ``await_ready`` next."""
        mounts = [asdict(mount) for mount in host_files.prepare(self.disk, self.etc, share)]
        wanted = {"host": self.name, "record": str(self._record), "home": host_files.HOME, "mounts": mounts}
        argv = [sys.executable, "-m", "infra.testcluster.host_init"]
        return namespaces.start(self.cluster, namespaces.HOST, argv, json.dumps(wanted).encode(), self._console)

    def await_ready(self, process: subprocess.Popen[bytes]) -> ProcessIdentity:
        """Wait until the host's files are mounted; returns its first process. Raises TestClusterError on failure."""
        namespaces.await_ready(process, self._console)
        return self.running()

    def running(self) -> ProcessIdentity:
        """The host's first process. Raises TestClusterError while the host is off."""
        if (init := self.init) is None:
            raise TestClusterError(f"{self.name} is switched off: boot it first")
        return init

    def command(self, argv: list[str]) -> list[str]:
        """The command that runs ``argv`` on the host, in the home folder.

        Raises TestClusterError while the host is off. Ctrl-C ends the program as on a console, even if a background job
        of a shell starts it, in which programs ignore Ctrl-C by default.
        """
        return [
            "nsenter",
            f"--target={self.running().pid}",
            "--mount",
            "--uts",
            "--net",
            "--pid",
            "--ipc",
            "--wd",
            "--",
            *("env", "--default-signal=INT,QUIT"),
            *argv,
        ]

    def processes(self) -> list[Process]:
        """The processes on the host, except its first one; empty while it is off."""
        init = self.init
        if init is None:
            return []
        namespace = Path(f"/proc/{init.pid}/ns/pid").readlink()
        found = (Process(pid, _argv(pid)) for pid in sorted(processes.find(_in_namespace(namespace)) - {init.pid}))
        return [process for process in found if process.argv]


def _in_namespace(namespace: Path) -> processes.Belongs:
    def belongs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/ns/pid").readlink() == namespace
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False  # it has just ended, or runs outside the container that this machine is

    return belongs


def _argv(pid: int) -> tuple[str, ...]:
    """The arguments of a process; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(os.fsdecode(argument) for argument in text.split(b"\0")[:-1])

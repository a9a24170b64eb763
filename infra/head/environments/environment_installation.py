"""Installs a wheelhouse on hosts, all at once: ``t5-pretrain preflight --install``.

A host needs only sshd and Python: this code is shipped to it. ``infra.node.environment_installer`` then requests the
wheels that the host lacks, verifies every digest, and runs pip.
"""

import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.head.environments.wheelhouse import MANIFEST, Wheelhouse, this_python
from infra.head.hosts.code_shipping import ship
from infra.head.hosts.nodes import Connections, Nodes, ask, conversation, everywhere
from infra.head.hosts.ssh import Transport
from infra.node.attempts.log_tail import printable
from infra.node.channel import BrokenOff, Channel
from infra.node.code_bundle import own_bundle
from infra.node.environment_installer import Install, Installed, Working
from infra.node.storage.file_channel import BytesArrived, FileRange, FromReceiver, Wanted, answer, files_in
from t5train.errors import HostError, InputError, ProtocolMismatch, RemoteFailed, SpecError
from t5train.progress import Progress

_PROBE_SECONDS = 60.0
_DEADLINE_SECONDS = 2 * 3600.0
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_@+=,./-]+", re.ASCII)
# Answers a FindPython with the first Python that suits. Each Python reads what it must be from the message.
_FIND_PYTHON = """
read -r message
for python in "$@"; do
  "$python" -I -c '
import ensurepip, json, sys, venv
if "%d.%d" % sys.version_info[:2] != json.loads(sys.argv[1])["FindPython"]["version"]:
  sys.exit(1)
print(json.dumps({"FoundPython": {"path": sys.executable}}))
' "$message" </dev/null 2>/dev/null && exit
done
echo '{"FoundPython": {"path": null}}'
"""


@dataclass(frozen=True)
class FindPython:
    """Find a Python of this minor version that can make environments."""

    version: str


@dataclass(frozen=True)
class FoundPython:
    """The path of that Python; None if there is none."""

    path: str | None


def require_environment_path(into: Path) -> Path:
    """Return the path of the environment on hosts. Raises SpecError unless it is absolute, and runs can use it."""
    if not _PLAIN_PATH.fullmatch(str(into)) or ".." in into.parts:
        raise SpecError(
            f"--into is {str(into)!r}: it must be an absolute path of letters, digits and _@+=,./- only, because "
            "DeepSpeed's launcher passes Python's path to shells"
        )
    return into


def python_of(into: Path) -> str:
    """The Python of an environment."""
    return str(into / "bin" / "python")


def install_on(
    transport: Transport, hosts: Sequence[str], folder: Path, wheelhouse: Wheelhouse, into: Path, progress: Progress
) -> Mapping[str, Installed | HostError]:
    """Install the wheelhouse in ``folder`` into the environment ``into`` on all hosts; returns the outcome of each.

    If the caller is interrupted, all hosts stop. What they have received stays, and is not sent again.
    """
    _require_sizes(folder, wheelhouse)
    pythons, errors = _pythons(transport, hosts, wheelhouse.python)
    for python in set(pythons.values()):
        errors |= ship(transport, [host for host, its in pythons.items() if its == python], python)
    able = {host: python for host, python in pythons.items() if host not in errors}
    installation = _Installation(
        transport, folder, wheelhouse, into, able, _Arrivals(progress, len(able) * wheelhouse.size_bytes)
    )
    outcomes = errors | everywhere(able, installation.on)
    return {host: outcomes[host] for host in hosts}


def _require_sizes(folder: Path, wheelhouse: Wheelhouse) -> None:
    """Raise InputError if a wheel is missing or has another size. Its digest is verified on each host."""
    for wheel in wheelhouse.wheels:
        path = folder / wheel.name
        if not path.is_file() or path.stat().st_size != wheel.size:
            raise InputError(
                f"{path} is missing, or not the file that {folder / MANIFEST} lists. Repeat `t5-pretrain wheelhouse "
                f"{folder}`"
            )


def _pythons(
    transport: Transport, hosts: Sequence[str], version: str
) -> tuple[dict[str, str], dict[str, Installed | HostError]]:
    """Return the path of a suitable Python on each host that has one, and the errors of the others."""
    own = [str(Path(sys.executable).resolve())] if version == this_python() else []
    command = ["sh", "-c", _FIND_PYTHON, "sh", *own, f"python{version}", "python3"]
    pythons, errors = dict[str, str](), dict[str, Installed | HostError]()
    questions = dict.fromkeys(hosts, FindPython(version))
    for host, found in ask(transport, command, questions, FoundPython, _PROBE_SECONDS).items():
        if isinstance(found, HostError):
            errors[host] = found
        elif found.path is not None:
            pythons[host] = found.path
        else:
            errors[host] = RemoteFailed(
                f"{host}: there is no Python {version} with its venv module on the PATH of ssh commands. Install both "
                f"there (Debian and Ubuntu: the packages python{version} and python{version}-venv)",
                [host],
            )
    return pythons, errors


@dataclass
class _Arrivals:
    """Counts the bytes that hosts have. Threads of hosts report to it."""

    progress: Progress
    total_bytes: int
    done_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, host: str, message: BytesArrived | Working) -> None:
        with self.lock:
            doing = f", {host}: {printable(message.what)[:120]}" if isinstance(message, Working) else ""
            if isinstance(message, BytesArrived):
                self.done_bytes += message.copied + message.already_there
            self.progress(f"MB of wheels on hosts{doing}", self.done_bytes // 10**6, self.total_bytes // 10**6)


@dataclass
class _Installation:
    transport: Transport
    folder: Path
    wheelhouse: Wheelhouse
    into: Path
    pythons: Mapping[str, str]
    """The Python of each host."""
    arrivals: _Arrivals

    def on(self, host: str, connections: Connections) -> Installed:
        """Install on one host. Raises HostError."""
        nodes = Nodes(self.transport, (host,), code=own_bundle().digest, python=self.pythons[host])
        wheels = self.wheelhouse.wheels
        request = Install(
            self.into,
            self.wheelhouse.digest,
            tuple(Wanted.of(wheel.name, wheel) for wheel in wheels),
            sum(wheel.unpacked_bytes for wheel in wheels),
        )
        with conversation(nodes, host, request, connections, _DEADLINE_SECONDS) as node:
            return self._serve(node, host)

    def _serve(self, node: Channel, host: str) -> Installed:
        while (message := node.receive(FromReceiver)) is not None:
            match message:
                case FileRange():
                    self._send(node, host, message)
                case BytesArrived() | Working():
                    self.arrivals.report(host, message)
                case Installed():
                    return message
        raise BrokenOff("the installation there ended early")

    def _send(self, node: Channel, host: str, request: FileRange) -> None:
        """Send bytes of a listed wheel. Raises ProtocolMismatch for any other file."""
        if request.name not in {wheel.name for wheel in self.wheelhouse.wheels}:
            raise ProtocolMismatch(
                f"{host} requests {request.name[:80]!r}, which is not in the wheelhouse. Check what runs there", [host]
            )
        answer(node, request, files_in(self.folder))

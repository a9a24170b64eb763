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
from infra.head.hosts.nodes import Connections, Nodes, conversation, everywhere
from infra.head.hosts.ssh import Transport
from infra.node.attempts.log_tail import printable
from infra.node.channel import BrokenOff, Channel
from infra.node.code_bundle import own_bundle
from infra.node.environment_installer import Install, Installed, Working
from infra.node.messages import Failure, encode
from infra.node.storage.file_channel import BytesArrived, FileRange, FromReceiver, Wanted, answer, files_in
from t5train.errors import HostError, HostMisconfigured, InputError, ProtocolMismatch, SpecError
from t5train.progress import Progress

_DEADLINE_SECONDS = 2 * 3600.0
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_@+=,./-]+", re.ASCII)
# Becomes the first Python that suits; if there is none, reports that as the error.
_FIND_PYTHON = """
version=$1 own=$2 error=$3
shift 3
for python in "$own" "python$version" python3; do
  "$python" -I -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' \\
    "$version" </dev/null >/dev/null 2>&1 && exec "$python" "$@"
done
printf '%s\\n' "$error" >&2
exit 1
"""


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
    python = _python(wheelhouse.python)
    errors = ship(transport, hosts, python)
    able = [host for host in hosts if host not in errors]
    nodes = Nodes(transport, tuple(able), code=own_bundle().digest, python=python)
    installation = _Installation(
        nodes, folder, wheelhouse, into, _Arrivals(progress, len(able) * wheelhouse.size_bytes)
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


def _python(version: str) -> list[str]:
    """Return the command of a Python of this version, with which hosts can make environments."""
    missing = Failure(
        HostMisconfigured.__name__,
        f"there is no Python {version} with its venv module on the PATH of ssh commands. Install both there (Debian "
        f"and Ubuntu: the packages python{version} and python{version}-venv)",
    )
    own = str(Path(sys.executable).resolve()) if version == this_python() else ""
    return ["sh", "-c", _FIND_PYTHON, "sh", version, own, encode(missing).decode("ascii")]


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
    nodes: Nodes
    folder: Path
    wheelhouse: Wheelhouse
    into: Path
    arrivals: _Arrivals

    def on(self, host: str, connections: Connections) -> Installed:
        """Install on one host. Raises HostError."""
        wheels = self.wheelhouse.wheels
        request = Install(
            self.into,
            self.wheelhouse.digest,
            tuple(Wanted.of(wheel.name, wheel) for wheel in wheels),
            sum(wheel.unpacked_bytes for wheel in wheels),
        )
        with conversation(self.nodes, host, request, connections, _DEADLINE_SECONDS) as node:
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

"""Installs a wheelhouse on hosts, all at once: ``t5-pretrain preflight --install``.

Each host gets the program of infra.node.environments, a job, and the bytes of those wheels that it lacks. The
program verifies every digest itself, so a wheel that was changed on the way, or on this machine's disk, is refused.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from infra.head.environments.pip_commands import this_python
from infra.head.environments.wheelhouse import MANIFEST, Wheelhouse
from infra.head.hosts import ssh
from infra.head.hosts.host_answers import mismatch
from infra.head.hosts.ssh import Transport
from infra.node.attempts.log_tail import printable
from infra.node.environments import environment_folder, environment_installer, installation_messages, wheel_store
from infra.node.environments.installation_messages import Ended, Job, Refused, Reply, Wanted, Working
from infra.node.messages import decode, encode
from infra.node.node_folders import node_path
from t5train.errors import (
    BadMessage,
    HostError,
    HostTimeout,
    HostUnreachable,
    InputError,
    ProtocolMismatch,
    RemoteFailed,
    SpecError,
)
from t5train.progress import Progress

_FAN_OUT = 64
_DEADLINE_SECONDS = 2 * 3600.0
_REPORT_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_NO_PYTHON = 97
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_@+=,./-]+", re.ASCII)
_IMPORTED = (installation_messages, wheel_store, environment_folder)
"""Modules of the program, each after those that it imports."""
# Prefers a Python that has venv; without one, the program says what is missing. All values are positional arguments.
_FIND_PYTHON = """
version=$1 program=$2 fallback=
shift 2
for python in "$@"; do
  if "$python" -I -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version"; then
    "$python" -I -c 'import ensurepip, venv' && exec "$python" -I -S -X utf8 -c "$program" <&3 2>&4
    fallback=${fallback:-$python}
  fi
done 3<&0 4>&2 </dev/null 2>/dev/null
test -n "$fallback" && exec "$fallback" -I -S -X utf8 -c "$program"
exit 97
"""


@dataclass(frozen=True)
class Installed:
    """The environment is on the host; ``is_new`` if it was not before."""

    is_new: bool


@dataclass
class _Tally:
    """What is sent and done on all hosts. Threads of hosts write it, and the caller reports it."""

    to_send: int = 0
    sent: int = 0
    working: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, to_send: int = 0, sent: int = 0) -> None:
        with self.lock:
            self.to_send += to_send
            self.sent += sent

    def report(self, progress: Progress) -> None:
        with self.lock:
            doing = dict(self.working)
        if doing:
            host, what = next(iter(doing.items()))
            more = f" and {len(doing) - 1} more" if len(doing) > 1 else ""
            progress(f"MB sent to hosts, {host}{more}: {what}", self.sent // 10**6, self.to_send // 10**6)
        elif self.to_send:
            progress("MB sent to hosts", self.sent // 10**6, self.to_send // 10**6)


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
    tally, running = _Tally(), list[subprocess.Popen[bytes]]()
    threads = ThreadPoolExecutor(_FAN_OUT, thread_name_prefix="install")

    def outcome_of(host: str) -> Installed | HostError:
        try:
            return _install(transport, host, folder, wheelhouse, into, tally, running)
        except HostError as error:
            return error
        finally:
            tally.working.pop(host, None)

    try:
        asked = {host: threads.submit(outcome_of, host) for host in hosts}
        while wait(asked.values(), timeout=_REPORT_SECONDS).not_done:
            tally.report(progress)
        return {host: future.result() for host, future in asked.items()}
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in running:
            ssh.kill(process)
        threads.shutdown()


def _require_sizes(folder: Path, wheelhouse: Wheelhouse) -> None:
    """Raise InputError if a wheel is missing or has another size. Its digest is verified on each host."""
    for wheel in wheelhouse.wheels:
        path = folder / wheel.name
        if not path.is_file() or path.stat().st_size != wheel.size:
            raise _differs(path, folder)


def _differs(path: Path, folder: Path) -> InputError:
    return InputError(
        f"{path} is missing, or not the file that {folder / MANIFEST} lists. Repeat `t5-pretrain wheelhouse {folder}`"
    )


def _program() -> str:
    """The text of the program: modules that it imports, as the host has none of them, and then itself."""
    lines = ["import sys, types"]
    for module in _IMPORTED:
        text = Path(str(module.__file__)).read_text("utf-8")
        lines.append(f"sys.modules[{module.__name__!r}] = module = types.ModuleType({module.__name__!r})")
        lines.append(f"exec(compile({text!r}, {module.__name__!r}, 'exec'), module.__dict__)")
    return "\n".join([*lines, Path(environment_installer.__file__).read_text("utf-8")])


def _command(wheelhouse: Wheelhouse) -> list[str]:
    own = [str(Path(sys.executable).resolve())] if wheelhouse.python == this_python() else []
    candidates = [*own, f"python{wheelhouse.python}", "python3"]
    return ["sh", "-c", _FIND_PYTHON, "sh", wheelhouse.python, _program(), *candidates]


def _install(
    transport: Transport,
    host: str,
    folder: Path,
    wheelhouse: Wheelhouse,
    into: Path,
    tally: _Tally,
    running: list[subprocess.Popen[bytes]],
) -> Installed | HostError:
    argv = _command(wheelhouse)
    process = ssh.connect(transport, host, argv)
    running.append(process)
    stderr: list[bytes] = []
    collector = threading.Thread(target=lambda: stderr.extend(process.stderr or ()), daemon=True)
    collector.start()
    deadline = threading.Timer(_DEADLINE_SECONDS, ssh.kill, [process])
    deadline.daemon = True
    deadline.start()
    try:
        return _converse(process, host, folder, wheelhouse, into, tally)
    except BadMessage as error:
        return mismatch(host, error)
    except (BrokenPipeError, EOFError):
        code = process.wait()
        collector.join()
        if not deadline.is_alive():
            return HostTimeout(f"{host}: the installation took more than {_DEADLINE_SECONDS / 3600:g} h", [host])
        return _failure(host, argv, code, b"".join(stderr), wheelhouse.python)
    finally:
        deadline.cancel()
        ssh.kill(process)
        process.wait()
        collector.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)


def _close(pipe: IO[bytes] | None) -> None:
    with suppress(BrokenPipeError):  # what was not flushed is of no use any more
        if pipe is not None:
            pipe.close()


def _failure(host: str, argv: Sequence[str], code: int, stderr: bytes, python: str) -> HostError:
    if code == _NO_PYTHON:
        return RemoteFailed(
            f"{host}: there is no Python {python} on the PATH of ssh commands. Install it there with its venv module "
            f"(Debian and Ubuntu: the packages python{python} and python{python}-venv)",
            [host],
        )
    if code == 0:
        return HostUnreachable(f"{host}: the connection ended early. Repeat the command: it continues", [host])
    return ssh.failure_of(host, argv, code, stderr)


def _converse(
    process: subprocess.Popen[bytes], host: str, folder: Path, wheelhouse: Wheelhouse, into: Path, tally: _Tally
) -> Installed | HostError:
    """Send the job and what the host wants, and return the outcome. Raises EOFError if the host ends before."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    job = Job(
        os.getuid(),
        str(node_path("wheels")),
        str(into),
        wheelhouse.python,
        wheelhouse.digest,
        sum(wheel.unpacked_bytes for wheel in wheelhouse.wheels),
        [(wheel.name, wheel.size, wheel.sha256) for wheel in wheelhouse.wheels],
    )
    process.stdin.write(encode(job))
    process.stdin.flush()
    for reply in _replies(process.stdout):
        if isinstance(reply, Wanted):
            with suppress(BrokenPipeError):  # the host has ended; what it said comes next
                _send(process.stdin, host, folder, wheelhouse, reply.starts, tally)
        elif isinstance(reply, Working):
            tally.working[host] = printable(reply.what)[:120]
        elif isinstance(reply, Refused):
            return RemoteFailed(f"{host}: {printable(reply.reason)}", [host])
        elif isinstance(reply, Ended):
            return Installed(reply.is_new)
    raise EOFError


def _replies(stdout: IO[bytes]) -> Iterator[Reply]:
    while line := stdout.readline(_MAX_LINE_BYTES):
        yield decode(line, Reply)


def _send(
    stdin: IO[bytes], host: str, folder: Path, wheelhouse: Wheelhouse, starts: Mapping[str, int], tally: _Tally
) -> None:
    """Send what is missing of these wheels, in the order of the list. Raises HostError for what is not listed."""
    sizes = {wheel.name: wheel.size for wheel in wheelhouse.wheels}
    for name, start in starts.items():
        if name not in sizes or not 0 <= start < sizes[name]:
            raise ProtocolMismatch(
                f"{host} asks for byte {start} of {name[:80]!r}, which the wheelhouse has not. Check what runs there",
                [host],
            )
    tally.add(to_send=sum(sizes[name] - start for name, start in starts.items()))
    for name in (wheel.name for wheel in wheelhouse.wheels if wheel.name in starts):
        with open(folder / name, "rb") as file:
            file.seek(starts[name])
            left = sizes[name] - starts[name]
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise _differs(folder / name, folder)
                stdin.write(chunk)
                left -= len(chunk)
                tally.add(sent=len(chunk))
        stdin.flush()

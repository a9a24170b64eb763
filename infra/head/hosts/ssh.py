"""Runs commands on other machines with the ssh configuration of a run. No other module does so.

A command is an argv list, quoted for the shell that sshd passes it to. Data is sent on stdin, never in an argument. No
command outlasts its deadline: the local process is killed, and ``timeout`` ends the remote one, even if the network is
down. pdsh uses the same configuration.
"""

import math
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, Self

from infra.head.hosts.ssh_errors import SSH_FAILED, failure_of_ssh, last_lines, was_dropped
from t5train.errors import HostError, HostTimeout, HostUnreachable, RemoteFailed, SpecError
from t5train.files.atomic import write_text
from t5train.spec import ClusterSpec

CONNECT_SECONDS = 5
_CHECKS = 6
_STRICT = f"""\
BatchMode yes
StrictHostKeyChecking yes
UpdateHostKeys no
ConnectTimeout {CONNECT_SECONDS}
ConnectionAttempts 1
TCPKeepAlive yes
ControlMaster no
ControlPath none
ForwardAgent no
ForwardX11 no
ClearAllForwardings yes
ExitOnForwardFailure no
Tunnel no
PermitLocalCommand no
RemoteCommand none
RequestTTY no
EscapeChar none
VisualHostKey no
LogLevel INFO
AddKeysToAgent no
NoHostAuthenticationForLocalhost no
SetEnv LC_T5_PRETRAIN=1
"""
# Settings that older versions of ssh reject, and therefore also in the user's configuration. Those of 8.7 would keep
# the request from the command, or the command from being run.
_NEWER = ("StdinNull no", "SessionType default", "ForkAfterAuthentication no", "LogVerbose none", "ChannelTimeout none")
# Included last, because ssh uses the first value that it finds for a setting: also the first SetEnv, which replaces
# those of the user. With "SendEnv -*", no variables are sent.
_THE_USERS_OWN = """\
Include ~/.ssh/config
Include /etc/ssh/ssh_config
Host *
SendEnv -*
"""


def ssh_config(cluster: ClusterSpec) -> str:
    """Return an ssh configuration: required settings first, then the user's and the system's configuration.

    If a host does not respond, ssh closes the connection after about ``cluster.lease_seconds``, when the ranks give up
    too. Raises SpecError if ``cluster.known_hosts`` is not a file that can be named in ssh's configuration.
    """
    interval = max(1, math.floor(cluster.lease_seconds / _CHECKS))
    checks = math.ceil(cluster.lease_seconds / interval)
    lines = [f"ServerAliveInterval {interval}", f"ServerAliveCountMax {checks}"]
    if cluster.ssh_user is not None:
        lines.append(f"User {cluster.ssh_user}")
    if cluster.ssh_port is not None:
        lines.append(f"Port {cluster.ssh_port}")
    if cluster.known_hosts is not None:
        _require_known_hosts(cluster.known_hosts)
        lines += [f'UserKnownHostsFile "{cluster.known_hosts}"', "GlobalKnownHostsFile none"]
    return _STRICT + "".join(f"{line}\n" for line in [*_known(shutil.which("ssh")), *lines]) + _THE_USERS_OWN


@cache
def _known(ssh: str | None) -> list[str]:
    """The settings of ``_NEWER`` that this ssh does not reject as unknown; none without ssh, which ``run`` reports."""

    def is_known(setting: str) -> bool:
        command = [str(ssh), "-G", "-F", os.devnull, "-o", setting, "host"]
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return b"bad configuration option" not in tried.stderr.lower()

    return [setting for setting in _NEWER if is_known(setting)] if ssh else []


def _require_known_hosts(path: Path) -> None:
    if not path.is_file():
        raise SpecError(
            f"cluster.known_hosts is {path}, which does not exist. Create it with ssh-keyscan, and verify its keys"
        )
    if not re.fullmatch(r"[\w@+=:,./ -]+", str(path)):
        raise SpecError(
            f"cluster.known_hosts is {str(path)!r}, which has characters that ssh would interpret. Rename the file"
        )


SSH_CONFIG = "ssh_config"
_FAN_OUT = 64
_TRIES = 5
_RETRY_SECONDS = (0.2, 1.0)
"""Between tries; drawn at random, so that connections that were dropped together do not come together again."""
_KILL_AFTER_SECONDS = 2
_NOT_FOUND = 127
_NOT_INSTALLED = re.compile(rb"No module named '?(infra|t5train)\b")


class Transport(Protocol):
    """A way to run commands on other machines."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the local command that runs ``argv`` on ``host``, connected to its stdin, stdout and stderr."""
        ...


@dataclass(frozen=True)
class Ssh:
    """OpenSSH with one configuration file."""

    config: Path

    @classmethod
    def configured(cls, cluster: ClusterSpec, folder: Path) -> Self:
        """Write the configuration for these settings into a folder, and use it."""
        write_text(folder / SSH_CONFIG, ssh_config(cluster))
        return cls(folder / SSH_CONFIG)

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """See Transport. Without ``--``, ssh would look for options in what follows."""
        return ["ssh", "-F", str(self.config), "--", host, quoted(argv)]


@dataclass(frozen=True)
class Output:
    """The output of a command that succeeded on a host."""

    stdout: bytes
    stderr: bytes


Reply = Output | HostError


def quoted(argv: Sequence[str]) -> str:
    """Return a line that every POSIX shell parses as exactly ``argv``. Each argument is quoted, including the first."""
    return " ".join("'" + argument.replace("'", "'\"'\"'") + "'" for argument in argv)


def run_everywhere(
    transport: Transport,
    hosts: Iterable[str],
    argv: Sequence[str],
    *,
    stdin_of: Callable[[str], bytes] = lambda _: b"",
    deadline_seconds: float,
    on_reply: Callable[[str, Reply], None] = lambda _host, _reply: None,
) -> dict[str, Reply]:
    """Run a command on all hosts at once (64 at a time); returns outputs and errors in the order of the hosts.

    ``on_reply`` is called in the caller's thread as they arrive. If the caller is interrupted, commands that are still
    running are ended.
    """
    running: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def reply_of(host: str) -> Reply:
        reply = one_reply(host)
        for _ in range(_TRIES - 1):
            if (
                not isinstance(reply, HostError)
                or not was_dropped(reply)
                or ended.wait(random.uniform(*_RETRY_SECONDS))
            ):
                break
            reply = one_reply(host)
        return reply

    limit = ["timeout", "-k", str(_KILL_AFTER_SECONDS), f"{deadline_seconds:.3f}"]

    def one_reply(host: str) -> Reply:
        try:
            process = connect(transport, host, [*limit, *argv])
            running.append(process)
            return _output(process, host, argv, stdin_of(host), deadline_seconds)
        except HostError as error:
            return error

    names, replies = list(hosts), dict[str, Reply]()
    threads = ThreadPoolExecutor(_FAN_OUT, thread_name_prefix="remote")
    try:
        asked = {threads.submit(reply_of, name): name for name in names}
        for future in as_completed(asked):
            replies[asked[future]] = future.result()
            on_reply(asked[future], future.result())
    finally:
        ended.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for process in running:
            kill(process)
        threads.shutdown()
    return {name: replies[name] for name in names}


def connect(transport: Transport, host: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command on a host. The caller uses its stdin, stdout and stderr, and must end it.

    The local process has its own process group, so Ctrl-C in a terminal does not reach it. Raises HostUnreachable if
    ssh cannot be started.
    """
    command = transport.command(host, argv)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C"},  # ssh's messages are parsed
        )
    except FileNotFoundError as error:
        raise HostUnreachable(
            f"{host}: {command[0]} is not installed on this machine. Install openssh-client", [host]
        ) from error
    except OSError as error:  # no descriptors, processes or memory left: not the host's fault, so none is named
        raise HostUnreachable(
            f"{host}: {command[0]} cannot be started on this machine: {error.strerror}. "
            "If a limit of this machine was reached, raise it (`ulimit -a` lists them)"
        ) from error


def _output(
    process: subprocess.Popen[bytes], host: str, argv: Sequence[str], stdin: bytes, deadline_seconds: float
) -> Output:
    with process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=deadline_seconds)
        except subprocess.TimeoutExpired as error:
            raise HostTimeout(
                f"{host}: {_short(argv)} timed out after {deadline_seconds:g} s. Check whether the host is overloaded "
                f"or one of its disks hangs. The command's last output: {last_lines(error.stderr or b'')}",
                [host],
            ) from None
        finally:
            kill(process)
    if process.returncode:
        raise failure_of(host, argv, process.returncode, stderr)
    return Output(stdout, stderr)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a local process that is still running, with its children: ssh's ProxyCommand would keep its pipes open."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def failure_of(host: str, argv: Sequence[str], returncode: int, stderr: bytes) -> HostError:
    """Return the error for a command that ended with this exit code and wrote ``stderr``."""
    if returncode == SSH_FAILED:
        return failure_of_ssh(host, stderr)
    return RemoteFailed(
        f"{host}: {_short(argv)} ended with exit code {returncode}{_remedy(returncode, stderr)}. "
        f"The command's last output: {last_lines(stderr)}",
        [host],
        stderr,
    )


def _remedy(returncode: int, stderr: bytes) -> str:
    if returncode == _NOT_FOUND:
        return ". Install Python and this package there, at the same paths as here"
    if _NOT_INSTALLED.search(stderr):
        return ". Install this package there, at the same path as here, or have its code sent with --ship-code"
    return ""


def _short(argv: Sequence[str]) -> str:
    line = " ".join("..." if "\n" in word else word for word in argv)  # the text of a program does not help
    return repr(line if len(line) <= 120 else f"{line[:120]}...")

"""Starts commands on other machines with the ssh configuration of a run, and turns what a failing ssh says into errors.

A command is an argv list, quoted for the shell that sshd passes it to. pdsh uses the same configuration. Not here: what
is sent to commands and received from them (``infra.head.hosts.nodes``).
"""

import base64
import binascii
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, Self

from infra.node.attempts.log_tail import printable
from t5train.errors import (
    HostError,
    HostKeyMismatch,
    HostMisconfigured,
    HostTimeout,
    HostUnreachable,
    RemoteFailed,
    SpecError,
)
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
    """The settings of ``_NEWER`` that this ssh does not reject as unknown; none without ssh, as ``connect`` says."""

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


def quoted(argv: Sequence[str]) -> str:
    """Return a line that every POSIX shell parses as exactly ``argv``. Each argument is quoted, including the first."""
    return " ".join("'" + argument.replace("'", "'\"'\"'") + "'" for argument in argv)


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


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a local process that is still running, with its children: ssh's ProxyCommand would keep its pipes open."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def timeout_of(host: str, argv: Sequence[str], deadline_seconds: float, stderr: bytes) -> HostTimeout:
    """Return the error for a command that was killed at its deadline and had written ``stderr``."""
    return HostTimeout(
        f"{host}: {_short(argv)} timed out after {deadline_seconds:g} s. Check whether the host is overloaded or one "
        f"of its disks hangs. The command's last output: {last_lines(stderr)}",
        [host],
    )


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


SSH_FAILED = 255
"""Exit code if ssh itself fails. Any other is the exit code of the remote command."""
_NOISE = re.compile(r"[@*\s]*$")

_DROPPED = "(kex|ssh)_exchange_identification|Exceeded MaxStartups"
_TOO_MANY = (
    "Probably too many connections arrived at once: raise MaxStartups in /etc/ssh/sshd_config there (such as "
    "MaxStartups 100:30:200), or on the jump host if ssh uses one, and reload sshd. If not, check whether the host "
    "blocks this machine (fail2ban, PerSourcePenalties, hosts.deny), and whether cluster.ssh_port is that of sshd"
)

_Kind = type[HostKeyMismatch] | type[HostUnreachable]
_FAILURES: tuple[tuple[str, _Kind, str], ...] = (
    (
        r"Host key for (?P<name>\S+) has changed",
        HostKeyMismatch,
        "its host key has changed. Check that its name still leads to this host. If the host was reinstalled, "
        "remove the old key with `ssh-keygen -R '{name}'` (add -f FILE if cluster.known_hosts is set) and add the new "
        "one; otherwise the connection may be intercepted",
    ),
    (
        r"No \S+ host key is known for (?P<name>\S+)|Host key verification failed",
        HostKeyMismatch,
        "its host key is unknown. Check that the name leads to this host and verify the fingerprint, then add the key "
        "with `ssh-keyscan {scan} >> ~/.ssh/known_hosts` (or to cluster.known_hosts, which is also read if ssh's "
        "configuration names another UserKnownHostsFile)",
    ),
    (
        r"stdio forwarding failed|"
        r"(?m:^\S*sh:.*(not found|No such file|[Pp]ermission denied))[\s\S]*(kex_|banner )exchange",
        HostMisconfigured,
        "the jump host or proxy command of ssh's configuration does not lead to it. Correct ProxyJump or ProxyCommand",
    ),
    (
        "Unable to negotiate|(?m:^bind .*: )|KnownHostsCommand",
        HostMisconfigured,
        "ssh's configuration on this machine does not suit this host. Correct the setting that ssh's message is about "
        "(Ciphers, HostKeyAlgorithms, BindAddress, KnownHostsCommand, ...) in ~/.ssh/config or /etc/ssh/ssh_config",
    ),
    (
        "Too many authentication failures",
        HostMisconfigured,
        "it was offered too many SSH keys before the right one. Name the key in ~/.ssh/config (IdentityFile, and "
        "IdentitiesOnly yes), or remove others from the agent (`ssh-add -d`)",
    ),
    (
        "Permission denied",
        HostMisconfigured,
        "it rejects this user's SSH keys. Run `ssh-copy-id {host}`, or set cluster.ssh_user. A key with a passphrase "
        "needs an agent: run `ssh-add`",
    ),
    (
        "Could not resolve hostname",
        HostMisconfigured,
        "its name does not resolve. Correct the hostfile, or add the name to /etc/hosts or ssh's configuration",
    ),
    (
        "Connection refused",
        HostUnreachable,
        "connection refused. Start sshd there, or set cluster.ssh_port",
    ),
    (
        "timed out during banner exchange",
        HostUnreachable,
        "its port accepted the connection, but sshd did not answer in time. Check that the host is not overloaded, and "
        "that a jump host or proxy command of ssh's configuration answers",
    ),
    (
        "timed out|No route to host|Network is unreachable|not responding|Host is down",
        HostUnreachable,
        "no answer. Check that the host is running and reachable over the network",
    ),
    (
        _DROPPED,
        HostUnreachable,
        f"sshd there closed the connection before the login. {_TOO_MANY}",
    ),
    (
        "Bad configuration option|terminating, .* bad configuration",
        HostMisconfigured,
        "ssh cannot parse its configuration on this machine. Fix ~/.ssh/config or /etc/ssh/ssh_config",
    ),
)
_BROKEN = (
    "the connection was lost, or the remote command was killed by a signal. Check that the host is running, and "
    "look at its sshd log"
)


def failure_of_ssh(host: str, stderr: bytes) -> HostError:
    """Return the error for an ssh process that ended with exit code 255 and wrote ``stderr``."""
    text = stderr.decode("utf-8", "replace")
    if other := _host_with_this_key(text):
        return HostKeyMismatch(
            f"{host}: the machine that answers has the host key of {other}, so the name {host} leads to another host. "
            "Correct its address in the hostfile, in DNS or in ssh's configuration; the known keys are right. "
            f"ssh said: {last_lines(stderr)}",
            [host],
        )
    for pattern, kind, remedy in _FAILURES:
        if match := re.search(pattern, text):
            # As in known_hosts, with HostName and HostKeyAlias applied: [host]:port if the port is not 22.
            name = match.groupdict().get("name") or host
            at = re.fullmatch(r"\[(.+)\]:(\d+)", name)
            scan = f"-p {at[2]} {at[1]}" if at else name
            return kind(
                f"{host}: {remedy.format(host=host, name=name, scan=scan)}. ssh said: {last_lines(stderr)}", [host]
            )
    return HostUnreachable(f"{host}: {_BROKEN}. ssh said: {last_lines(stderr)}", [host])


def _host_with_this_key(text: str) -> str:
    """The known host whose key was sent by a machine that ssh refused; empty if no host is known by that key."""
    sent = re.search(r"key sent by the remote host is\s+SHA256:(\S+?)\.?\s", text)
    file = re.search(r"^Offending .*key in (.+):\d+\s*$", text, re.MULTILINE)
    if not sent or not file:
        return ""
    try:
        lines = Path(file[1]).read_text("utf-8", errors="replace").splitlines()
    except OSError:  # ssh has already reported the mismatch, which remains the error
        return ""
    for line in lines:
        words = line.split()
        if len(words) >= 3 and not words[0].startswith(("#", "@")) and _fingerprint(words[2]) == sent[1]:
            return "another known host" if words[0].startswith("|") else printable(words[0])
    return ""


def _fingerprint(key: str) -> str:
    """The SHA-256 of a public key as ssh prints it; empty if the key is not base64."""
    try:
        digest = hashlib.sha256(base64.b64decode(key, validate=True)).digest()
    except binascii.Error:
        return ""
    return base64.b64encode(digest).decode("ascii").rstrip("=")


def remedy_of_launcher(output: str) -> str:
    """What to do if sshd dropped connections of a launcher that wrote this; empty if it did not.

    pdsh connects to all hosts at once.
    """
    return f". sshd closed a connection before the login. {_TOO_MANY}" if re.search(_DROPPED, output) else ""


def was_dropped(error: HostError) -> bool:
    """Whether sshd closed the connection before the login, as it does at random when many arrive at once."""
    return isinstance(error, HostUnreachable) and _TOO_MANY in str(error)


def last_lines(stderr: bytes) -> str:
    """Return the last three lines that are not noise, joined into one line."""
    lines = [printable(line).strip() for line in stderr.decode("utf-8", "replace").splitlines()]
    return " / ".join([line for line in lines if not _NOISE.match(line)][-3:]) or "nothing"

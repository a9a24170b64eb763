"""Turns the messages of a failing ssh into errors with a remedy."""

import base64
import binascii
import hashlib
import re
from pathlib import Path

from infra.node.attempts.log_tail import printable
from t5train.errors import HostError, HostKeyMismatch, HostMisconfigured, HostUnreachable

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

"""Extracts the answer from a host's reply, or the error.

There are three kinds of errors: the host cannot be reached (HostUnreachable, HostTimeout), the action failed there
(RemoteFailed, whose cause is the action's own error), or the host and the head do not understand each other
(ProtocolMismatch).
"""

from contextlib import suppress
from typing import TypeVar

from infra.head.hosts.ssh import Reply
from infra.node.attempts.log_tail import printable
from infra.node.messages import Failure, NotAMessage, decode
from t5train.errors import BadMessage, HostError, ProtocolMismatch, RemoteFailed, error_of

A = TypeVar("A")


def answer_in(reply: Reply, host: str, kind: type[A]) -> A | HostError:
    """Return the message of class ``kind`` in a host's reply, or the error."""
    if isinstance(reply, HostError):
        return reported(host, reply)
    try:
        return decode(reply.stdout, kind)
    except BadMessage as error:
        return mismatch(host, error)


def mismatch(host: str, error: BadMessage) -> ProtocolMismatch:
    """Return the error for a message that the host or the head did not expect."""
    if isinstance(error, NotAMessage):
        return ProtocolMismatch(
            f"{host}: {error}. Make the login shell there (~/.bashrc) print nothing when it has no terminal", [host]
        )
    return ProtocolMismatch(
        f"{host} runs another version of this package: {error}. Install the head's version there, or have it sent with "
        "--ship-code",
        [host],
    )


def reported(host: str, error: HostError) -> HostError:
    """Return the error that the action itself reported on stderr, or ``error`` if it reported none."""
    failure = _failure_in(error.stderr) if isinstance(error, RemoteFailed) else None
    if failure is None:
        return error
    cause = error_of(failure.kind, printable(failure.message))
    if isinstance(cause, BadMessage):
        return mismatch(host, cause)
    failed = RemoteFailed(f"{host}: {cause}", [host])
    failed.__cause__ = cause
    return failed


def _failure_in(stderr: bytes) -> Failure | None:
    for line in reversed(stderr.splitlines()):
        with suppress(BadMessage):
            return decode(line, Failure)
    return None

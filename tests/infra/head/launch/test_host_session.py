"""A host session reports why its connection broke, and connects again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from infra.head.launch.host_session import HostSession, News, SessionBroken
from infra.node.attempts.attempt import Attempt


@dataclass(frozen=True)
class FixedCommand:
    """A transport that runs ``argv`` on this machine instead of any command for a host."""

    argv: tuple[str, ...]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
        return list(self.argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("sh", "-c", "echo Welcome; sleep 60"), "a: got 'Welcome' instead of a message. Make the login shell there"),
        (("/dev/null",), "a: /dev/null cannot be started on this machine: Permission denied"),
    ],
)
def test_a_broken_session_reports_the_cause_and_reconnects(argv: tuple[str, ...], words: str, this: Attempt) -> None:
    news = News()
    session = HostSession(FixedCommand(argv), "a", this, {}, news)
    for _ in range(2):
        host, received_at, message = news.get(timeout=10)
        assert host == "a"
        assert received_at <= time.monotonic()
        assert isinstance(message, SessionBroken)
        assert message.reason.startswith(words)
    session.close()
    session.join()

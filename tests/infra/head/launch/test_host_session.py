"""A host session reports why its connection broke, and connects again."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.head.launch import host_session
from infra.head.launch.host_session import HostSession, News, SessionBroken
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.session_messages import Alive
from infra.node.messages import encode


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
        host, received_at, message = news.get(timeout=600)
        assert host == "a"
        assert received_at <= time.monotonic()
        assert isinstance(message, SessionBroken)
        assert message.reason.startswith(words)
    session.close()
    session.join()


def test_a_slow_login_is_awaited_longer_than_a_silent_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_session, "_SILENT_SECONDS", 0.2)
    this = attempt.begin(tmp_path / "run", None, 60.0, {"a": (0,)})
    news = News()
    script = f"sleep 2; echo '{encode(Alive(())).decode().strip()}'; sleep 60"
    session = HostSession(FixedCommand(("sh", "-c", script)), "a", this, {}, news)
    assert news.get(timeout=600)[2] == Alive(())
    broken = news.get(timeout=600)[2]
    assert isinstance(broken, SessionBroken)
    assert re.match(r"a: no message received for \d+ s\. ", broken.reason)
    session.close()
    session.join()

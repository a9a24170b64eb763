"""A channel to an agent reports why its connection broke, and connects again."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from infra.head.hosts import agents
from infra.head.hosts.agents import Agent, Agents, ChannelBroken, News
from infra.head.hosts.nodes import Nodes
from infra.node.attempts.agent_messages import Alive, Ended, Hello
from infra.node.messages import encode
from t5train.errors import HostUnreachable
from tests.support.simulated_nodes import LocalHosts

RUN_ID = "smoke-0001-0123abcd"


@dataclass(frozen=True)
class FixedCommand:
    """A transport that runs ``argv`` on this machine instead of any command for a host."""

    argv: tuple[str, ...]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - Transport passes both
        return list(self.argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("sh", "-c", "echo Welcome; sleep 60"), "a: got 'Welcome' instead of a message. Make the login shell there"),
        (("/dev/null",), "a: /dev/null cannot be started on this machine: Permission denied"),
    ],
)
def test_a_broken_channel_reports_the_cause_and_is_opened_again(argv: tuple[str, ...], words: str) -> None:
    agent, news = Agent(Nodes(FixedCommand(argv), ("a",)), 60.0), News()
    agent.watch(RUN_ID, {}, news)
    for _ in range(2):
        host, received_at, message = news.get(timeout=600)
        assert host == "a"
        assert received_at <= time.monotonic()
        assert isinstance(message, ChannelBroken)
        assert message.reason.startswith(words)
    agent.close()
    agent.join()


def test_a_slow_login_is_awaited_longer_than_a_silent_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_SILENT_SECONDS", 0.2)
    hello, news = Hello(RUN_ID, "boot", {}), News()
    script = f"sleep 2; echo '{encode(hello).decode().strip()}'; sleep 60"
    agent = Agent(Nodes(FixedCommand(("sh", "-c", script)), ("a",)), 60.0)
    agent.watch(RUN_ID, {}, news)
    assert news.get(timeout=600)[2] == hello
    broken = news.get(timeout=600)[2]
    assert isinstance(broken, ChannelBroken)
    assert re.match(r"a: no message received for \d+ s\. ", broken.reason)
    agent.close()
    agent.join()


def test_reports_about_an_earlier_attempt_are_not_taken_for_those_of_the_watched_one() -> None:
    earlier, hello, news = Hello("smoke-0000-0123abcd", "boot", {}), Hello(RUN_ID, "boot", {}), News()
    lines = "".join(encode(each).decode() for each in (Alive(("rank-00000",)), earlier, Ended(()), hello))
    agent = Agent(Nodes(FixedCommand(("sh", "-c", 'read request; printf %s "$0"; sleep 60', lines)), ("a",)), 60.0)
    agent.watch(RUN_ID, {}, news)
    assert news.get(timeout=600)[2] == hello
    agent.close()
    agent.join()


def test_an_agent_is_started_only_with_this_heads_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ship", lambda _, hosts: {host: HostUnreachable("no code", [host]) for host in hosts})
    agent, news = Agent(Nodes(FixedCommand(("false",)), ("a",), code="c0de"), 60.0), News()
    agent.watch(RUN_ID, {}, news)
    assert news.get(timeout=600)[2] == ChannelBroken("no code")
    agent.close()
    agent.join()


def test_a_channel_is_opened_again_after_an_error_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(agents, "conversation", no_thread)
    agent, news = Agent(Nodes(FixedCommand(("true",)), ("a",)), 60.0), News()
    agent.watch(RUN_ID, {}, news)
    for _ in range(2):
        assert news.get(timeout=600)[2] == ChannelBroken("can't start new thread")
    agent.close()
    agent.join()


def test_no_code_is_sent_to_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, news = list[str](), News()

    def ship(_: object, hosts: tuple[str, ...]) -> dict[str, HostUnreachable]:
        sent.extend(hosts)
        return {}

    monkeypatch.setattr(agents, "ship", ship)
    agent = Agent(Nodes(FixedCommand(("sh", "-c", "exit 255")), ("a",), code="c0de"), 60.0)
    agent.watch(RUN_ID, {}, news)
    for _ in range(2):
        assert isinstance(news.get(timeout=600)[2], ChannelBroken)
    assert not sent
    agent.close()
    agent.join()


def test_agents_stay_on_hosts_that_the_run_still_uses(local_hosts: LocalHosts) -> None:
    opened, nodes = Agents(), Nodes(local_hosts, ("a", "b", "c"))
    first = opened.on(nodes, 60.0)
    first["b"].watch(RUN_ID, {}, News())
    opened.on(nodes.on("a"), 60.0)
    second = opened.on(nodes, 30.0)
    opened.close()
    assert [host for host in second if second[host] is first[host]] == ["a", "b"]
    assert {agent.lease_seconds for agent in second.values()} == {30.0}
    assert not any(agent._thread.is_alive() for agent in second.values())


def test_hosts_that_hang_are_awaited_together_when_channels_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, ended = Agents(), threading.Event()

    def hang(*_: object) -> None:
        ended.wait()
        raise OSError

    monkeypatch.setattr(agents, "END_SECONDS", 0.5)
    monkeypatch.setattr(agents, "conversation", hang)
    opened.on(Nodes(FixedCommand(("true",)), tuple(map(str, range(20)))), 60.0)
    began = time.monotonic()
    opened.close()
    ended.set()
    assert time.monotonic() - began < 5

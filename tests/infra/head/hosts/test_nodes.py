"""Hosts are asked in parallel, and nothing that a host does or omits delays the head for longer than its deadline."""

import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from infra.head.hosts import nodes
from infra.head.hosts.nodes import Attendance, Nodes, ask, attended
from infra.head.hosts.ssh import quoted
from infra.node.attempts.attempt_actions import EndAttempt
from infra.node.channel import Channel
from infra.node.messages import Done, encode
from infra.node.node_folders import node_path
from t5train.errors import HostError, HostTimeout, HostUnreachable, RemoteFailed
from tests.support.waiting import await_that


@dataclass(frozen=True)
class Name:
    """A question, and its answer."""

    host: str


@dataclass(frozen=True)
class Shell:
    """A host that is a shell of this machine."""

    shell: str = "sh"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
        return [self.shell, "-c", quoted(argv)]


def test_all_hosts_are_asked_in_parallel_and_answers_keep_their_order(tmp_path: Path) -> None:
    hosts = [f"node{number}" for number in range(64)]
    seen: list[tuple[str, threading.Thread]] = []
    script = 'read line; touch "$line"; until test -e all; do sleep 0.2; done; case $line in *e7\\"*) exit 1;; esac; '

    def release_all() -> None:
        await_that(lambda: len(list(tmp_path.iterdir())) == len(hosts))
        (tmp_path / "all").touch()

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release_all)
        answers = ask(
            *(Shell(), ["env", "-C", str(tmp_path), "sh", "-c", script + 'echo "$line"']),
            *({host: Name(host) for host in hosts}, Name, 600),
            on_answer=lambda host, _answer: seen.append((host, threading.current_thread())),
        )
    released.result()
    assert list(answers) == hosts
    assert isinstance(answers.pop("node7"), RemoteFailed)
    assert answers == {host: Name(host) for host in answers}
    assert {host for host, _ in seen} == set(hosts)
    assert {thread for _, thread in seen} == {threading.current_thread()}


LONG = "x" * (1 << 20)
"""More than a pipe holds: to send it blocks until it is read."""


class Deaf(Shell):
    """Host a is a shell; all others neither answer nor read, and heed no deadline."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return super().command(host, argv if host == "a" else ["sleep", "600"])


def test_the_deadline_ends_a_write_that_a_host_blocks() -> None:
    error = ask(Deaf(), ["x"], {"deaf": Name(LONG)}, Name, 0.5)["deaf"]
    assert isinstance(error, HostTimeout)
    assert "'x' timed out after 0.5 s" in str(error)


def test_an_interrupt_ends_commands_that_are_running_and_writes_that_hosts_block(tmp_path: Path) -> None:
    blocked = threading.Event()

    def on_start(host: str) -> None:
        if host == "deaf":
            blocked.set()
        else:
            blocked.wait()

    def interrupt(host: str, _answer: Name | HostError) -> None:
        assert host == "a"
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(Deaf(), ["head", "-n1"], {"a": Name("a"), "deaf": Name(LONG)}, Name, 600, on_start, interrupt)
    assert time.monotonic() - started < 300


def test_of_what_a_command_writes_to_standard_error_only_the_end_is_kept() -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo last words >&2; exit 1"
    error = ask(Shell(), ["sh", "-c", script], {"a": Name("a")}, Name, 60)["a"]
    assert isinstance(error, RemoteFailed)
    assert str(error).endswith("last words")
    assert len(error.stderr) == 1 << 20


@pytest.mark.parametrize(
    ("said", "limits"), [([], {"first_seconds": 0.0}), ([Done()], {"first_seconds": 600.0, "silent_seconds": 0.0})]
)
def test_an_attended_host_is_lost_when_it_is_silent_for_too_long(said: list[Done], limits: dict[str, float]) -> None:
    class Host(Shell):
        """A host that sends these messages, then none."""

        def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
            text = b"".join(map(encode, said)).decode()
            return ["sh", "-c", 'printf %s "$1"; exec sleep 600', "sh", text]

    heard = SimpleQueue[Done | Channel | HostError]()
    expected = Attendance(Done, "the process there", **limits)
    with attended(Nodes(Host(), ("a",)), {"a": EndAttempt("")}, expected, lambda _host, what: heard.put(what)):
        assert isinstance(heard.get(timeout=60), Channel)
        assert [heard.get(timeout=60) for _ in said] == said
        lost = heard.get(timeout=60)
    assert isinstance(lost, HostTimeout)
    assert str(lost).startswith("a: nothing was received from the process there for 0 s")


def test_the_node_program_runs_with_absolute_paths_and_shipped_code_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:some/where")
    path = f"PYTHONPATH={Path.cwd()}:{Path.cwd()}/some/where"
    assert nodes.node_command("facts", None) == [
        *("env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", path, sys.executable, "-m", "infra.node", "facts")
    ]
    checkout = Path(nodes.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{checkout}:/torch")
    paths = [word for word in nodes.node_command("facts", "c0de") if word.startswith("PYTHONPATH=")]
    assert paths == [f"PYTHONPATH={node_path('code', 'c0de')}:/torch"]
    monkeypatch.delenv("PYTHONPATH")
    assert not any(word.startswith("PYTHONPATH") for word in nodes.node_command("facts", None))


def test_a_connection_that_a_busy_sshd_drops_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        """A host whose sshd drops the first two connections."""

        def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
            said = "kex_exchange_identification: Connection closed by remote host"
            script = f'echo x >> "$1"; test $(wc -l < "$1") -gt "$2" || {{ echo "{said}" >&2; exit 255; }}; cat'
            return ["sh", "-c", script, "sh", str(tmp_path / "tries"), limit]

    monkeypatch.setattr("infra.head.hosts.nodes._RETRY_SECONDS", (0.0, 0.0))
    limit = "2"
    questions = {"node1": Name("node1")}
    assert ask(Busy(), ["x"], questions, Name, 60) == questions
    limit = "1000"
    error = ask(Busy(), ["x"], questions, Name, 60)["node1"]
    assert isinstance(error, HostUnreachable)
    assert re.match(r"node1: sshd there closed .* MaxStartups .* ssh said: kex_exchange_id", str(error))

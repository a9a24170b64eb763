import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from infra.head.hosts.code_shipping import COMMAND
from infra.head.hosts.ssh import Transport
from infra.head.launch import earlier_attempts
from infra.node import node_folders
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.code_bundle import own_bundle
from tests.infra.conftest import Start
from tests.support.simulated_nodes import LocalHosts, Unsteady

pytestmark = pytest.mark.usefixtures("own_node_folder")
HOSTS = {"a": (0,), "b": (0,)}


@dataclass(frozen=True)
class Interrupting:
    """A transport that takes a second to reach a host, and each time the user presses Ctrl-C."""

    transport: Transport

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        return ["sh", "-c", 'sleep 1; exec "$@"', "sh", *self.transport.command(host, argv)]


class Recorded:
    """A transport that records each command's PYTHONPATH, or its last argument (the code receiver) if it has none."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.recorded = transport, list[str]()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        self.recorded.append(next((word for word in argv if word.startswith("PYTHONPATH=")), argv[-1]))
        return self.transport.command(host, argv)


@pytest.fixture
def this(tmp_path: Path, local_hosts: LocalHosts) -> Attempt:
    """An attempt over two hosts that has files on both, and whose head was killed."""
    this = attempt.begin(tmp_path / "run", None, 5.0, HOSTS, grace_seconds=1.0)
    local_hosts.prepare(this)
    for host in HOSTS:
        log = "before s3cret-value after\n" if host == "a" else "of b\n"
        (local_hosts.attempt_folder(host, this.run_id) / f"rank-0000{'ab'.index(host)}.log").write_text(log)
    folder = node_folders.head_folder(this.run_id)
    folder.mkdir()
    (folder / "launcher.log").write_text("of the launcher\n")
    head_lease.begin(folder)
    return this


def test_an_earlier_attempt_is_ended_its_logs_collected_without_secrets_and_its_files_removed(
    this: Attempt, local_hosts: LocalHosts, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "s3cret-value")
    rank = start("-c", "import time; time.sleep(600)", T5_RUN_ID=this.run_id)
    launcher = start("-c", "import time; time.sleep(600)", T5_RUN_ID=f"{this.run_id}-head")
    earlier_attempts.end_earlier(tmp_path / "run", local_hosts, lambda: None)
    # By SIGKILL, the launcher too: on SIGTERM it would end processes of others.
    assert rank.wait(20) == launcher.wait(20) == -9
    text = {name: (this.folder / name).read_text() for name in ("rank-00000.log", "rank-00001.log", "launcher.log")}
    assert text["rank-00000.log"].startswith("before [")
    assert "s3cret" not in text["rank-00000.log"]
    assert text["rank-00001.log"] == "of b\n"
    assert text["launcher.log"] == "of the launcher\n"
    assert not local_hosts.attempt_folder("a", this.run_id).exists()
    assert not node_folders.head_folder(this.run_id).exists()
    assert not list(earlier_attempts.unended(tmp_path / "run"))


def test_an_attempt_whose_code_may_be_gone_is_ended_with_this_heads_code(
    this: Attempt, local_hosts: LocalHosts, tmp_path: Path
) -> None:
    replace(this, code="0ld").write()
    transport = Recorded(local_hosts)
    earlier_attempts.end_earlier(tmp_path / "run", transport, lambda: None)
    assert not list(earlier_attempts.unended(tmp_path / "run"))
    assert transport.recorded[:4] == [COMMAND[-1]] * 4  # first, both hosts are asked for the code, and both receive it
    path = f"PYTHONPATH={node_folders.code_folder(own_bundle().digest)}"
    assert transport.recorded[4:] == [path] * 6  # `end`, `logs` and `remove` on both


@pytest.mark.parametrize("is_stop_ordered", [False, True])
def test_a_silent_host_is_given_the_time_in_which_its_ranks_end_by_themselves(
    this: Attempt, local_hosts: LocalHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stop_ordered: bool
) -> None:
    this = replace(this, save_seconds=100.0)
    this.write()
    if is_stop_ordered:
        this.order_stop()
    monkeypatch.setattr(earlier_attempts, "END_SECONDS", 10.0)
    # Of 16: lease 5 + grace 1 + END_SECONDS 10. Ranks that were ordered to stop may save twice for 100.
    monkeypatch.setattr(head_lease, "age_seconds", lambda _folder: 214.5 if is_stop_ordered else 14.5)
    ticks = []
    began = time.monotonic()
    earlier_attempts.end_earlier(tmp_path / "run", Unsteady(local_hosts, "b"), lambda: ticks.append(1))
    assert 1.5 <= time.monotonic() - began < 60
    assert len(ticks) >= 2
    assert not list(earlier_attempts.unended(tmp_path / "run"))
    assert local_hosts.attempt_folder("b", this.run_id).exists()  # with the logs that could not be collected


def test_a_host_that_answers_again_after_the_wait_is_ended_and_its_logs_are_collected(
    this: Attempt, local_hosts: LocalHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(head_lease, "age_seconds", lambda _folder: 25.5)  # of 26: lease 5 + grace 1 + END_SECONDS 20
    transport = Unsteady(local_hosts, "b")
    earlier_attempts.end_earlier(tmp_path / "run", transport, lambda: setattr(transport, "unreachable", ""))
    assert (this.folder / "rank-00001.log").read_text() == "of b\n"
    assert not local_hosts.attempt_folder("b", this.run_id).exists()


def test_an_attempt_that_could_not_be_ended_everywhere_is_ended_by_the_next_head(
    this: Attempt, local_hosts: LocalHosts, tmp_path: Path
) -> None:
    assert earlier_attempts.end(this, Unsteady(local_hosts, "b")) == ["b"]
    assert [one.run_id for one in earlier_attempts.unended(tmp_path / "run")] == [this.run_id]
    earlier_attempts.end_earlier(tmp_path / "run", local_hosts, lambda: None)
    assert (this.folder / "rank-00001.log").read_text() == "of b\n"


def test_repeated_ctrl_c_does_not_stop_ranks_on_hosts_from_being_ended(
    this: Attempt, local_hosts: LocalHosts, start: Start
) -> None:
    rank = start("-c", "import time; time.sleep(600)", T5_RUN_ID=this.run_id)
    with pytest.raises(KeyboardInterrupt):
        earlier_attempts.end(this, Interrupting(local_hosts))
    assert rank.wait(20) == -9
    for host in HOSTS:
        assert not (local_hosts.attempt_folder(host, this.run_id) / head_lease.LEASE).exists()


def test_a_host_that_did_not_get_the_code_is_not_asked_to_run_it(
    this: Attempt, local_hosts: LocalHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a host, the files at the path of the code may belong to another user."""
    shipped = replace(this, code="0" * 64)
    asked_hosts: list[str] = []

    def ended_on(_this: Attempt, _transport: Transport, hosts: list[str]) -> list[str]:
        asked_hosts.extend(hosts)
        return []

    monkeypatch.setattr(earlier_attempts, "unended", lambda _folder: [shipped])
    monkeypatch.setattr(earlier_attempts, "end_on_hosts", ended_on)
    monkeypatch.setattr(earlier_attempts, "_wait", lambda *_: None)
    earlier_attempts.end_earlier(this.folder.parent.parent, Unsteady(local_hosts, "b"), lambda: None)
    assert asked_hosts == ["a", "a"]

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import pytest

from infra.head.hosts.nodes import Nodes, reported
from infra.node.__main__ import ACTIONS, function_of, request_type
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.agent_messages import (
    Alive,
    Ended,
    Hello,
    Instruction,
    NewLines,
    Order,
    Ordered,
    RankEnded,
    RankError,
    RankLine,
    Renew,
    Report,
    Serve,
    Watch,
)
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import (
    EndAttempt,
    PackedFiles,
    PackLogs,
    PrepareAttempt,
    Prepared,
    RemoveAttempt,
)
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.channel import Channel
from infra.node.messages import Done, Query
from infra.node.ports import Endpoint
from infra.node.processes import ProcessIdentity, Survivors
from t5train.errors import HostError, RemoteFailed, RunOwned, StorageError
from tests.infra.conftest import Start, Until
from tests.support.simulated_nodes import LocalHosts

RUN_ID = "smoke-0001-0123abcd"
T = TypeVar("T")


Act = Callable[[Query[Any]], Any]


@pytest.fixture
def act(local_hosts: Any) -> Act:
    """Run an action on host a and return its answer."""

    def act(query: Query[Any]) -> Any:
        answer = Nodes(local_hosts, ("a",)).ask(query, 30)["a"]
        if isinstance(answer, HostError):
            raise answer
        return answer

    return act


def preparation(owner: str | None = None, spec: str = "{}\n") -> PrepareAttempt:
    this = Attempt(Path("/"), RUN_ID, "smoke", 1, None, 60.0, accelerator="cpu", slots=(0,), host="a", started_at="now")
    return PrepareAttempt(this, {"A": "1"}, Endpoint("127.0.0.1", 20001), owner, {"spec.json": spec})


@pytest.fixture
def prepared(local_hosts: LocalHosts, act: Act) -> Path:
    """The folder of an attempt that was prepared on host a."""
    answer: Prepared = act(preparation())
    assert answer.folder == local_hosts.attempt_folder("a", RUN_ID)
    return answer.folder


class ToAgent:
    """The head's end of a channel to an agent that watches the attempt."""

    def __init__(self, argv: list[str], offsets: dict[str, int], lease_seconds: float) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.channel = Channel(self.process.stdout, self.process.stdin)
        self.channel.send(Serve(lease_seconds))
        self.send(Watch(RUN_ID, offsets))

    def send(self, instruction: Instruction) -> None:
        self.channel.send(instruction)

    def receive(self, kind: type[T]) -> T:
        """Return the next message of that class, skipping each Alive that names no rank."""
        while (message := self.channel.receive(Report)) is not None:
            if isinstance(message, kind) and message != Alive(()):
                return message
        raise AssertionError(f"the agent ended without {kind}")


Open = Callable[..., ToAgent]


@pytest.fixture
def open_agent(local_hosts: LocalHosts) -> Iterator[Open]:
    opened: list[ToAgent] = []

    def open_agent(offsets: Mapping[str, int] = MappingProxyType({}), lease_seconds: float = 60.0) -> ToAgent:
        opened.append(ToAgent(local_hosts.command("a", ["serve"]), dict(offsets), lease_seconds))
        return opened[-1]

    yield open_agent
    for agent in opened:
        with agent.process:
            agent.process.kill()


def test_preparing_an_attempt_writes_its_private_files_and_works_only_once(prepared: Path, act: Act) -> None:
    assert attempt.read(prepared).host == "a"
    assert json.loads((prepared / "environment.json").read_text()) == {"A": "1"}
    assert {path.name: path.stat().st_mode & 0o077 for path in prepared.iterdir()} == dict.fromkeys(
        ("attempt.json", "environment.json", "lease", "meeting.json", "spec.json"), 0
    )
    assert head_lease.age_seconds(prepared) < 60
    with pytest.raises(RemoteFailed, match=r"^a: .*already exists") as failed:
        act(preparation())
    assert type(failed.value.__cause__) is StorageError


def test_no_attempt_is_prepared_for_a_run_that_another_head_has_taken_over(
    local_hosts: LocalHosts, act: Act, tmp_path: Path
) -> None:
    owner = {"unique_id": "2" * 32, "head": "other", "root": "/shared/t5", "since": "then", "lease_seconds": 60.0}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    spec = json.dumps({"node_local": True, "run_folder": str(tmp_path)})
    with pytest.raises(RemoteFailed, match=r"^a: .* belongs to head other, root /shared/t5, since then") as failed:
        act(preparation("1" * 32, spec))
    assert type(failed.value.__cause__) is RunOwned
    assert not local_hosts.attempt_folder("a", RUN_ID).exists()


def test_an_agent_reports_lines_errors_and_ends_and_continues_where_the_last_one_stopped(
    prepared: Path, open_agent: Open
) -> None:
    (prepared / "rank-00000.log").write_text("step 1\nstep 2\nhal")
    (prepared / "rank-00001.log").write_text("chatter\nsomething WARNING of rank 1\n")
    (prepared / "rank-00001.error.json").write_text('{"type": "DiskFull", "message": "full"}')
    record = ExitRecord("rank-00001", 1, Cause.EXITED, "exited", "then", "now", "a")
    attempt.read(prepared).write_exit(record)
    first = open_agent()
    assert first.receive(Hello).boot_id
    assert first.receive(RankError) == RankError("rank-00001", "DiskFull", "full")
    assert first.receive(RankEnded) == RankEnded(record)
    with open(prepared / "rank-00000.log", "a") as log:
        log.write("f\nstep 3\n")
    second = open_agent({"rank-00000": 14, "rank-00001": 0})
    assert sorted(second.receive(NewLines).lines) == [
        RankLine("rank-00000", "half"),
        RankLine("rank-00000", "step 3"),
        RankLine("rank-00001", "something WARNING of rank 1"),
    ]


def test_a_flood_of_log_lines_is_limited_and_omitted_lines_are_counted(prepared: Path, open_agent: Open) -> None:
    (prepared / "rank-00000.log").write_text("chatter\n" * 5000)
    agent = open_agent()
    assert agent.receive(NewLines).left_out >= 4900


def test_the_lease_is_renewed_only_when_the_head_orders_it(prepared: Path, open_agent: Open, until: Until) -> None:
    agent = open_agent()
    agent.receive(Hello)
    before = (prepared / "lease").read_text()
    time.sleep(1.2)
    assert (prepared / "lease").read_text() == before
    agent.send(Renew(RUN_ID, None))
    until(lambda: (prepared / "lease").read_text() != before)


def test_an_agent_without_a_head_ends_when_the_lease_expires(prepared: Path, open_agent: Open) -> None:
    assert open_agent(lease_seconds=0.5).process.wait(60) == -signal.SIGALRM


def test_a_rank_whose_guard_was_killed_is_reported_as_gone(prepared: Path, open_agent: Open, start: Start) -> None:
    guard = start("-c", "import time; time.sleep(600)")
    identity = ProcessIdentity.of(guard.pid)
    attempt.read(prepared).write_process("rank-00003", identity, identity)
    guard.kill()
    guard.wait()
    assert open_agent().receive(Alive) == Alive(("rank-00003",))


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize("by", ["action", "agent"])
def test_ending_an_attempt_ends_its_ranks_and_launchers_and_no_other_processes(
    prepared: Path, act: Act, open_agent: Open, start: Start, by: str
) -> None:
    rank = start("-c", DEAF, T5_RUN_ID=RUN_ID)
    launcher = start("-c", "import time; time.sleep(600)", "infra.node.attempts.process_guard", str(prepared))
    stranger = start("-c", "import time; time.sleep(600)", f"{prepared}-x", T5_RUN_ID=f"{RUN_ID}-other")
    of_head = start("-c", "import time; time.sleep(600)", str(prepared), T5_RUN_ID=f"{RUN_ID}-head")
    assert act(EndAttempt(RUN_ID.replace("0001", "0002"))) == Survivors(())
    assert (prepared / "lease").exists(), "it is of another attempt"
    began = time.monotonic()
    if by == "action":
        assert act(EndAttempt(RUN_ID)) == Survivors(())
    else:
        agent = open_agent()
        agent.send(Ordered(Order.END))
        assert agent.receive(Ended) == Ended(())
        agent.send(Renew(RUN_ID, None))  # this one no longer renews a lease
        agent.channel.end_sending()
        assert agent.process.wait(25) == 0
    assert time.monotonic() - began < 25
    assert rank.wait(20) == -signal.SIGKILL
    assert launcher.wait(20) == -signal.SIGTERM
    assert of_head.wait(20) == -signal.SIGKILL  # by no other signal, because DeepSpeed's launcher would pass it on
    assert stranger.poll() is None
    assert not (prepared / "lease").exists()


@pytest.mark.parametrize("by", [EndAttempt, RemoveAttempt])  # as if removed: on a new disk
def test_an_agent_does_not_renew_the_lease_of_an_ended_attempt(
    prepared: Path, act: Act, open_agent: Open, by: type[EndAttempt | RemoveAttempt]
) -> None:
    act(by(RUN_ID))
    agent = open_agent()
    assert agent.receive(Ended) == Ended(())
    agent.send(Renew(RUN_ID, None))
    agent.send(Watch(RUN_ID, {}))
    assert agent.receive(Hello).run_id == RUN_ID
    assert not (prepared / "lease").exists()


def test_logs_are_packed_without_the_environment_and_the_attempt_can_be_removed(prepared: Path, act: Act) -> None:
    (prepared / "rank-00000.log").write_text("step 1\n")
    answer: PackedFiles = act(PackLogs(RUN_ID))
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as packed:
        assert packed.getnames() == ["attempt.json", "lease", "meeting.json", "rank-00000.log", "spec.json"]
        file = packed.extractfile("rank-00000.log")
        assert file is not None
        assert file.read() == b"step 1\n"
    assert act(RemoveAttempt(RUN_ID)) == act(RemoveAttempt(RUN_ID)) == Done()
    assert not prepared.exists()


def test_importing_all_actions_loads_no_large_package(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import sys; from infra.node.__main__ import *; [function_of(name) for name in ACTIONS]; print(*sys.modules)"
    loaded = set(run_python(code).stdout.split())
    assert "infra.node.storage.chain_copy" in loaded
    assert not loaded & {"torch", "pydantic", "numpy", "prefect"}


def test_a_request_that_breaks_off_is_reported() -> None:
    command = [sys.executable, "-m", "infra.node", "logs"]
    ended = subprocess.run(command, input=b'{"PackLogs": {"run', capture_output=True, env=os.environ, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")
    error = reported("node1", RemoteFailed("node1: ended with exit code 1", ["node1"], ended.stderr))
    assert str(error) == "node1: the request for 'logs' did not arrive whole. Check that ~/.bashrc there reads no input"


@pytest.mark.parametrize("name", ACTIONS)
def test_each_actions_request_class_names_the_action_and_its_answer(name: str) -> None:
    function = function_of(name)
    request = request_type(function)
    answer = get_type_hints(function)["return"]
    assert request.action == name
    assert answer is (request.answer() if issubclass(request, Query) else type(None))

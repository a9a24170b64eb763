import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pytest

from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.processes import ProcessIdentity

Until = Callable[..., None]
RUN_ID = "smoke-0001-0123abcd"


class Hosts(Protocol):
    def command(self, host: str, argv: list[str]) -> list[str]: ...
    def attempt_folder(self, host: str, run_id: str) -> Path: ...


Act = Callable[..., Any]


@pytest.fixture
def act(local_hosts: Hosts) -> Act:
    """Does one action on host a and returns its answer."""

    def act(action: str, **request: Any) -> Any:
        done = subprocess.run(
            local_hosts.command("a", [action]),
            input=json.dumps(request).encode() + b"\n",
            check=False,
            capture_output=True,
            timeout=30,
        )
        if done.returncode:
            raise AssertionError(done.stderr.decode())
        return done.stdout if action == "logs" else json.loads(done.stdout)

    return act


@pytest.fixture
def prepared(local_hosts: Hosts, act: Act) -> Path:
    """The folder of an attempt that was prepared on host a."""
    facts = {
        "run_id": RUN_ID, "run_name": "smoke", "number": 1, "head": None, "lease_seconds": 5.0, "grace_seconds": 30.0,
        "beat_seconds": 10.0, "accelerator": "cpu", "slots": [0], "host": "a", "started_at": "now", "hosts": None,
    }  # fmt: skip
    meeting = {"address": "127.0.0.1", "port": 20001}
    answer = act(
        "prepare", run_id=RUN_ID, attempt=facts, environment={"A": "1"}, meeting=meeting, owner=None,
        files={"spec.json": "{}\n"},
    )  # fmt: skip
    folder = local_hosts.attempt_folder("a", RUN_ID)
    assert answer["folder"] == str(folder)
    return folder


class HostSession:
    """A window as the head has it."""

    def __init__(self, argv: list[str], offsets: dict[str, int] | None) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.say({"run_id": RUN_ID, "offsets": offsets})

    def say(self, order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, key: str) -> Any:
        """What the next message with that key says."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get(key):
                return message[key]
        raise AssertionError(f"the window ended without {key}")


@pytest.fixture
def window(local_hosts: Hosts) -> Iterator[Callable[..., HostSession]]:
    opened: list[HostSession] = []

    def window(offsets: dict[str, int] | None = None) -> HostSession:
        opened.append(HostSession(local_hosts.command("a", ["watch"]), offsets if offsets is not None else {}))
        return opened[-1]

    yield window
    for one in opened:
        one.process.kill()
        one.process.communicate()


def test_an_attempt_is_prepared_once_with_all_that_its_ranks_are_to_know(prepared: Path, act: Act) -> None:
    assert attempt.read(prepared).host == "a"
    assert json.loads((prepared / "environment.json").read_text()) == {"A": "1"}
    assert {path.name: path.stat().st_mode & 0o077 for path in prepared.iterdir()} == dict.fromkeys(
        ("attempt.json", "environment.json", "lease", "meeting.json", "spec.json"), 0
    )
    assert head_lease.age_seconds(prepared) < 5
    with pytest.raises(AssertionError, match=r"StorageError.*already exists"):
        act("prepare", run_id=RUN_ID, owner=None)


def test_no_ranks_are_prepared_for_a_run_that_another_head_has_taken_over(
    local_hosts: Hosts, act: Act, tmp_path: Path
) -> None:
    owner = {"unique_id": "2" * 32, "head": "other", "root": "/root", "since": "then", "lease_seconds": 60.0}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    files = {"spec.json": json.dumps({"node_local": True, "run_folder": str(tmp_path)})}
    with pytest.raises(AssertionError, match=r"RunOwned: .* belongs to head other, root /root, since then"):
        act("prepare", run_id=RUN_ID, owner="1" * 32, files=files)
    assert not local_hosts.attempt_folder("a", RUN_ID).exists()


def test_a_window_tells_of_lines_errors_and_ends_and_goes_on_where_the_last_one_was(
    prepared: Path, window: Callable[..., HostSession]
) -> None:
    (prepared / "rank-00000.log").write_text("step 1\nstep 2\nhal")
    (prepared / "rank-00001.log").write_text("chatter\nsomething WARNING of rank 1\n")
    (prepared / "rank-00001.error.json").write_text('{"type": "DiskFull", "message": "full"}')
    record = ExitRecord("rank-00001", 1, Cause.EXITED, "exited", "then", "now", "a")
    attempt.read(prepared).write_exit(record)
    first = window()
    assert set(first.hear("hello")) == {"host", "boot_id"}
    assert first.hear("error") == {"name": "rank-00001", "type": "DiskFull", "message": "full"}
    assert first.hear("exit") == asdict(record)
    with open(prepared / "rank-00000.log", "a") as log:
        log.write("f\nstep 3\n")
    second = window({"rank-00000": 14, "rank-00001": 0})
    assert sorted(second.hear("lines")) == [
        ["rank-00000", "half"], ["rank-00000", "step 3"], ["rank-00001", "something WARNING of rank 1"]
    ]  # fmt: skip


def test_a_flood_of_lines_is_bounded_and_what_is_left_out_is_counted(
    prepared: Path, window: Callable[..., HostSession]
) -> None:
    (prepared / "rank-00000.log").write_text("chatter\n" * 5000)
    one = window()
    assert one.hear("left_out") >= 4900


def test_the_lease_lives_by_the_heads_word_alone(
    prepared: Path, window: Callable[..., HostSession], until: Until
) -> None:
    one = window()
    one.hear("hello")
    before = (prepared / "lease").read_text()
    time.sleep(1.2)
    assert (prepared / "lease").read_text() == before
    one.say({"renew": True})
    until(lambda: (prepared / "lease").read_text() != before)


def test_a_window_without_a_head_ends_when_the_lease_does(prepared: Path, window: Callable[..., HostSession]) -> None:
    this = attempt.read(prepared)
    Attempt(**{**vars(this), "lease_seconds": 0.5}).write()
    assert window().process.wait(10) == -signal.SIGALRM


def test_a_rank_whose_guard_was_killed_is_told_as_gone(
    prepared: Path, window: Callable[..., HostSession], start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    guard = start("-c", "import time; time.sleep(600)")
    identity = ProcessIdentity.of(guard.pid)
    attempt.read(prepared).write_process("rank-00003", identity, identity)
    guard.kill()
    guard.wait()
    assert window().hear("gone") == ["rank-00003"]


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize("by", ["action", "window"])
def test_the_end_leaves_neither_guards_nor_ranks_nor_launchers_of_that_attempt_and_no_others_touched(
    prepared: Path,
    act: Act,
    window: Callable[..., HostSession],
    start: Callable[..., subprocess.Popen[bytes]],
    survivors: Callable[[str], set[int]],
    by: str,
) -> None:
    rank = start("-c", DEAF, T5_RUN_ID=RUN_ID)
    launcher = start("-c", "import time; time.sleep(600)", "infra.node.attempts.process_guard", str(prepared))
    stranger = start("-c", "import time; time.sleep(600)", f"{prepared}-x", T5_RUN_ID=f"{RUN_ID}-other")
    of_head = start("-c", "import time; time.sleep(600)", str(prepared), T5_RUN_ID=f"{RUN_ID}-head")
    began = time.monotonic()
    if by == "action":
        assert act("end", run_id=RUN_ID) == {"left": []}
    else:
        one = window()
        one.say({"end": True})
        assert one.hear("ended") == {"left": []}
        assert one.process.wait(5) == 0
    assert time.monotonic() - began < 8
    assert rank.wait(1) == -signal.SIGKILL
    assert launcher.wait(1) == -signal.SIGTERM
    assert of_head.wait(1) == -signal.SIGKILL  # never by another signal, which DeepSpeed's launcher passes on
    assert stranger.poll() is None
    assert not (prepared / "lease").exists()


def test_a_window_on_an_ended_attempt_renews_nothing(
    prepared: Path, act: Act, window: Callable[..., HostSession]
) -> None:
    act("end", run_id=RUN_ID)
    one = window()
    assert one.hear("ended") == {"left": []}
    assert not (prepared / "lease").exists()


def test_ending_another_attempt_leaves_this_one_alone(prepared: Path, act: Act) -> None:
    assert act("end", run_id=RUN_ID.replace("0001", "0002")) == {"left": []}
    assert (prepared / "lease").exists()


def test_logs_are_packed_without_the_environment_and_removed_when_told(prepared: Path, act: Act) -> None:
    (prepared / "rank-00000.log").write_text("step 1\n")
    with tarfile.open(fileobj=io.BytesIO(act("logs", run_id=RUN_ID))) as packed:
        assert packed.getnames() == ["attempt.json", "lease", "meeting.json", "rank-00000.log", "spec.json"]
        file = packed.extractfile("rank-00000.log")
        assert file is not None
        assert file.read() == b"step 1\n"
    assert act("remove", run_id=RUN_ID) == act("remove", run_id=RUN_ID) == {}
    assert not prepared.exists()


def test_actions_start_in_an_instant() -> None:
    heavy = "import sys, infra.node; sys.exit(bool({'torch', 'pydantic', 'numpy', 'prefect'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", heavy], env=os.environ, check=False).returncode == 0

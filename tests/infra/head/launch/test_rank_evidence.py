from pathlib import Path
from typing import Any

import pytest

from infra.head.launch.rank_evidence import evidence_of, tail
from infra.head.launch.verdict import Hops, verdict
from infra.node.attempts import attempt
from infra.node.attempts.attempt import LAUNCHER, Attempt, now, rank_name
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.node_folders import attempt_folder
from infra.node.processes import ProcessIdentity
from t5train.errors import (
    CollectiveTimeout,
    DiskFull,
    HostLost,
    LaunchError,
    NonFiniteLoss,
    OutOfMemory,
    Preempted,
    RankKilled,
    RankStopped,
    StorageError,
    T5TrainError,
)
from t5train.files import error_report


def ended(this: Attempt, rank: int, returncode: int, cause: Cause = Cause.EXITED, host: str = "") -> None:
    this.write_exit(ExitRecord(rank_name(rank), returncode, cause, str(cause), now(), now(), host))
    this.log(rank_name(rank)).write_text(f"last words of {rank}\n")


def failure_of(this: Attempt, num_ranks: int) -> T5TrainError:
    return verdict(evidence_of(this, num_ranks))


def started(this: Attempt, rank: int) -> None:
    this.write_process(rank_name(rank), ProcessIdentity(1, 0), ProcessIdentity(1, 0))


FULL = {"shared_memory_free_bytes": 4096, "shared_memory_bytes": 64 << 20, "host": "node1"}
LATE = {"cause": Cause.PHASE, "reason": "took 61 s"}
SILENT = {"cause": Cause.BEAT, "reason": "no sign of life for 11 s"}
WITHOUT_HEAD = {"cause": Cause.HEAD, "reason": "no message from the head for 61 s"}
STOPPED = {"cause": Cause.REQUESTED, "reason": "SIGTERM; it was still running after 30 s"}
NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
WAITED = "timed out in a collective"
ABORTED = "terminate called after throwing"
IMPORTING = """\
  File "/v/torch/distributed/tensor/_api.py", line 9 in <module>
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
"""
"""The stack of a thread that imports a module of torch.distributed, the innermost frame first."""
RECEIVING = f'Thread 0x2:\n{IMPORTING}Current thread 0x1:\n  File "/v/deepspeed/comm/torch.py", line 1 in recv\n'
# For each: a rank's exit record, its output, the class of the error, and words of the error's message.
CLASSES: list[tuple[dict[str, Any], str, type[LaunchError], str]] = [
    ({}, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", OutOfMemory, "micro_batch_sequences"),
    ({}, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", OutOfMemory, ""),
    ({"returncode": -9, "oom_kills": 1}, "", OutOfMemory, "host has too little memory"),
    ({"returncode": -9}, "", RankKilled, "was killed by SIGKILL"),
    ({"returncode": -40}, "", RankKilled, "was killed by signal 40. The"),
    ({"returncode": -7}, "", RankKilled, "the rank used a memory-mapped file"),
    ({"returncode": -7, **FULL}, "", DiskFull, "was killed by SIGBUS: /dev/shm on node1 is full (0 of 64 MiB free). "),
    ({"returncode": -11, **FULL}, "", DiskFull, "was killed by SIGSEGV: /dev/shm on node1 is full (0 of 64 MiB free)"),
    ({**FULL, "returncode": -11, "shared_memory_free_bytes": 9 << 20}, "", RankKilled, "was killed by SIGSEGV. The"),
    (FULL, "Error while creating shared memory segment /dev/shm/nccl-a1b2c3 (size 9637888)", DiskFull, "is full (0 of"),
    (FULL, "ValueError: something else", LaunchError, "ended with exit code 1. The output of the rank in att"),
    ({}, NCCL, CollectiveTimeout, WAITED),
    ({"returncode": -6}, f"{NCCL}\n{ABORTED}", CollectiveTimeout, WAITED),
    ({"returncode": -6}, ABORTED, RankKilled, "was killed by SIGABRT"),
    ({}, "RuntimeError: [../gloo/transport/tcp] Timed out waiting 1800000ms for recv", CollectiveTimeout, WAITED),
    ({}, "OSError: [Errno 28] No space left on device: '/r/x.pt'", DiskFull, "Free some space"),
    ({"free_bytes": 0}, "ValueError: something else", DiskFull, "Free some space"),
    ({}, "ValueError: something else", LaunchError, "ended with exit code 1"),
    (SILENT, "", RankStopped, "no sign of life for 11 s"),
    (LATE, 'File "/v/numpy/x.py", line 1 in f', RankStopped, "took 61 s"),
    (LATE, 'File "/v/torch/distributed/c.py", line 1', CollectiveTimeout, ""),
    (LATE, f"Current thread 0x1:\n{IMPORTING}", RankStopped, "took 61 s"),
    (LATE, RECEIVING, CollectiveTimeout, ""),
    ({**LATE, "cause": Cause.SAVE}, RECEIVING, RankStopped, "check the disk that it wrote to"),
    ({**LATE, "reason": "phase 'save' of step 4 took 61 s"}, "", RankStopped, "check the disk that it wrote to"),
    (WITHOUT_HEAD, "", HostLost, "no message from the head"),
    (STOPPED, "", Preempted, "continues from the last one"),
]


@pytest.mark.parametrize(("record", "output", "kind", "words"), CLASSES)
def test_the_error_class_reflects_what_happened_to_the_rank(
    this: Attempt, record: dict[str, Any], output: str, kind: type[LaunchError], words: str
) -> None:
    facts = {"returncode": 1, "cause": Cause.EXITED, "reason": "exited", **record}
    this.write_exit(ExitRecord("rank-00000", started_at=now(), ended_at=now(), **facts))
    this.log("rank-00000").write_text(f"step 1\n{output}\n" + "in a destructor\n" * 30)
    error = failure_of(this, 1)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize(
    ("record", "output", "hops"),
    [
        ({"returncode": -9}, "", Hops.OWN),
        ({"returncode": -11}, "", Hops.UNEXPLAINED),
        ({"returncode": -6}, ABORTED, Hops.UNEXPLAINED),
        ({}, "ValueError: something else", Hops.UNEXPLAINED),
        ({}, "Connection closed by peer [10.0.0.2]", Hops.LOST_PEER),
        ({}, NCCL, Hops.WAITED),
        (LATE, RECEIVING, Hops.WAITED),
        (LATE, "", Hops.DEADLINE),
        ({**LATE, "cause": Cause.SAVE}, "", Hops.DEADLINE),
        (SILENT, "", Hops.OWN),
        ({"cause": Cause.PARENT}, "", Hops.PARENT),
        (WITHOUT_HEAD, "", Hops.LOST),
        (STOPPED, "", Hops.PREEMPTED),
    ],
)
def test_a_hosts_rank_is_evidence_against_the_host_unless_it_may_have_waited_lost_another_or_been_ended(
    over_hosts: Attempt, record: dict[str, Any], output: str, hops: Hops
) -> None:
    facts = {"returncode": 1, "cause": Cause.EXITED, "reason": "exited", **record}
    over_hosts.write_exit(ExitRecord("rank-00001", started_at=now(), ended_at="then", host="node2", **facts))
    over_hosts.log("rank-00001").write_text(output)
    found, launcher = evidence_of(over_hosts, 2)
    assert (found.hops, found.at, launcher.hops) == (hops, "then", Hops.LAUNCHER)
    assert found.hosts == (("node2",) if hops in (Hops.OWN, Hops.UNEXPLAINED, Hops.DEADLINE) else ())


@pytest.mark.parametrize("is_launcher_first", [True, False])
def test_a_launcher_that_ended_before_the_ranks_lost_each_other_is_the_cause(
    this: Attempt, over_hosts: Attempt, is_launcher_first: bool
) -> None:
    for each in (this, over_hosts):
        times = ("1", "2") if is_launcher_first else ("2", "1")
        for name, at in zip((LAUNCHER, "rank-00001"), times, strict=True):
            each.write_exit(ExitRecord(name, 1, Cause.EXITED, "exited", "0", at))
        each.log("rank-00001").write_text("Connection closed by peer [10.0.0.2]")
    # Over hosts, clocks differ, and the head knows it from what it saw.
    for error in (verdict(evidence_of(this, 2)), verdict(evidence_of(over_hosts, 2, (), is_launcher_first))):
        assert ("launcher ended with exit code 1 before its ranks" in str(error)) == is_launcher_first
        assert ("lost its connection to another rank" in str(error)) != is_launcher_first
    this.write_exit(ExitRecord(LAUNCHER, 1, Cause.REQUESTED, "the head ended the run", "0", "1"))
    assert "lost its connection to another rank" in str(verdict(evidence_of(this, 2)))


def test_of_two_ranks_that_reported_an_error_the_first_one_is_the_cause(over_hosts: Attempt) -> None:
    for rank, error in ((1, DiskFull("/r: No space left on device")), (0, StorageError("/r: no such file"))):
        ended(over_hosts, rank, 1)
        error_report.report(over_hosts.rank_files(rank_name(rank)), error)
    found = failure_of(over_hosts, 2)
    assert type(found) is DiskFull
    assert found.hosts == ("node2",)


def test_preempted_ranks_are_the_cause_only_if_no_other_rank_failed(this: Attempt) -> None:
    for rank in (0, 1):
        ended(this, rank, 1)
        error_report.report(this.rank_files(rank_name(rank)), Preempted("saved step 7"))
    assert type(failure_of(this, 2)) is Preempted
    ended(this, 2, -9)
    assert type(failure_of(this, 3)) is RankKilled


def test_the_error_of_a_run_over_hosts_names_the_host(tmp_path: Path) -> None:
    this = attempt.begin(tmp_path / "run", None, lease_seconds=60.0, hosts={"node1": (0, 1), "node2": (0,)})
    ended(this, 2, -9, host="node2")
    assert "rank 2 of 3 on node2 was killed by SIGKILL" in str(failure_of(this, 3))
    this.log("rank-00002").unlink()
    folder = attempt_folder(this.run_id)
    where = f"look for rank-00002.log in the folder {folder} of node2"
    assert str(failure_of(this, 3)).endswith(f"could not be collected: {where}")
    this.write_exit(ExitRecord("launcher", 255, Cause.EXITED, "exited", now(), now()))
    for rank in (0, 1, 2):
        started(this, rank) if rank < 2 else None
        ended(this, rank, -9, Cause.REFUSED)
    assert "; rank 2 of 3 on node2 never started. The output of the launcher" in str(failure_of(this, 3))
    (this.folder / "rank-00002.exit.json").unlink()
    assert "; rank 2 of 3 on node2 never started, or its files could not be collected" in str(failure_of(this, 3))


def test_a_launcher_that_was_killed_on_a_host_is_named_before_ranks_that_lost_that_host(over_hosts: Attempt) -> None:
    ended(over_hosts, 0, 1, host="node1")
    over_hosts.log("rank-00000").write_text("Connection closed by peer")
    ended(over_hosts, 1, -9, Cause.PARENT, host="node2")
    assert "rank 1 of 2 on node2 was ended by its guard (parent): DeepSpeed's launcher on its host was killed." in str(
        failure_of(over_hosts, 2)
    )


def test_secrets_of_the_head_are_redacted_in_the_error(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_abcdef")
    ended(this, 0, 1)
    this.log("rank-00000").write_text("refused: hf_abcdef at s3://me:hunter2@store\n")
    assert "refused: [secret] at s3://me:[secret]@store" in str(failure_of(this, 1))


def test_the_first_rank_that_failed_is_named_with_its_last_output(this: Attempt) -> None:
    ended(this, 1, -9)
    ended(this, 0, 1)  # later, because it lost its peer
    error = failure_of(this, 2)
    assert isinstance(error, LaunchError)
    assert error.retryable
    assert "rank 1 of 2 was killed by SIGKILL. The output of the rank in attempt 0001 is in " in str(error)
    assert str(this.log("rank-00001")) in str(error)
    assert "last words of 1" in str(error)


def test_a_rank_that_its_guard_ended_or_that_had_not_started_is_not_the_cause(this: Attempt) -> None:
    ended(this, 0, -15, Cause.REQUESTED)
    ended(this, 1, 3)
    assert "rank 1 of 3 ended with exit code 3" in str(failure_of(this, 3))


def test_a_rank_without_an_exit_record_is_the_cause(this: Attempt) -> None:
    ended(this, 0, 1)
    started(this, 1)
    error = failure_of(this, 2)
    assert type(error) is RankKilled
    assert "rank 1 of 2 was killed together with its guard" in str(error)


def test_if_no_rank_failed_the_launcher_is_the_cause(this: Attempt, over_hosts: Attempt) -> None:
    this.write_exit(ExitRecord("launcher", 0, Cause.EXITED, "exited", now(), now()))
    this.log("launcher").write_text("No module named deepspeed\n")
    message = str(failure_of(this, 2))
    assert message.startswith("the launcher ended with exit code 0 before its ranks")
    assert "No module named deepspeed" in message
    over_hosts.write_exit(ExitRecord("launcher", 255, Cause.EXITED, "exited", now(), now()))
    over_hosts.log("launcher").write_text("node2: kex_exchange_identification: Connection closed by remote host\n")
    error = str(failure_of(over_hosts, 2))
    assert error.startswith("DeepSpeed's launcher ended with exit code 255")
    assert "collected from that host. sshd closed a connection before the login. Probably too many" in error


def test_an_error_that_a_rank_reported_is_returned_unchanged(this: Attempt) -> None:
    ended(this, 0, 1)
    ended(this, 1, 1)
    error_report.report(this.folder / "rank-00001", NonFiniteLoss("loss is nan at step 7"))
    error = failure_of(this, 2)
    assert type(error) is NonFiniteLoss
    assert str(error) == "loss is nan at step 7"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[31mred\x1b[0m\n", "  red"),
        (b" 10%|#\r 20%|##\r100%|####\n", "  100%|####"),
        (b"line\r\n", "  line"),
        (b"\x1b]0;title\x07text\n", "  text"),
        (b"\xff\x00\x9bx\n", "  \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}x"),
        (b"", "  (nothing)"),
    ],
)
def test_a_log_tail_is_cleaned_for_a_terminal(this: Attempt, written: bytes, shown: str) -> None:
    this.log("rank-00000").write_bytes(written)
    assert tail(this.log("rank-00000")) == shown


def test_the_tail_of_a_long_log_is_short(this: Attempt) -> None:
    this.log("rank-00000").write_bytes(b"".join(b"%d %s\n" % (n, b"x" * 1000) for n in range(1000)))
    lines = tail(this.log("rank-00000")).splitlines()
    assert len(lines) <= 20
    assert lines[-1].startswith("  999 x")
    assert max(map(len, lines)) < 420

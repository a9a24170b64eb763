import pytest

from infra.attempt import Attempt, Cause, ExitRecord, now, rank_name
from infra.failure import failure_of, tail
from t5train.errors import LaunchError, NonFiniteLoss
from t5train.train import error_report


def ended(this: Attempt, rank: int, returncode: int, cause: Cause = Cause.EXITED) -> None:
    this.write_exit(ExitRecord(rank_name(rank), returncode, cause, str(cause), now(), now()))
    this.log(rank_name(rank)).write_text(f"last words of {rank}\n")


def test_the_first_rank_that_failed_is_named_with_its_last_words(this: Attempt) -> None:
    ended(this, 1, -9)
    ended(this, 0, 1)  # later: it lost its peer
    error = failure_of(this, 2)
    assert isinstance(error, LaunchError)
    assert error.retryable
    assert "rank 1 of 2 was killed by SIGKILL (attempt 0001)" in str(error)
    assert str(this.log("rank-00001")) in str(error)
    assert "last words of 1" in str(error)


def test_a_rank_ended_by_its_guard_is_no_cause(this: Attempt) -> None:
    ended(this, 0, -15, Cause.TOLD)
    ended(this, 1, 3)
    assert "rank 1 of 2 ended with exit code 3" in str(failure_of(this, 2))


def test_a_rank_without_a_record_is_the_cause(this: Attempt) -> None:
    ended(this, 0, 1)
    assert "rank 1 of 2 left no exit record" in str(failure_of(this, 2))


def test_with_no_failed_rank_the_launcher_is_to_blame(this: Attempt) -> None:
    this.write_exit(ExitRecord("launcher", 0, Cause.EXITED, "exited", now(), now()))
    this.log("launcher").write_text("No module named deepspeed\n")
    message = str(failure_of(this, 2))
    assert "the launcher ended with exit code 0 before its ranks" in message
    assert "No module named deepspeed" in message


def test_a_reported_error_comes_back_as_itself(this: Attempt) -> None:
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
def test_a_tail_is_fit_for_a_terminal(this: Attempt, written: bytes, shown: str) -> None:
    this.log("rank-00000").write_bytes(written)
    assert tail(this.log("rank-00000")) == shown


def test_a_tail_is_short_however_long_the_log(this: Attempt) -> None:
    this.log("rank-00000").write_bytes(b"".join(b"%d %s\n" % (n, b"x" * 1000) for n in range(1000)))
    lines = tail(this.log("rank-00000")).splitlines()
    assert len(lines) <= 20
    assert lines[-1].startswith("  999 x")
    assert max(map(len, lines)) < 420

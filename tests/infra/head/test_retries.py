import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra.head.host_selection import with_spares
from infra.head.hosts.hostfile import Host, Hosts
from infra.head.retries import MOST_ALIKE, judged, unfit
from t5train.errors import DiskFull, HostLost, HostUnreachable, RankKilled, RepeatedFailure
from t5train.files.run_folder import FAILURES

HOSTS = Hosts((Host("a", (0, 1)), Host("b", (0, 1))))
SPARES = Hosts((Host("small", (0,)), Host("c", (0, 1, 2)), Host("d", (0, 1))))


def lost(host: str, seconds: int) -> HostLost:
    return HostLost(f"{host} has not responded for {seconds} s", [host])


def test_the_third_failure_that_differs_only_in_numbers_is_not_retried(tmp_path: Path) -> None:
    first, second = judged(tmp_path, lost("a", 61)), judged(tmp_path, lost("a", 60))
    assert first.retryable
    assert second.retryable
    third = judged(tmp_path, lost("a", 62))
    assert isinstance(third, RepeatedFailure)
    assert not third.retryable
    assert str(third) == "training failed 3 times in a row with this error: a has not responded for 62 s"


@pytest.mark.parametrize("between", ["another error", "another host", "a checkpoint"])
def test_identical_failures_with_something_else_in_between_are_retried(tmp_path: Path, between: str) -> None:
    for seconds in (60, 61):
        judged(tmp_path, lost("a", seconds))
    if between == "another error":
        judged(tmp_path, RankKilled("rank 0 of 4 on a", ["a"]))
    elif between == "another host":
        judged(tmp_path, lost("b", 60))
    else:
        (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    assert judged(tmp_path, lost("a", 62)).retryable


def test_a_host_that_failed_twice_is_named_and_replaced_by_a_spare_with_enough_slots(tmp_path: Path) -> None:
    judged(tmp_path, lost("a", 60))
    assert unfit(tmp_path) == {}
    judged(tmp_path, DiskFull("rank 3 of 4 on b", ["b"]))  # no attempt follows this failure
    error = judged(tmp_path, HostUnreachable("a: no answer", ["a"]))
    assert isinstance(error, HostUnreachable)
    assert str(error) == (
        "a has failed 2 times in the last week. Use --exclude a, or --spares to replace such hosts. "
        "The last failure: a: no answer"
    )
    assert unfit(tmp_path) == {"a": "has failed twice"}
    assert with_spares(HOSTS, SPARES, unfit(tmp_path)) == Hosts((Host("c", (0, 1)), Host("b", (0, 1))))
    assert with_spares(HOSTS, SPARES, {"a": "is", "c": "too"}) == Hosts((Host("d", (0, 1)), Host("b", (0, 1))))
    assert with_spares(HOSTS, Hosts(()), unfit(tmp_path)) == HOSTS


COMMAND = """
import sys
from pathlib import Path
from infra.head.retries import judged, unfit
from t5train.errors import OutOfMemory
error = judged(Path(sys.argv[1]), OutOfMemory("rank 0 of 4 on a", ["a"]), lambda host: sys.argv[2:] == [host])
print(type(error).__name__, error.retryable, sorted(unfit(Path(sys.argv[1]))), error, sep="|")
"""


def failed_command(run_folder: Path, *replaced: str) -> list[str]:
    command = [sys.executable, "-c", COMMAND, str(run_folder), *replaced]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split("|")


def test_a_host_that_runs_out_of_memory_in_two_commands_is_named_and_replaced(tmp_path: Path) -> None:
    assert failed_command(tmp_path) == ["OutOfMemory", "False", "[]", "rank 0 of 4 on a"]
    kind, again, hosts, text = failed_command(tmp_path)
    assert (kind, again, hosts) == ("OutOfMemory", "False", "['a']")
    assert text.startswith("a has failed 2 times in the last week. Use --exclude a, or --spares")
    assert failed_command(tmp_path, "a")[:3] == ["HostReplaced", "True", "['a']"]


def test_failures_of_other_commands_do_not_count_as_retries_of_this_one(tmp_path: Path) -> None:
    for _ in range(MOST_ALIKE):
        assert failed_command(tmp_path)[0] == "OutOfMemory"
    first = judged(tmp_path, lost("a", 60))
    assert first.retryable


def test_a_hosts_failures_expire_after_a_week_and_a_truncated_line_is_ignored(tmp_path: Path) -> None:
    for _ in range(2):
        judged(tmp_path, lost("a", 60))
    assert unfit(tmp_path) == {"a": "has failed twice"}
    recorded = (tmp_path / FAILURES).read_text("utf-8")
    (tmp_path / FAILURES).write_text(re.sub(r'"at": "\d+-', '"at": "2001-', recorded) + recorded[:40])
    assert unfit(tmp_path) == {}

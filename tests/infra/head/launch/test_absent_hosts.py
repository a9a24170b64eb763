"""A host that the head does not hear is blamed neither while the head was stopped, nor after its ranks have obeyed."""

import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from infra.head.hosts.agents import News
from infra.head.launch import earlier_attempts, supervision
from infra.head.launch.attempt_outcome import ClusterWatch
from infra.head.launch.supervision import Supervision
from infra.node.attempts import attempt
from infra.node.attempts.agent_messages import RankEnded, RankError
from infra.node.attempts.exit_record import Cause, ExitRecord
from t5train.errors import HostLost, LaunchError, Preempted, RankKilled, T5TrainError

HOSTS = {"a": (0,), "b": (0,)}
LEASE_SECONDS = 60.0


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervision]:
    """The supervision of an attempt on two hosts, whose agents do nothing."""
    (tmp_path / "head").mkdir()
    this = attempt.begin(tmp_path / "run", None, LEASE_SECONDS, HOSTS)
    supervised = Supervision(this, dict.fromkeys(HOSTS, Mock()), tmp_path / "head", dict.fromkeys(HOSTS, "1"))
    yield supervised
    supervised.close()


def be_silent(supervised: Supervision, host: str) -> None:
    supervised._hosts[host].last_message_at -= 2 * LEASE_SECONDS


def test_a_head_that_was_stopped_reads_what_arrived_meanwhile_before_a_host_counts_as_lost(
    supervised: Supervision, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_clock, stopped_seconds = time.monotonic, list[float]()

    def stopped(timeout: float) -> NoReturn:
        stopped_seconds.append(2 * LEASE_SECONDS)
        raise Empty

    clock = {"monotonic": lambda: own_clock() + sum(stopped_seconds)}
    monkeypatch.setattr(supervision, "time", SimpleNamespace(**vars(time) | clock))  # another thread uses it, too
    monkeypatch.setattr(supervised, "_news", SimpleNamespace(get=stopped))
    supervised.look(0)
    assert not supervised.silent
    monkeypatch.setattr(supervised, "_news", News())
    be_silent(supervised, "b")
    supervised.look(0)
    assert supervised.lost == ["b"]


@pytest.mark.parametrize(
    ("ended", "kind", "message"),
    [
        ((0, Cause.EXITED, "exited"), type(None), "None"),
        (
            (-9, Cause.HEAD, "no message from the head for 60 s"),
            LaunchError,
            r"the head did not run for 61 s.*lease_seconds \(60 s\).*SIGSTOP",
        ),
        ((-9, Cause.EXITED, "exited"), RankKilled, "rank 0 of 2 on a was killed by SIGKILL"),
    ],
)
def test_a_head_that_was_stopped_for_longer_than_the_lease_is_the_cause_if_ranks_ended_for_that_reason(
    supervised: Supervision, monkeypatch: pytest.MonkeyPatch, ended: Any, kind: type, message: str
) -> None:
    supervised.close()
    monkeypatch.setattr(supervised, "_closed", Mock(wait=Mock(side_effect=[False, True])))
    seconds = count(0.0, LEASE_SECONDS + 1)
    monkeypatch.setattr(supervision, "_clock", lambda: next(seconds))
    supervised._renew()
    for rank, host in enumerate(HOSTS):
        record = ExitRecord(attempt.rank_name(rank), *ended, "then", attempt.now(), host)
        supervised._news.put((host, time.monotonic(), RankEnded(record)))
    supervised.look(0)
    failure = ClusterWatch(supervised, Mock(), Mock(), lambda: None).failure()
    assert type(failure) is kind
    assert re.search(message, str(failure))
    assert getattr(failure, "hosts", ()) == (("a",) if kind is RankKilled else ())


def failure_without_answer_of_b(supervised: Supervision, monkeypatch: pytest.MonkeyPatch) -> T5TrainError | None:
    """The failure of the attempt if b does not answer when it is to be ended."""
    monkeypatch.setattr(earlier_attempts, "END_SECONDS", 0.0)
    monkeypatch.setattr(earlier_attempts, "end_on_hosts", lambda *_: {"b": "b: timed out"})
    monkeypatch.setattr(earlier_attempts, "settle", lambda *_: None)
    watch = ClusterWatch(supervised, Mock(), Mock(), lambda: None)
    watch.end()
    return watch.failure()


@pytest.mark.parametrize("has_b_saved", [True, False])
def test_a_host_that_is_gone_after_its_ranks_have_saved_as_ordered_is_not_blamed(
    supervised: Supervision, monkeypatch: pytest.MonkeyPatch, has_b_saved: bool
) -> None:
    for rank, host in enumerate(HOSTS):
        if host == "b" and not has_b_saved:
            continue
        name = attempt.rank_name(rank)
        record = ExitRecord(name, 1, Cause.REQUESTED, "SIGTERM", "then", attempt.now(), host)
        for report in (RankError(name, "Preempted", "saved step 7"), RankEnded(record)):
            supervised._news.put((host, time.monotonic(), report))
    supervised.look(0)
    failure = failure_without_answer_of_b(supervised, monkeypatch)
    assert failure is not None
    assert (type(failure), failure.hosts) == ((Preempted, ()) if has_b_saved else (HostLost, ("b",)))


def test_a_host_that_is_gone_after_its_ranks_have_saved_as_ordered_does_not_end_the_saves_of_others(
    supervised: Supervision,
) -> None:
    name = attempt.rank_name(1)
    record = ExitRecord(name, 1, Cause.REQUESTED, "SIGTERM", "then", attempt.now(), "b")
    for report in (RankError(name, "Preempted", "saved step 7"), RankEnded(record)):
        supervised._news.put(("b", time.monotonic(), report))
    supervised.look(0)
    be_silent(supervised, "b")
    supervised.look(0)
    assert supervised.lost == ["b"]
    assert not supervised.failed

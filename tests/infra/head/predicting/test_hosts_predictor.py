"""Hosts that share nothing predict all parts, and a lost, hanging or damaged one does not keep the others from it."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from infra.head.hosts.nodes import Nodes
from infra.head.predicting import hosts_predictor
from infra.head.predicting.hosts_predictor import HostsPredictor, evaluating_hosts, predicting_hosts
from infra.head.predicting.shared_parts import Heard, SharedParts
from infra.node.stages.predictor import FoundDevice, FromPredictor, PartPredicted, RowsPredicted
from t5train.errors import (
    HostError,
    HostKeyMismatch,
    HostMisconfigured,
    HostTimeout,
    HostUnreachable,
    RemoteFailed,
    SpecError,
    WorkerLost,
)
from t5train.inference.predict.prediction_worker import part_name
from t5train.progress import silent
from t5train.spec import MachinesSpec
from t5train.spec.recipes import recipe
from tests.support.parts_of_hosts import GIVEN_UP, ROWS_OF_PART
from tests.support.simulated_nodes import LocalHosts, Unsteady

PARTS = 5
Predict = Callable[[str], list[int]]


@pytest.fixture
def jobs(tmp_path: Path) -> list[dict[str, Any]]:
    """One job for each part, with a model and rows on this machine."""
    for folder, name in (("model", "config.json"), ("out", "rows.jsonl")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(folder)
    common = {"model": str(tmp_path / "model"), "folder": str(tmp_path / "out"), "device": "cpu"}
    return [common | {"parts": [part]} for part in range(PARTS)]


@pytest.fixture
def predict(local_hosts: LocalHosts, jobs: list[dict[str, Any]]) -> Predict:
    """``predict(name)`` has the hosts a and b do the jobs with the function of that name; returns reports of rows."""

    def predict(name: str) -> list[int]:
        nodes, rows = Nodes(local_hosts, ("a", "b")), list[int]()
        workers = HostsPredictor(nodes, {"a": (0,), "b": (0, 1)}, "cpu", 60, silent)
        assert len(list(workers(f"tests.support.parts_of_hosts:{name}", jobs, rows.append))) == PARTS
        return rows

    return predict


def parts(folder: Path) -> list[str]:
    return [(folder / part_name(part)).read_text() for part in range(PARTS)]


EXPECTED = [f"{part} out model cpu" for part in range(PARTS)]


def test_hosts_that_share_nothing_predict_all_parts_with_the_heads_model_and_rows(
    predict: Predict, tmp_path: Path
) -> None:
    assert sum(predict("write")) == PARTS * ROWS_OF_PART
    assert parts(tmp_path / "out") == EXPECTED


def test_parts_of_a_host_whose_process_is_killed_are_predicted_by_the_others_and_counted_once(
    predict: Predict,
    local_hosts: LocalHosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lose = SharedParts._lose

    def lose_and_tell(*given: Any) -> None:
        lose(*given)
        (local_hosts.folder / GIVEN_UP).touch()

    monkeypatch.setattr(SharedParts, "_lose", lose_and_tell)
    with caplog.at_level(logging.WARNING):
        assert sum(predict("die_on_b")) == PARTS * ROWS_OF_PART
    assert parts(tmp_path / "out") == EXPECTED
    (said,) = caplog.messages
    assert said.startswith("b: a worker process was killed by SIGKILL")
    assert said.endswith(". The other hosts predict its parts")


def test_a_host_that_hangs_does_not_hold_up_the_others(predict: Predict, tmp_path: Path) -> None:
    predict("hang_on_b")
    assert parts(tmp_path / "out") == EXPECTED


def test_when_no_host_is_left_the_error_has_the_reason_of_each(predict: Predict) -> None:
    with pytest.raises(WorkerLost, match=r"no host is left to predict: ((a|b): cuda:0 .*batch-tokens.?;? ?){2}.*kept"):
        predict("refuse")


class Sent:
    """A connection that records which parts a host is given."""

    def __init__(self) -> None:
        self.numbers = list[int]()

    def send(self, given: Any) -> None:
        self.numbers.append(given.number)


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def shared(
    jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *heard: tuple[str, FromPredictor]
) -> tuple[list[int], list[int], list[int]]:
    """Return which parts the hosts a and b are given, each with one process, and the reports of rows."""
    monkeypatch.setattr("infra.head.predicting.shared_parts.Channel", Sent)
    a, b, all_heard, rows = Sent(), Sent(), SimpleQueue[Heard](), list[int]()
    for host, what in (("a", a), ("b", b), *heard):
        all_heard.put(Heard(host, what))  # Sent stands for a Channel
    assert len(list(SharedParts(jobs, {"a": 1, "b": 1}, rows.append).results(all_heard))) == len(jobs)
    return a.numbers, b.numbers, rows


def test_a_part_that_arrives_damaged_is_predicted_by_another_host(
    jobs: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[str, FromPredictor]] = [
        ("a", RowsPredicted(0, 8)),
        ("a", PartPredicted(0, b"damaged", EMPTY)),
        ("a", RowsPredicted(0, 9)),
        ("b", PartPredicted(1, b"", EMPTY)),
        ("b", RowsPredicted(0, 10)),
        ("b", PartPredicted(0, b"", EMPTY)),
    ]
    assert shared(jobs[:2], monkeypatch, *heard) == ([0], [1, 0], [8, 2])
    assert (tmp_path / "out" / part_name(0)).read_bytes() == b""
    assert caplog.messages == [
        "a: a part arrived damaged. Check its memory and its network. The other hosts predict its parts"
    ]


def test_an_idle_host_gets_parts_that_nobody_has_then_those_that_others_have_begun(
    jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = [("b", PartPredicted(1, b"", EMPTY)), ("b", PartPredicted(2, b"", EMPTY))]
    last = [("a", PartPredicted(0, b"", EMPTY)), ("b", PartPredicted(0, b"", EMPTY))]
    assert shared(jobs[:3], monkeypatch, *heard, *last)[:2] == ([0], [1, 2, 0])


class Silent:
    """A transport to hosts that never answer."""

    def command(self, *_: object) -> list[str]:
        return ["sleep", "600"]


def test_a_host_that_is_silent_for_the_lease_is_given_up(
    jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_predictor, "_stage", lambda *_: hosts_predictor._Staged("run", "", ""))
    workers = HostsPredictor(Nodes(Silent(), ("a",)), {"a": (0,)}, "cpu", 0.0, silent)
    with pytest.raises(WorkerLost, match=r"a: nothing was received from the process that predicts there for 0 s"):
        list(workers("", jobs, int))


CUDA, CPU = FoundDevice("cuda", 80), FoundDevice("cpu", 4)
DOWN, UNKNOWN = HostUnreachable("c: no answer", ["c"]), HostKeyMismatch("c: its host key is unknown", ["c"])


def found(monkeypatch: pytest.MonkeyPatch, *lacking: HostError, **answers: Any) -> tuple[tuple[str, ...], FoundDevice]:
    """Return which hosts predict, and with what; to those named in ``lacking``, the code could not be sent."""
    monkeypatch.setattr(Nodes, "ask_each", lambda *_: answers)
    lost = {host: error for error in lacking for host in error.hosts}
    slots = dict.fromkeys([*answers, *lost], (0,))
    nodes, device = hosts_predictor._with_device(Nodes(Silent(), tuple(answers)), lost, slots, None)
    return nodes.hosts, device


def test_hosts_must_have_one_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, a=CUDA, b=FoundDevice("cuda", 40)) == (("a", "b"), FoundDevice("cuda", 40))
    with pytest.raises(SpecError, match=r"^a predicts on cuda, b predicts on cpu, but .*hostfile.*--device cpu\)$"):
        found(monkeypatch, a=CUDA, b=CPU)


def test_a_host_that_is_down_at_the_start_is_left_out_but_not_one_that_would_never_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeout = HostTimeout("b: timed out", ["b"])
    assert found(monkeypatch, DOWN, a=CPU, b=timeout) == (("a",), CPU)
    assert caplog.messages == [f"{error}. The other hosts predict its parts" for error in (DOWN, timeout)]
    with pytest.raises(WorkerLost, match=r"^no host is left to predict: c: no answer; b: timed out\. .*hostfile$"):
        found(monkeypatch, DOWN, b=timeout)
    with pytest.raises(HostKeyMismatch, match="its host key is unknown"):
        found(monkeypatch, UNKNOWN, a=CPU)
    with pytest.raises(HostMisconfigured, match="its name does not resolve"):
        found(monkeypatch, DOWN, a=CPU, b=HostMisconfigured("b: its name does not resolve", ["b"]))
    with pytest.raises(RemoteFailed, match="other packages"):
        found(monkeypatch, a=CPU, b=RemoteFailed("b: other packages", ["b"]))


def test_a_host_that_is_lost_before_it_has_the_model_does_not_keep_the_others_from_all_parts(
    predict: Predict, local_hosts: LocalHosts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(local_hosts, "command", Unsteady(LocalHosts(local_hosts.folder), "b").command)
    assert sum(predict("write")) == PARTS * ROWS_OF_PART
    assert parts(tmp_path / "out") == EXPECTED
    (said,) = caplog.messages
    assert said.startswith("b: the connection was lost")


def test_an_error_of_staging_that_names_no_host_ends_the_prediction_and_one_of_two_hosts_is_logged_once(
    jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [HostUnreachable("a and b were lost", ["a", "b"]), HostUnreachable("a host was lost")]
    monkeypatch.setattr(hosts_predictor, "_stage", Mock(side_effect=errors))
    workers = HostsPredictor(Nodes(Silent(), ("a", "b", "c")), dict.fromkeys("abc", (0,)), "cpu", 60, silent)
    with pytest.raises(HostUnreachable, match=r"^a host was lost$"):
        list(workers("", jobs, int))
    assert caplog.messages == ["a and b were lost. The other hosts predict its parts"]


def test_the_hosts_of_an_evaluation_are_its_own_and_reached_as_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock(side_effect=lambda *_: nullcontext())
    monkeypatch.setattr(hosts_predictor, "predicting_hosts", asked)
    of_training = {"hostfile": "/training", "include": "a", "spares": 1, "ssh_user": "me", "accelerator": "cpu"}
    spec = recipe("reverse_and_sort").with_settings({f"cluster.{name}": value for name, value in of_training.items()})
    with evaluating_hosts(spec, silent) as machines:
        assert machines is None
    asked.assert_not_called()
    with evaluating_hosts(spec.with_settings({"evaluate.hostfile": str(tmp_path / "own")}), silent):
        machines, device, _ = asked.call_args.args
    cluster = machines.cluster
    assert (cluster.hostfile, cluster.include, cluster.spares) == (tmp_path / "own", None, 0)
    assert (cluster.ssh_user, device) == ("me", "cpu")


def test_a_numbered_device_is_refused_before_the_hostfile_is_read() -> None:
    with (
        pytest.raises(SpecError, match=r"--device is cuda:1, but with --hostfile it must be a kind, such as cuda"),
        predicting_hosts(MachinesSpec(), "cuda:1", silent),
    ):
        pass

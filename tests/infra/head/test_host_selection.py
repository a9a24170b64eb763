"""Hosts that are down before a run begins are replaced by spares, or the run is refused with a remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.head import host_selection
from infra.head.host_selection import require_hosts, training_hosts
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.run_checks import require_possible
from infra.head.preflight.text_checks import NOT_READ
from infra.head.training_run import require_ready
from t5train.data.samples.loader import ORDER_VERSION
from t5train.errors import PreflightError
from t5train.records.stage_records import Checkpoint
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe

Spec = Callable[[int], RunSpec]
AskedHosts = tuple[list[tuple[str, ...]], set[str]]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """``spec(spares)``: the spec of a run with a hostfile of four hosts, of which the last ``spares`` are spares."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\nd slots=1\n", "utf-8")

    def spec(spares: int) -> RunSpec:
        settings = {"storage.root": tmp_path, "cluster.hostfile": tmp_path / "hosts"}
        as_text = {name: json.dumps(str(value)) for name, value in settings.items()}
        numbers = {"cluster.ranks": 4 - spares, "cluster.spares": spares, "optimizer.global_batch_sequences": 12}
        return recipe("smoke").with_settings({**as_text, **numbers, "layout.micro_batch_sequences": 1})

    return spec


@pytest.fixture
def asked_hosts(monkeypatch: pytest.MonkeyPatch) -> AskedHosts:
    """The hosts asked in each call of ``require_agreement``, and the set of hosts that do not answer."""
    calls: list[tuple[str, ...]] = []
    down = set[str]()

    def require_agreement(requirements: LaunchRequirements, _: Any) -> dict[str, str]:
        calls.append(tuple(requirements.slots))
        return {host: f"{host}: no answer" for host in requirements.slots if host in down}

    monkeypatch.setattr(host_selection, "require_agreement", require_agreement)
    return calls, down


def require(spec: RunSpec, **facts: Any) -> set[str]:
    return require_hosts(spec, require_possible(spec), NOT_READ, **facts)


def test_a_host_that_does_not_answer_is_replaced_by_a_spare_that_does(
    spec: Spec, asked_hosts: AskedHosts, caplog: pytest.LogCaptureFixture
) -> None:
    calls, down = asked_hosts
    down.update("bc")
    silent = require(spec(2))
    assert calls == [("a", "b"), ("a", "c"), ("a", "d")]
    assert caplog.messages[0] == "b: no answer"
    assert caplog.messages[-1] == "b does not answer: d takes its place"
    assert silent == {"b", "c"}
    assert training_hosts(spec(2), silent=silent).names == ("a", "d")


def test_without_a_spare_that_answers_the_run_is_refused_with_what_to_do(spec: Spec, asked_hosts: AskedHosts) -> None:
    calls, down = asked_hosts
    down.update("bd")
    with pytest.raises(PreflightError, match=r"b: no answer\n  d: no answer\nFix .*--exclude.*--spares"):
        require(spec(1))
    assert calls == [("a", "b", "c"), ("a", "d", "c")]
    down.clear()
    require(spec(1))


@pytest.mark.parametrize("spares", [0, 1])
def test_hosts_with_running_ranks_are_kept_even_if_they_do_not_answer(
    spec: Spec, asked_hosts: AskedHosts, spares: int
) -> None:
    calls, down = asked_hosts
    down.add("b")
    hosts = training_hosts(spec(spares))
    require(spec(spares), running=hosts)
    assert calls == []
    assert training_hosts(spec(spares), running=hosts) == hosts


def test_a_completed_run_does_not_check_its_hosts(spec: Spec, asked_hosts: AskedHosts) -> None:
    calls, _ = asked_hosts
    require_ready(spec(1))
    assert len(calls) == 1
    begin(spec(1).run_folder, spec(1), "f00d")
    require_ready(spec(1))
    assert len(calls) == 2
    Checkpoint(path=spec(1).run_folder, fingerprint="f00d", files={}, step=1, tag="step-00000001").commit()
    require_ready(spec(1))
    assert len(calls) == 2


def begin(run_folder: Path, spec: RunSpec, fingerprint: str) -> None:
    """Write ``run.json``, as if training had begun."""
    run_folder.mkdir(parents=True)
    identity = {"order_version": ORDER_VERSION, "optimizer": {"num_steps": spec.optimizer.num_steps}}
    begun = {"fingerprint": fingerprint, "identity": identity, "spec": spec.model_dump(mode="json")}
    (run_folder / "run.json").write_text(json.dumps(begun), "utf-8")

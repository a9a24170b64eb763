"""Real training on two CPU ranks with everything that can be recorded: tables, W&B offline, profiler traces."""

import csv
import gzip
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from t5train.records.metrics import read
from t5train.records.stage_records import TokenShards
from tests.support.training import wandb_files
from tests.support.training.launched import Trained, spec_of, train

pytestmark = pytest.mark.slow

WATCHED = {"monitor.csv": True, "monitor.wandb": True, "monitor.wandb_mode": "offline", "profile.steps": "2:3"}
NAMES = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "tokens_seen", "memory_bytes"}
NAMES |= {"data_wait_seconds", "skipped_steps"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """One run that is not watched, and one that is, which is killed after step 3 and resumes from step 2."""
    root = tmp_path_factory.mktemp("monitored")
    plain, watched = spec_of("zero1-fp32"), spec_of("zero1-fp32").with_settings(WATCHED)
    killed = watched.with_settings({"profile.steps": "2:4"})
    jobs: list[dict[str, Any]] = [
        {"name": "plain", "spec": plain.model_dump(mode="json"), "run_folder": f"{root}/plain"},
        {"name": "watched", "spec": watched.model_dump(mode="json"), "run_folder": f"{root}/watched"},
        {"name": "killed", "spec": killed.model_dump(mode="json"), "run_folder": f"{root}/killed", "stop_at": 3},
        {
            "name": "resumed",
            "spec": killed.model_dump(mode="json"),
            "run_folder": f"{root}/killed",
            "resume_tag": "step-00000002",
        },
    ]
    return train(root, jobs, pydocs_shards)


def table(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def annotated_steps(path: Path) -> set[str]:
    return {event["name"] for event in events(path) if re.fullmatch("step [0-9]+", event.get("name", ""))}


def test_watching_a_run_changes_neither_its_weights_nor_its_fingerprint(trained: Trained) -> None:
    assert trained.found("plain")["masters"] == trained.found("watched")["masters"]
    assert trained.found("plain")["masters"] == trained.found("resumed")["masters"]
    assert spec_of("zero1-fp32").fingerprint() == spec_of("zero1-fp32").with_settings(WATCHED).fingerprint()


def test_a_run_that_is_not_watched_has_none_of_these_files(trained: Trained) -> None:
    names = {path.name for path in (trained.root / "plain").iterdir()}
    assert not names & {"metrics.csv", "wandb", "profiles"}


def test_every_step_has_all_metrics_and_tokens_seen_add_up(trained: Trained) -> None:
    steps = [line for line in read(trained.root / "plain/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line.keys() >= NAMES for line in steps)
    a_step = steps[0]["tokens_seen"]
    assert isinstance(a_step, int)
    assert a_step > 16 * 32, "input and target tokens of 16 sequences"
    assert [line["tokens_seen"] for line in steps] == [step * a_step for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("name", ["watched", "killed"])
def test_the_table_has_what_metrics_jsonl_has(trained: Trained, name: str) -> None:
    lines, rows = read(trained.root / name / "metrics.jsonl"), table(trained.root / name / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines]
    for row, line in zip(rows, lines, strict=True):
        assert {column: str(line[column]) for column in row if line.get(column) is not None} == {
            column: value for column, value in row.items() if value
        }
    assert [int(row["step"]) for row in rows if row["loss"]] == [1, 2, 3, 4]


@pytest.mark.skipif(find_spec("wandb") is None, reason="the package wandb is not installed (make setup installs it)")
def test_wandb_has_what_metrics_jsonl_has(trained: Trained) -> None:
    (path,) = wandb_files.segments(trained.root / "watched")
    sent = wandb_files.history(path)
    expected: dict[int, dict[str, Any]] = {}
    for line in read(trained.root / "watched/metrics.jsonl"):
        values = {name: value for name, value in line.items() if name != "step" and value is not None}
        expected.setdefault(int(line["step"] or 0), {}).update(values)
    assert sent == {step: pytest.approx(values) for step, values in expected.items()}
    assert all(sent[step].keys() >= NAMES for step in (1, 2, 3, 4))


@pytest.mark.skipif(find_spec("wandb") is None, reason="the package wandb is not installed (make setup installs it)")
def test_the_attempts_of_a_resumed_run_are_one_wandb_run_with_each_step_once(trained: Trained) -> None:
    first, second = wandb_files.segments(trained.root / "killed")
    assert first.name == second.name
    steps = [list(wandb_files.history(path)) for path in (first, second)]
    assert sorted(steps[0] + steps[1]) == [0, 1, 2, 3, 4]


def test_the_trace_has_exactly_the_steps_that_were_asked_for(trained: Trained) -> None:
    (path,) = (trained.root / "watched/profiles").iterdir()
    assert path.name == "steps-00000002-00000003.trace.json.gz"
    assert annotated_steps(path) == {"step 2", "step 3"}
    assert any(event.get("name", "").startswith("aten::") for event in events(path))


def test_an_attempt_that_resumes_within_the_steps_records_those_that_are_left(trained: Trained) -> None:
    (path,) = (trained.root / "killed/profiles").iterdir()  # the attempt that was killed within them wrote nothing
    assert path.name == "steps-00000003-00000004.trace.json.gz"
    assert annotated_steps(path) == {"step 3", "step 4"}

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
from tests.support.training.launched import Trained, job, spec_of, train

pytestmark = pytest.mark.slow

WATCHED = {"monitor.csv": True, "monitor.wandb": True, "monitor.wandb_mode": "offline", "profile.steps": "2:3"}
NAMES = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "tokens_seen", "memory_bytes"}
NAMES |= {"data_wait_seconds", "skipped_steps"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """One run that is not watched, and one that is, which is killed after step 3 and resumes from step 2."""
    root = tmp_path_factory.mktemp("monitored")
    killed = WATCHED | {"profile.steps": "2:4"}
    resumed = {"run_folder": f"{root}/killed", "resume_tag": "step-00000002"}
    jobs = [
        job("plain", "zero1-fp32"),
        job("watched", "zero1-fp32", WATCHED),
        job("killed", "zero1-fp32", killed, stop_at=3),
        job("resumed", "zero1-fp32", killed, **resumed),
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


@pytest.mark.parametrize(("name", "first", "last"), [("watched", 2, 3), ("killed", 3, 4)])
def test_the_trace_has_exactly_the_steps_that_were_asked_for_and_are_left_after_a_resume(
    trained: Trained, name: str, first: int, last: int
) -> None:
    (path,) = (trained.root / name / "profiles").iterdir()  # an attempt that is killed within them writes nothing
    assert path.name == f"steps-{first:08d}-{last:08d}.trace.json.gz"
    assert annotated_steps(path) == {f"step {first}", f"step {last}"}
    assert any(event.get("name", "").startswith("aten::") for event in events(path))

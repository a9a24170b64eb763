"""A stage of the flow is noted in the record of the run's start, and in the errors that end it."""

import json
from pathlib import Path

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.launch.start_record import read_start
from t5train.errors import InputError
from t5train.report.failure_report import Failure
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tasks.stages import (
    CERTIFY,
    CORPUS,
    EVALUATE,
    EXPORT,
    PAIR_SHARDS,
    PAIRS,
    PUBLISH,
    SHARDS,
    TRAIN,
    numbered,
    stage_task,
)


@stage_task(CORPUS)
def make_text(spec: RunSpec) -> str:
    return getattr(read_start(spec.run_folder), "stage", None) or ""


@stage_task(TRAIN)
def fail(_spec: RunSpec) -> None:
    raise InputError("no text")


@stage_task(TRAIN)
def fail_unexpectedly() -> None:
    raise ValueError("caf\udce9.txt")


def test_the_message_of_any_error_can_be_sent_to_the_server() -> None:
    with pytest.raises(ValueError, match=r"^caf\\udce9\.txt"):
        fail_unexpectedly.fn()


def test_the_record_of_the_start_names_the_stage_that_works(tmp_path: Path) -> None:
    spec = recipe("smoke", {"storage.root": json.dumps(str(tmp_path))})
    with hold_run(spec.run_folder):
        assert make_text.fn(spec) == "Get the text"
        with pytest.raises(InputError) as raised:
            fail.fn(spec)
    assert Failure.of(raised.value).stage == "Train"
    found = read_start(spec.run_folder)
    assert found is not None
    assert found.stage == "Train"


def test_stages_of_both_flows_are_numbered_alike() -> None:
    stages = (CORPUS, SHARDS, PAIRS, PAIR_SHARDS, TRAIN, PUBLISH)
    of_text, of_pairs = ["2/9 Get the text", "4/9 Tokenise"], ["2/9 Get the pairs", "4/9 Tokenise and pack"]
    found = [numbered(stage, predicts=False) for stage in stages]
    assert found == [*of_text, *of_pairs, "5/9 Train", "9/9 Publish"]


def test_a_run_that_predicts_held_out_pairs_has_one_stage_more() -> None:
    found = [numbered(stage, predicts=True) for stage in (PAIRS, EXPORT, EVALUATE, CERTIFY, PUBLISH)]
    assert [each.split()[0] for each in found] == ["2/10", "7/10", "8/10", "9/10", "10/10"]

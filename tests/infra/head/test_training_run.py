"""What is required before training starts: disk space, and the lock of the run itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from infra.head import training_run
from infra.head.launch.held_run import hold_run
from infra.head.storage.staged_bytes import StagedBytes
from infra.head.training_run import hold_ready_run, require_destination, require_ready
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.errors import RunLocked, SpecError, StorageError, StoreError
from t5train.files.run_folder import CHECKPOINTS
from t5train.model.model_shape import count_parameters, resolve
from t5train.progress import silent
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.checkpoints import small_tags

RUN = {"optimizer.num_steps": 100, "storage.checkpoint_every_steps": 10, "storage.keep_last": 2}
SMOKE = recipe("smoke")
PARAMETERS = count_parameters(resolve(SMOKE.model, expected_vocab_size(SMOKE.tokenizer)))
CHECKPOINT = 16 * PARAMETERS
REST = 3 * 4 * PARAMETERS + (32 << 20) + 512 * 100


def required_bytes(root: Path, **storage: Any) -> int:
    """The bytes that must be free under the root."""
    settings = {f"storage.{name}": json.dumps(value) for name, value in storage.items()}
    with (
        patch.object(training_run, "require_free_space", side_effect=StorageError("full")) as require_free_space,
        pytest.raises(StorageError),
    ):
        require_ready(_spec(root).with_settings(settings))
    _, size_bytes, _ = require_free_space.call_args.args
    return int(size_bytes)


def _spec(root: Path) -> RunSpec:
    return SMOKE.with_settings(RUN | {"storage.root": json.dumps(str(root)), "name": "it"})


def test_a_run_is_not_trained_while_another_one_is_held(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    other = spec.with_settings({"name": "other"})
    words = rf"{other.run_folder} is locked .* of the run {spec.run_folder}\. Start the run"
    with hold_run(other.run_folder) as held, pytest.raises(SpecError, match=words):
        hold_ready_run(spec, held).__enter__()


@pytest.mark.parametrize("place", ["_lease", "claim", "copies"])
def test_training_ends_when_another_head_takes_over_the_run(tmp_path: Path, place: str) -> None:
    spec, superseded = _spec(tmp_path), Mock()
    superseded.require_kept.side_effect = RunLocked("taken over by far")

    def launch(_: object, on_tick: Callable[[], None]) -> None:
        on_tick()
        setattr(held, place, superseded)
        on_tick()
        pytest.fail("it went on")

    with hold_run(spec.run_folder) as held, patch.object(training_run, "launch", launch):
        training = training_run._Training(spec, Mock(), held, silent, Mock(), adopt=False, staged=StagedBytes())
        with pytest.raises(RunLocked, match="taken over by far"):
            training.to_the_end()


def test_a_run_needs_disk_space_for_the_checkpoints_that_it_will_keep_and_does_not_have(tmp_path: Path) -> None:
    assert required_bytes(tmp_path) == 3 * CHECKPOINT + REST
    assert required_bytes(tmp_path, keep_every_steps=20) == 6 * CHECKPOINT + REST
    assert required_bytes(tmp_path, keep_every_steps=20, checkpoint_gigabytes=0.1) == 100_000_000 + REST
    assert required_bytes(tmp_path, keep_every_steps=20, checkpoint_gigabytes=0.01) == 2 * CHECKPOINT + REST
    assert required_bytes(tmp_path, checkpoint_every_steps=100) == CHECKPOINT + REST
    stored = {"publish_checkpoints_under": "s3://bucket/runs"}
    assert required_bytes(tmp_path, **stored) == 4 * CHECKPOINT + REST, "one more is kept while it is stored"
    folder = tmp_path / "runs/it/checkpoints/step-00000010"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(1_000_000))
    assert required_bytes(tmp_path) == 3 * CHECKPOINT + REST - 1_000_000


def test_hosts_that_cannot_predict_after_training_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"source": "a", "target": "b"}\n' * 9)
    pairs = {"pairs.train": [f"{tmp_path}/pairs.jsonl"], "evaluate.hostfile": f"{tmp_path}/none"}
    spec = _spec(tmp_path).with_settings(pairs)
    with pytest.raises(SpecError, match=f"{tmp_path}/none: No such file or directory"):
        require_ready(spec)
    require_ready(spec.with_settings({"evaluate.max_pairs": 0}))
    monkeypatch.setattr("infra.head.training_run.has_finished", lambda _: True)
    require_ready(spec)  # its evaluation asks them if there is still something to predict


def test_a_store_that_does_not_answer_keeps_only_a_run_without_checkpoints_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec, busy = _spec(tmp_path), StoreError("s3://bucket cannot be read: the server is busy", code="SlowDown")
    monkeypatch.setattr(training_run, "check_destination", Mock(side_effect=busy))
    of_model = resolve(spec.model, expected_vocab_size(spec.tokenizer))
    with pytest.raises(StoreError):
        require_destination(spec, of_model)
    small_tags.save(spec.run_folder / CHECKPOINTS, 10)
    require_destination(spec, of_model)
    assert "the run cannot be published now: s3://bucket cannot be read" in caplog.text

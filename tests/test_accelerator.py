"""The chain on real accelerators, as many ranks as there are of them (at most four)."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infra.attempt import attempt_folder, rank_name, read
from infra.processes import find, in_run
from infra.run_lock import run_lock
from t5train.certify import certify_in_fresh_process
from t5train.consolidate import consolidate
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.errors import LaunchError, NonFiniteLoss, TooManySkippedSteps
from t5train.export import export
from t5train.recipes import recipe
from t5train.records import Checkpoint, TokenizerFiles, TokenShards
from t5train.spec import RunSpec
from t5train.train import metrics
from tasks.training_run import train_run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS = {
    "tokenizer.vocab_size": 2000,
    "objective.input_tokens": 128,
    "optimizer.num_steps": 20,
    "optimizer.warmup_steps": 5,
    "optimizer.global_batch_sequences": 64,
    "layout.micro_batch_sequences": 8,
    "storage.checkpoint_every_steps": 10,
    "storage.validate_sequences": 64,
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerFiles, TokenShards]:
    root = tmp_path_factory.mktemp("data")
    spec = recipe("small").with_settings({**SETTINGS, "shards.shard_tokens": 100_000})
    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return tokenizer, build_shards(spec.shards, spec.corpus, corpus, tokenizer, root)


def _spec(root: Path, **settings: Any) -> RunSpec:
    import torch

    ranks = min(4, torch.accelerator.device_count())
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return recipe("small").with_settings(
        {**SETTINGS, "storage.root": str(root), "cluster.ranks": ranks, "model.compile": False, **changes}
    )


def _train(spec: RunSpec, shards: TokenShards) -> Checkpoint:
    with run_lock(spec.run_folder):
        return train_run(spec, shards)


@pytest.mark.parametrize(
    ("precision", "zero_stage", "version", "compile_model"),
    [
        ("bf16", 0, "v1.1", False),
        ("bf16", 1, "v1.0", False),
        ("bf16", 2, "v1.1", True),
        ("fp32", 1, "v1.1", False),
        ("fp16", 1, "v1.1", False),
        ("fp16", 2, "v1.1", False),
    ],
)
def test_what_was_trained_on_an_accelerator_is_certified_bit_equal_there(
    tmp_path: Path,
    data: tuple[TokenizerFiles, TokenShards],
    precision: str,
    zero_stage: int,
    version: str,
    compile_model: bool,
) -> None:
    tokenizer, shards = data
    settings = {"optimizer__precision": precision, "layout__zero_stage": zero_stage, "model__version": version}
    spec = _spec(tmp_path, model__compile=compile_model, **settings)
    checkpoint = _train(spec, shards)
    weights = consolidate(spec.run_folder / "checkpoints", tmp_path / "weights", tag=checkpoint.tag)
    exported = export(weights, tokenizer, spec.run_folder / "witness", spec, tmp_path / "export")
    certified = certify_in_fresh_process(exported, spec.run_folder / "witness")
    certificate = json.loads((certified.path / "certificate.json").read_text())
    assert certificate["passed"]
    assert all(probe["bit_equal"] for probe in certificate["probes"].values())
    losses = [line["loss"] or 0.0 for line in metrics.read(spec.run_folder / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0] - 1


def test_fp16_that_cannot_train_ends_with_a_clear_error(
    tmp_path: Path, data: tuple[TokenizerFiles, TokenShards]
) -> None:
    spec = _spec(
        tmp_path,
        optimizer__precision="fp16",
        layout__zero_stage=1,
        optimizer__num_steps=200,
        optimizer__peak_learning_rate=1.0,
        optimizer__gradient_clip=0,
        optimizer__initial_scale_power=32,
    )
    with pytest.raises((TooManySkippedSteps, NonFiniteLoss)):
        _train(spec, data[1])


def test_a_rank_that_is_killed_ends_the_others_and_the_run_resumes(
    tmp_path: Path, data: tuple[TokenizerFiles, TokenShards]
) -> None:
    spec = _spec(tmp_path, optimizer__num_steps=30)
    attempt = attempt_folder(spec.run_folder, 1)
    victim = attempt / f"{rank_name(spec.cluster.ranks - 1)}.pid"

    def kill_after_a_checkpoint(what: str, done: int, total: int | None) -> None:
        if done > 10 and victim.exists() and not (attempt / "killed").exists():
            os.kill(json.loads(victim.read_text())["process"]["pid"], signal.SIGKILL)
            (attempt / "killed").touch()

    with run_lock(spec.run_folder), pytest.raises(LaunchError, match="SIGKILL"):
        train_run(spec, data[1], kill_after_a_checkpoint)
    assert not find(in_run(read(attempt).run_id))
    assert _train(spec, data[1]).step == 30
    again = json.loads((attempt_folder(spec.run_folder, 2) / "spec.json").read_text())
    assert again["resume_tag"] in {"step-00000010", "step-00000020"}

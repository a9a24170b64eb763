"""Training, export and certification on real accelerators, with one rank on each (at most four)."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.training_run import train_run
from infra.node.attempts.attempt import attempt_folder, rank_name, read
from infra.node.processes import find, in_run
from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.resume_point import last_complete
from t5train.data.corpus import build_corpus
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import LaunchError, NonFiniteLoss, TooManySkippedSteps
from t5train.records import metrics
from t5train.records.stage_records import Checkpoint, Export, PairShards, TokenizerFiles, TokenShards
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe

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
    "model.num_layers": 2,
    "model.num_decoder_layers": 2,
}


EXPERTS = {"model__version": "v1.0", "model__moe__num_experts": 4}
EVERY_RANK = "every rank"
LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16-zero0": {"optimizer__precision": "bf16", "layout__zero_stage": 0},
    "bf16-zero1-v1.0": {"optimizer__precision": "bf16", "layout__zero_stage": 1, "model__version": "v1.0"},
    "bf16-zero2": {"optimizer__precision": "bf16", "layout__zero_stage": 2},
    "bf16-zero2-compiled": {"optimizer__precision": "bf16", "layout__zero_stage": 2, "model__compile": True},
    "bf16-experts-compiled": {"optimizer__precision": "bf16", **EXPERTS, "model__compile": True},
    "bf16-pipeline-compiled": {
        "optimizer__precision": "bf16",
        "layout__zero_stage": 1,
        "layout__pipeline_stages": 2,
        "model__compile": True,
    },
    "fp32-zero1": {"optimizer__precision": "fp32", "layout__zero_stage": 1},
    "fp16-zero1": {"optimizer__precision": "fp16", "layout__zero_stage": 1},
    "fp16-zero2": {"optimizer__precision": "fp16", "layout__zero_stage": 2},
}
IN_BF16_AND_FP16: dict[str, dict[str, Any]] = {
    "zero1-offload": {"layout__zero_stage": 1, "layout__offload": "optimizer"},
    "zero2-offload": {"layout__zero_stage": 2, "layout__offload": "optimizer", "layout__pin_memory": True},
    "zero3": {"layout__zero_stage": 3},
    "zero3-offload-all": {"layout__zero_stage": 3, "layout__offload": "all", "layout__pin_memory": True},
    "experts": {"layout__zero_stage": 2, **EXPERTS},
    "experts-spread": {"layout__zero_stage": 2, **EXPERTS, "layout__expert_parallel_size": EVERY_RANK},
    "pipeline": {"layout__zero_stage": 1, "layout__pipeline_stages": 2},
    "recomputed": {"layout__zero_stage": 2, "model__activation_checkpointing": True},
}
LAYOUTS |= {
    f"{precision}-{name}": {"optimizer__precision": precision, **settings}
    for precision in ("bf16", "fp16")
    for name, settings in IN_BF16_AND_FP16.items()
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
    if ranks % settings.get("layout__pipeline_stages", 1):
        pytest.skip("a pipeline of two stages needs an even number of accelerators")
    changes = {key.replace("__", "."): ranks if value is EVERY_RANK else value for key, value in settings.items()}
    return recipe("small").with_settings(
        {**SETTINGS, "storage.root": str(root), "cluster.ranks": ranks, "model.compile": False, **changes}
    )


def _train(spec: RunSpec, shards: TokenShards | PairShards) -> Checkpoint:
    with hold_run(spec.run_folder) as run:
        return train_run(spec, shards, run)


def _losses(spec: RunSpec) -> dict[int, float]:
    lines = metrics.read(spec.run_folder / "metrics.jsonl")
    return {int(line["step"] or 0): float(line["loss"] or 0) for line in lines if "loss" in line}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_trained_on_an_accelerator_is_certified_there(
    tmp_path: Path, data: tuple[TokenizerFiles, TokenShards], layout: str
) -> None:
    spec = _spec(tmp_path, **LAYOUTS[layout])
    _train_and_certify(spec, *data, tmp_path)
    losses = _losses(spec)
    assert losses[20] < losses[1] - 1


def _train_and_certify(
    spec: RunSpec, tokenizer: TokenizerFiles, shards: TokenShards | PairShards, folder: Path, start: str | None = None
) -> Export:
    checkpoint = _train(spec, shards)
    weights = consolidate(spec.run_folder / "checkpoints", folder / "weights", tag=checkpoint.tag, start_from=start)
    exported = export(weights, tokenizer, spec.run_folder / "witness", spec, folder / "export")
    certificate = certify(exported.path, spec.run_folder / "witness", start_from=start)
    assert certificate.passed
    assert certificate.device == certificate.witness_device != "cpu"
    assert certificate.relative_tolerance == (1e-5 if spec.model.moe.num_experts else 0)
    return exported


@pytest.mark.parametrize("layout", ["fp16-zero1", "fp16-zero3", "fp16-experts-spread"])
def test_fp16_that_cannot_train_ends_with_a_clear_error(
    tmp_path: Path, data: tuple[TokenizerFiles, TokenShards], layout: str
) -> None:
    spec = _spec(
        tmp_path,
        **LAYOUTS[layout],
        optimizer__num_steps=200,
        optimizer__peak_learning_rate=1.0,
        optimizer__gradient_clip=0,
        optimizer__initial_scale_power=32,
    )
    with pytest.raises((TooManySkippedSteps, NonFiniteLoss)):
        _train(spec, data[1])


KILLED = [
    "bf16-zero2-compiled",
    "bf16-experts-compiled",
    "bf16-zero2",
    "bf16-zero3-offload-all",
    "bf16-experts-spread",
    "bf16-pipeline",
    "bf16-pipeline-compiled",
]
KILLED_STEPS = 200
"""So many that no run ends before its first checkpoint is complete and a rank is killed."""


@pytest.mark.parametrize("layout", KILLED)
def test_a_killed_rank_ends_the_others_and_the_run_resumes_from_its_last_checkpoint(
    tmp_path: Path, data: tuple[TokenizerFiles, TokenShards], layout: str
) -> None:
    _kill_and_resume(_spec(tmp_path, **LAYOUTS[layout], optimizer__num_steps=KILLED_STEPS), data[1])


def _kill_and_resume(spec: RunSpec, shards: TokenShards | PairShards) -> None:
    attempt = attempt_folder(spec.run_folder, 1)
    victim = attempt / f"{rank_name(spec.cluster.ranks - 1)}.pid"

    def kill_after_a_checkpoint(what: str, done: int, total: int | None) -> None:
        has_saved = last_complete(spec.run_folder) is not None  # saves end while later steps run
        if has_saved and victim.exists() and not (attempt / "killed").exists():
            os.kill(json.loads(victim.read_text())["process"]["pid"], signal.SIGKILL)
            (attempt / "killed").touch()

    with hold_run(spec.run_folder) as run, pytest.raises(LaunchError, match="SIGKILL"):
        train_run(spec, shards, run, kill_after_a_checkpoint)
    assert not find(in_run(read(attempt).run_id))
    first_losses = _losses(spec)
    assert _train(spec, shards).step == KILLED_STEPS
    second_job = json.loads((attempt_folder(spec.run_folder, 2) / "spec.json").read_text())
    resumed = int(second_job["resume_tag"].removeprefix("step-"))
    repeated = {step: loss for step, loss in first_losses.items() if step > resumed}
    # Accelerator kernels sum in no fixed order, so losses are not bit-identical.
    assert {step: _losses(spec)[step] for step in repeated} == pytest.approx(repeated, rel=0.01)


PAIRS = {
    "pairs__train": ["reverse_digits", "sort_digits"],
    "tokenizer__vocab_size": 30,
    "pairs__input_tokens": 128,
    "pairs__target_tokens": 128,
    "model__dropout_rate": 0.1,
    "optimizer__kind": "adamw",
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerFiles, PairShards]:
    root = tmp_path_factory.mktemp("pairs")
    spec = _spec(root, **PAIRS)
    built = build_pairs(spec.pairs, root)
    tokenizer = build_pairs_tokenizer(spec.tokenizer, built, root)
    return tokenizer, build_pair_shards(spec.pairs, built, tokenizer, root)


def test_a_model_fine_tuned_on_pairs_is_certified_on_an_accelerator_and_so_are_adapters_on_it(
    tmp_path: Path, pairs: tuple[TokenizerFiles, PairShards]
) -> None:
    """With the attention kernels of pairs, dropout, and CUDA graphs; for adapters at ZeRO 3, without graphs."""
    whole = _spec(tmp_path, **PAIRS, **LAYOUTS["bf16-zero2-compiled"])
    exported = _train_and_certify(whole, *pairs, tmp_path)
    lora = {"finetune__lora__rank": 4, "finetune__lora__dropout": 0.1, "model__start_from": str(exported.path)}
    adapted = _spec(tmp_path, **PAIRS, **LAYOUTS["bf16-zero3"], **lora, name="adapted")
    (tmp_path / "adapted").mkdir()
    _train_and_certify(adapted, *pairs, tmp_path / "adapted", str(exported.path))


def test_a_killed_rank_on_pairs_resumes_from_its_last_checkpoint(
    tmp_path: Path, pairs: tuple[TokenizerFiles, PairShards]
) -> None:
    _kill_and_resume(
        _spec(tmp_path, **PAIRS, **LAYOUTS["bf16-zero2-compiled"], optimizer__num_steps=KILLED_STEPS), pairs[1]
    )

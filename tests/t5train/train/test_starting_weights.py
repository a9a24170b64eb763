"""Runs that start from the weights of a Hugging Face folder, on real ranks in every kind of layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from t5train.checkpoint.consolidate import consolidate
from t5train.engine.collectives import digest64
from t5train.model.starting_model import require_fit
from t5train.records.metrics import read
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from tests.support.training.launched import Trained, spec_of, train

pytestmark = pytest.mark.slow

VOCABULARY = 640  # rows for the 600 ids of the shards' tokenizer
LAYOUTS = {
    "zero0-fp32": "v1.1",
    "zero0-bf16": "v1.1",
    "zero1-bf16": "v1.0",
    "zero2-bf16-offload": "v1.1",
    "zero3-fp32": "v1.0",
    "zero3-bf16-offload": "v1.1",
    "zero2-fp32-ep2": "switch",
    "zero1-bf16-ep1": "switch",
    "zero1-fp32-pp2": "v1.0",
    "zero1-bf16-pp2": "v1.1",
}


def _model(family: str) -> PreTrainedModel:
    """A random model whose values bf16 cannot represent exactly."""
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    if family == "switch":
        sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        return SwitchTransformersForConditionalGeneration(
            SwitchTransformersConfig(vocab_size=VOCABULARY, **sizes, **sparse)
        )
    if family == "v1.0":
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes))
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes)
    )
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model


def _starting(layout: str, folder: Path) -> RunSpec:
    settings = {"model.start_from": str(folder), "model.dropout_rate": 0.0}
    version = {} if LAYOUTS[layout] == "switch" else {"model.version": LAYOUTS[layout]}
    return spec_of(layout, num_steps=6, saved_every=3).with_settings(settings | version)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Two steps in each layout. One layout is also killed after its first checkpoint and resumed. All in one launch."""
    root = tmp_path_factory.mktemp("starting")
    for family in set(LAYOUTS.values()):
        # Several files, as large published models have.
        _model(family).save_pretrained(root / family, max_shard_size="200KB")
    jobs: list[dict[str, Any]] = []
    for layout, family in LAYOUTS.items():
        spec = _starting(layout, root / family)
        require_fit(spec.model, int(pydocs_shards.counts["vocab_size"]))
        jobs.append({"name": layout, "spec": spec.model_dump(mode="json"), "stop_at": 2})
    whole = {"spec": jobs[0]["spec"]}
    jobs += [
        {"name": "whole", **whole},
        {"name": "killed", **whole, "stop_at": 4},
        {"name": "resumed", **whole, "resume_tag": "step-00000003", "run_folder": f"{root}/killed"},
    ]
    return train(root, jobs, pydocs_shards)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_masters_are_bit_equal_to_the_files(trained: Trained, layout: str, tmp_path: Path) -> None:
    expected = {name: tensor.detach() for name, tensor in _model(LAYOUTS[layout]).named_parameters()}
    digests = {name: digest64(tensor.numpy().tobytes()) for name, tensor in expected.items()}
    assert all(trained.found(layout, rank)["begun"] == digests for rank in (0, 1))
    # Consolidation also compares the masters, rounded to the module's type, with the module's own weights.
    consolidate(trained.root / layout / "checkpoints", tmp_path / "weights", tag="step-00000000")
    found = load_file(tmp_path / "weights/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_every_layout_has_the_same_losses_from_the_same_starting_weights(trained: Trained) -> None:
    for family in ("v1.0", "v1.1", "switch"):
        runs = [read(trained.root / f"{layout}/metrics.jsonl") for layout, of in LAYOUTS.items() if of == family]
        losses = [[line["loss"] for line in run if "loss" in line] for run in runs]
        assert all(len(each) == 2 for each in losses)
        assert all(each == pytest.approx(losses[0], rel=5e-3) for each in losses)


def test_a_killed_run_resumes_from_its_checkpoint_and_not_from_the_starting_weights(trained: Trained) -> None:
    assert trained.found("killed")["error"] == "StopTraining"
    assert trained.found("whole")["masters"] == trained.found("resumed")["masters"]


def test_the_witness_records_the_starting_model(trained: Trained) -> None:
    witness = json.loads((trained.root / "whole/witness/witness.json").read_text())
    assert witness["inputs"]["start_from"] == "5" * 64

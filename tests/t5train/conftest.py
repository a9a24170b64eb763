"""What export, certification and publication start from, made without training: a random model and its witness."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, T5Tokenizer

from t5train.certify import certify
from t5train.export import export
from t5train.model.shape import huggingface_config, resolve
from t5train.recipes import recipe
from t5train.records import Export, TokenizerFiles, Weights, digest_file, digest_files
from t5train.spec import RunSpec

SHAPE = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 2, "num_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "v1.0": {"model.version": "v1.0"},
    "v1.1": {"model.version": "v1.1"},
    "switch": {"model.version": "v1.0", "model.moe.num_experts": 3},
}
PIECES = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁a", "▁of", "s", "e", "t"]


class Trained(NamedTuple):
    """Everything that ``export`` takes."""

    weights: Weights
    tokenizer: TokenizerFiles
    witness: Path
    spec: RunSpec


MakeTrained = Callable[..., Trained]


@pytest.fixture
def make_trained(tmp_path: Path) -> MakeTrained:
    """A random T5 of a version, or with experts ("switch"), as training and consolidation would leave it."""

    def make(version: str = "v1.1", num_files: int = 1) -> Trained:
        settings = {"name": "made", **FAMILIES[version], **{f"model.{key}": SHAPE[key] for key in SHAPE}}
        spec = recipe("smoke").with_settings(settings)
        tokenizer = _tokenizer(tmp_path / "tokenizer")
        config = huggingface_config(resolve(spec.model, int(tokenizer.counts["vocab_size"])), pad_id=0, eos_id=1)
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).eval()
        if version == "v1.1":  # transformers begins with a tied one
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
        weights = _weights(tmp_path / "run/weights", dict(model.named_parameters()), num_files)
        _witness(tmp_path / "run/witness", model, config)
        return Trained(weights, tokenizer, tmp_path / "run/witness", spec)

    return make


@pytest.fixture
def make_export(make_trained: MakeTrained, tmp_path: Path) -> Callable[..., Export]:
    """An export that is certified, in this process, unless it is asked not to be."""

    def make(version: str = "v1.1", *, certified: bool = True) -> Export:
        trained = make_trained(version)
        exported = export(*trained, tmp_path / "run/export")
        if not certified:
            return exported
        certify(exported.path, trained.witness)
        files = exported.files | digest_files(exported.path, ["certificate.json"])
        return exported.model_copy(update={"files": files}).commit()

    return make


def _tokenizer(folder: Path) -> TokenizerFiles:
    sentinels = [f"<extra_id_{index}>" for index in reversed(range(100))]
    pieces = [(piece, -float(score)) for score, piece in enumerate(PIECES + sentinels)]
    tokenizer = T5Tokenizer(vocab=pieces)
    tokenizer.save_pretrained(folder)
    return TokenizerFiles(
        path=folder,
        fingerprint="1" * 64,
        inputs={"corpus": "0" * 64},
        files=digest_files(folder, ["tokenizer.json", "tokenizer_config.json"]),
        counts={"vocab_size": len(tokenizer)},
    ).commit()


def _weights(folder: Path, parameters: dict[str, torch.Tensor], num_files: int) -> Weights:
    folder.mkdir(parents=True)
    names = sorted(parameters)
    files = ["model.safetensors"]
    if num_files > 1:
        files = [f"model-{index + 1:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]
    place = {name: files[index % num_files] for index, name in enumerate(names)}
    for file in files:
        tensors = {name: parameters[name].detach() for name in names if place[name] == file}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if num_files > 1:
        index = {"metadata": {}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.tensors.json").write_text("{}")
    digests = {path.name: digest_file(path) for path in folder.iterdir()}
    return Weights(path=folder, fingerprint="2" * 64, inputs={"run": "3" * 64}, files=digests).commit()


def _witness(folder: Path, model: PreTrainedModel, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for probe in ("random", "heldout"):
        inputs = {key: torch.randint(0, 110, (2, 9)) for key in ("input_ids", "decoder_input_ids")}
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits
        tensors |= {f"{probe}.{key}": value for key, value in {**inputs, "logits": logits}.items()}
    save_file(tensors, folder / "witness.safetensors")
    digests = {
        name: {
            "shape": list(parameter.shape),
            "sha256": hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest(),
        }
        for name, parameter in model.named_parameters()
    }
    witness = {
        "schema_version": 1,
        "run_fingerprint": "3" * 64,
        "step": 7,
        "tag": "step-00000007",
        "device_type": "cpu",
        "num_threads": torch.get_num_threads(),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": digests,
        "ties": {"lm_head.weight": "shared.weight"} if config["tie_word_embeddings"] else {},
        "huggingface_config": config,
        "probes": ["random", "heldout"],
        "validation": {"validation_loss": 4.5678, "validation_sequences": 12},
        "inputs": {"shards": "4" * 64},
    }
    (folder / "witness.json").write_text(json.dumps(witness))

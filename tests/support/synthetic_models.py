"""Inputs of export and certification, made without training: a random model, a real tokenizer and a witness."""

import hashlib
import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from t5train.checkpoint.consolidate.tensor_writer import index_name
from t5train.data.vocabulary.held_out import choose
from t5train.data.vocabulary.sentencepiece_model import Encoder, train
from t5train.data.vocabulary.tokenizer import SPIECE, Tokenizer, write_hugging_face_files
from t5train.files.atomic import write_json
from t5train.model.lora import ADAPTERS, LORA_A, LORA_B, merged
from t5train.model.model_shape import generation_config, huggingface_config, resolve
from t5train.model.starting_model import start_fingerprint, start_name
from t5train.records.digests import digest_file, digest_files
from t5train.records.stage_records import TokenizerFiles, Weights
from t5train.records.witness import EncodedPassage, computing_environment
from t5train.spec import RunSpec, TokenizerSpec
from t5train.spec.recipes import recipe

SHAPE = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 2, "num_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "v1.0": {"model.version": "v1.0"},
    "v1.1": {"model.version": "v1.1"},
    "deep decoder": {"model.version": "v1.1", "model.num_decoder_layers": 3},
    "switch": {"model.version": "v1.0", "model.moe.num_experts": 3},
    "pairs": {"model.version": "v1.1", "pairs.train": ["reverse_digits", "sort_digits#prefix=order: "]},
}
FAMILIES["lora"] = FAMILIES["pairs"] | {
    "optimizer.kind": "adamw",
    "finetune.lora.rank": 3,
    "finetune.lora.alpha": 8,
    "finetune.lora.targets": ["q", "o", "wi_0", "wo"],
}
FAMILIES["lora v1.0"] = FAMILIES["lora"] | {"model.version": "v1.0", "finetune.lora.targets": ["v", "wi"]}
GENERATED_TOKENS = 6
RECORDED = {
    "layout": {"ranks": 2, "zero_stage": 1, "micro_batch_sequences": 32, "offload": "none", "pipeline_stages": 1}
    | {"expert_parallel_size": 1, "pin_memory": False},
    "data": {f"{split}_{unit}": 900 for split in ("train", "validation", "test") for unit in ("documents", "tokens")}
    | {"train_samples": 224},
    "license": "cc-by-4.0",
    "languages": ["en", "el"],
}
"""What earlier versions did not record."""
OF_PAIRS = {
    "data": {f"{split}_pairs{task}": 30 for split in ("train", "validation", "test") for task in ("", "_of_task_1")}
    | {"train_pairs_of_task_0": 60, "train_samples": 14},
    "tasks": [{"task": "reverse_digits", "prefix": "reverse: "}, {"task": "sort_digits", "prefix": "order: "}],
}
"""What is recorded of a run on pairs instead, or in addition."""


class Trained(NamedTuple):
    """Everything that ``export`` takes."""

    weights: Weights
    tokenizer: TokenizerFiles
    witness: Path
    spec: RunSpec

    def change_witness(self, **changes: Any) -> None:
        """Replace top-level fields of the recorded witness."""
        path = self.witness / "witness.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_trained(folder: Path, version: str = "v1.1", num_files: int = 1) -> Trained:
    """Make a random T5 of one of FAMILIES, as training and consolidation would."""
    settings = {"name": "made", **FAMILIES[version], **{f"model.{key}": SHAPE[key] for key in SHAPE}}
    if version.startswith("lora"):
        settings["model.start_from"] = str(folder / "start")
    spec = recipe("smoke").with_settings(settings)
    tokenizer = _tokenizer(folder / "tokenizer")
    config = huggingface_config(resolve(spec.model, int(tokenizer.counts["vocab_size"])), pad_id=0, eos_id=1)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).eval()
    if not config["tie_word_embeddings"]:  # transformers initializes it tied
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    factors = _adapted(model, spec, config) if spec.model.start_from else {}
    weights = _weights(folder / "run/weights", dict(model.named_parameters()), num_files, factors)
    _witness(folder / "run/witness", model, config, tokenizer, spec, factors)
    return Trained(weights, tokenizer, folder / "run/witness", spec)


@cache
def _texts() -> list[str]:
    """Passages of Python's own documentation, and some with characters beyond ASCII."""
    own = [" ".join(text.split())[:600] for text in list(topics.values())[:60]]
    return [
        *own,
        "Naïve cafés: ½ a ☃ and 漢字, \uff26\uff35\uff2c\uff2c width, ﬁ and ﬂ.",
        "Ünïcode — “quotes” …",
        "Ελληνικά",
    ]


@cache
def _spiece() -> bytes:
    return train(TokenizerSpec(vocab_size=300, character_coverage=0.995), _texts())


def _tokenizer(folder: Path) -> TokenizerFiles:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPIECE).write_bytes(_spiece())
    write_hugging_face_files(folder)
    return TokenizerFiles(
        path=folder,
        fingerprint="1" * 64,
        inputs={"corpus": "0" * 64},
        files=digest_files(folder, sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")),
        counts={"vocab_size": Tokenizer.load(folder).vocab_size},
    ).commit()


def _adapted(model: PreTrainedModel, spec: RunSpec, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save the model as the start of a run with LoRA, merge random adapters with it, and return their factors."""
    start, lora = Path(str(spec.model.start_from)), spec.finetune.lora
    start.mkdir()
    write_json(start / "config.json", config)
    save_file({name: each.detach() for name, each in model.named_parameters()}, start / "model.safetensors")
    factors = {}
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in lora.targets:
            a, b = torch.randn(lora.rank, weight.shape[1]), torch.randn(weight.shape[0], lora.rank)
            factors |= {name + LORA_A: a, name + LORA_B: b}
            weight.data = merged(weight.data, a, b, lora.scaling)
    return factors


def _weights(
    folder: Path, parameters: dict[str, torch.Tensor], num_files: int, factors: dict[str, torch.Tensor]
) -> Weights:
    folder.mkdir(parents=True)
    names = sorted(parameters)
    files = ["model.safetensors"]
    if num_files > 1:
        files = [f"model-{index + 1:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]
    file_of = {name: files[index % num_files] for index, name in enumerate(names)}
    for file in files:
        tensors = {name: parameters[name].detach() for name in names if file_of[name] == file}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if num_files > 1:
        total = 4 * sum(parameter.numel() for parameter in parameters.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / index_name("model")).write_text(json.dumps(index))
    (folder / "model.tensors.json").write_text("{}")
    if factors:
        save_file(factors, folder / f"{ADAPTERS}.safetensors")
    digests = {path.name: digest_file(path) for path in folder.iterdir()}
    return Weights(path=folder, fingerprint="2" * 64, inputs={"run": "3" * 64}, files=digests).commit()


def _passages(spiece: Path) -> list[EncodedPassage]:
    encoded = zip(_texts(), Encoder(spiece).encode(_texts(), add_eos=True), strict=True)
    return choose([EncodedPassage(text=text, ids=ids.tolist()) for text, ids in encoded], most=16)


def _witness(
    folder: Path,
    model: PreTrainedModel,
    config: dict[str, Any],
    tokenizer: TokenizerFiles,
    spec: RunSpec,
    factors: dict[str, torch.Tensor],
) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for probe in ("random", "heldout"):
        inputs = {key: torch.randint(3, config["vocab_size"], (2, 9)) for key in ("input_ids", "decoder_input_ids")}
        if spec.is_fine_tuning:
            inputs["attention_mask"] = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits
        tensors |= {f"{probe}.{key}": value for key, value in {**inputs, "logits": logits}.items()}
    tensors |= _generated(model, tensors, config)
    save_file(tensors, folder / "witness.safetensors")
    witness: dict[str, Any] = {
        "schema_version": 2,
        "run_fingerprint": "3" * 64,
        "step": 7,
        "tag": "step-00000007",
        "device_type": "cpu",
        "num_threads": torch.get_num_threads(),
        "environment": computing_environment("cpu"),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": _digests(dict(model.named_parameters())),
        "ties": {"lm_head.weight": "shared.weight"} if config["tie_word_embeddings"] else {},
        "huggingface_config": config,
        "generation_config": generation_config(config),
        "trained": {"run_name": spec.run_name, "recipe": spec.recipe, "settings": spec.identity()},
        "passages": [each.model_dump() for each in _passages(tokenizer.path / SPIECE)],
        "probes": ["random", "heldout"],
        "validation": {"validation_loss": 4.5678, "validation_sequences": 12},
        "inputs": {
            "corpus": "0" * 64,
            "tokenizer": "1" * 64,
            "vocabulary": tokenizer.files[SPIECE].sha256,
            "shards": "4" * 64,
        },
    }
    if spec.model.version == "v1.1" or spec.model.moe.num_experts:  # v1.0 is as an earlier version recorded it
        witness["trained"] |= RECORDED
        witness["curve"] = {"loss": [[1, 6.0], [4, 5.5], [7, 5.0]], "validation_content_loss": [[7, 4.8]]}
        witness["validation"] |= {"unigram_content_loss": 6.5, "validation_content_loss": 4.8, "test_content_loss": 4.9}
    if spec.is_fine_tuning:
        witness["trained"] |= OF_PAIRS
    if factors:
        witness["adapters"] = _digests(factors)
        witness["trained"]["start_from"] = start_name(spec.model)
        witness["inputs"]["start_from"] = start_fingerprint(spec.model)
    (folder / "witness.json").write_text(json.dumps(witness))


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": list(each.shape), "sha256": hashlib.sha256(each.detach().numpy().tobytes()).hexdigest()}
        for name, each in tensors.items()
    }


def _generated(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Greedy decoding without ``generate()``."""
    input_ids, mask = tensors["heldout.input_ids"], tensors.get("heldout.attention_mask")
    generated = torch.full((len(input_ids), 1), config["decoder_start_token_id"])
    margins, ended = [], torch.zeros(len(input_ids), dtype=torch.bool)
    for _ in range(GENERATED_TOKENS):
        with torch.inference_mode():
            output = model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=generated, use_cache=False)
        logits = output.logits[:, -1]
        best, second = logits.topk(2).values.unbind(-1)
        margins.append((best - second) / logits.abs().amax(-1))
        chosen = logits.argmax(-1).masked_fill(ended, config["pad_token_id"])
        ended |= chosen == config["eos_token_id"]
        generated = torch.cat([generated, chosen[:, None]], dim=1)
    return {"heldout.generated": generated, "heldout.margins": torch.stack(margins, dim=1)}

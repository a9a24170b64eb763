"""The witness that training writes, compared with what plain transformers computes from the same weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.engine.parameter_layout import huggingface_names
from t5train.errors import RanksDisagree
from t5train.model.initialization import initialise
from t5train.model.lora import add_adapters, merged
from t5train.model.model_shape import huggingface_config, resolve
from t5train.model.t5 import T5
from t5train.records.digests import digest_files
from t5train.records.stage_records import TokenizerFiles, TokenShards, Weights
from t5train.release.certificate import Certificate
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import LoraSpec, RunSpec
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe
from t5train.train import witness_recording
from t5train.train.datasets.dataset import Dataset
from t5train.train.datasets.pair_dataset import PairDataset
from t5train.train.datasets.text_dataset import TextDataset
from tests.support import synthetic_models
from tests.support.made_pairs import made_pairs
from tests.support.training.ragged_pairs import make_model

FACTS = {"run_fingerprint": "3" * 64, "step": 7, "tag": "step-00000007", "validation": {"validation_loss": 4.5}}


def _spec(version: str) -> RunSpec:
    settings = {
        **synthetic_models.FAMILIES[version],
        **{f"model.{key}": synthetic_models.SHAPE[key] for key in synthetic_models.SHAPE},
    }
    return recipe("smoke").with_settings({"corpus.source": "/home/somebody/private/text.jsonl", **settings})


def _certificate(
    folder: Path, spec: RunSpec, dataset: Dataset, tokenizer: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> Certificate:
    """Certify weights that our own model was initialised with. Only the engine that would hold them is replaced."""
    shards = dataset.shards
    shape = resolve(spec.model, int(shards.counts["vocab_size"]))
    model = T5(shape, decoder_start_id=0)
    names = huggingface_names(model, expert_rank=0)
    masters = {names[name]: parameter.data for name, parameter in model.named_parameters()}
    for name, master in masters.items():
        initialise(name, master, shape=shape, seed=1)
    monkeypatch.setattr(witness_recording, "full_masters", lambda _engine: masters.items())
    monkeypatch.setattr(witness_recording, "rank", lambda: 0)
    job = TrainJob(
        spec=spec,
        run_fingerprint="3" * 64,
        run_folder=folder,
        shards_folder=shards.path,
        resume_tag=None,
        start_name="t5-base",
    )
    facts: dict[str, Any] = FACTS | {"inputs": {**shards.inputs, "shards": shards.fingerprint}}
    witness_recording.record(None, job, shape, dataset, huggingface_config(shape, 0, 1), facts, job.witness_folder)
    (folder / "weights").mkdir()
    save_file(masters, folder / "weights/model.safetensors", metadata={"format": "pt"})
    weights = Weights(
        path=folder / "weights",
        fingerprint="2" * 64,
        inputs={"run": "3" * 64},
        files=digest_files(folder / "weights", ["model.safetensors"]),
    ).commit()
    return certify(export(weights, tokenizer, folder / "witness", spec, folder / "export").path, folder / "witness")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # transformers warns so for every T5 v1.1
@pytest.mark.parametrize("version", ["v1.0", "v1.1", "switch"])
def test_transformers_generates_what_the_witness_recorded(
    version: str, pydocs: tuple[TokenizerFiles, TokenShards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, shards = pydocs
    spec = _spec(version)
    certificate = _certificate(tmp_path, spec, TextDataset(shards, spec), tokenizer, monkeypatch)
    assert certificate.passed
    assert certificate.passages_compared > 1
    generated = load_file(tmp_path / "witness/witness.safetensors")["heldout.generated"]
    assert certificate.generation.tokens_compared == generated.numel() == 2 * (1 + witness_recording.GENERATED_TOKENS)
    assert torch.all(generated[:, 0] == 0)
    card = (tmp_path / "export/README.md").read_text()
    assert "Trained on `text.jsonl`" in card
    assert "pre-trained starting from the weights of `t5-base` " in card
    assert "somebody" not in card


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_probes_of_pairs_are_certified_with_their_padding_masked(
    pydocs: tuple[TokenizerFiles, TokenShards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, _ = pydocs
    settings = {"pairs.train": ["task.jsonl"], "optimizer.global_batch_sequences": 2, "layout.micro_batch_sequences": 1}
    spec = _spec("v1.1").with_settings(settings)
    validation = [("print", "a function"), ("the class statement, which defines a class", "a class")]
    pairs = made_pairs(tmp_path / "pairs", {"task": {"train": validation * 100, "validation": validation}})
    shards = build_pair_shards(spec.pairs, pairs, tokenizer, tmp_path, workers=1)
    certificate = _certificate(tmp_path, spec, PairDataset(shards, spec), tokenizer, monkeypatch)
    assert certificate.passed
    assert all(probe.bit_equal for probe in certificate.probes.values())
    recorded = load_file(tmp_path / "witness/witness.safetensors")
    for probe in ("random", "heldout"):
        assert sorted(recorded[f"{probe}.attention_mask"].min(dim=1).values.tolist()) == [0, 1]


class _Frozen(dict[str, torch.Tensor]):
    """The start model's weights, as StoredTensors has them."""

    def whole(self, name: str) -> torch.Tensor:
        return self[name]


def test_frozen_weights_are_recorded_as_the_start_model_has_them_and_must_not_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, frozen = make_model("relu, tied"), _Frozen()
    for name, parameter in model.named_parameters():
        frozen[name] = parameter.detach().clone()
    add_adapters(model, LoraSpec(rank=2, alpha=3.0))
    model.bfloat16()
    names = huggingface_names(model, expert_rank=0)
    masters = {names[name]: torch.randn(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    monkeypatch.setattr(witness_recording, "full_masters", lambda _engine: masters.items())
    monkeypatch.setattr(witness_recording, "rank", lambda: 0)
    engine: Any = SimpleNamespace(module=model)
    found = dict(witness_recording.merged_masters(engine, frozen, 1.5))  # type: ignore[arg-type]  # stands in for it
    assert found.keys() == frozen.keys()
    for name, weight in frozen.items():
        is_adapted = f"{name}.lora_a" in masters
        expected = merged(weight, masters[f"{name}.lora_a"], masters[f"{name}.lora_b"], 1.5) if is_adapted else weight
        assert torch.equal(found[name], expected)
    model.shared.weight.data[3, 4] += 1
    with pytest.raises(RanksDisagree, match=r"shared\.weight is frozen, but no longer has the values"):
        list(witness_recording.merged_masters(engine, frozen, 1.5))  # type: ignore[arg-type]  # stands in for it

"""LoRA on real ranks: every layout trains the same adapters, resumes exactly, and gives the merged model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.consolidate.opened_checkpoint import open_checkpoint
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.errors import InputError
from t5train.model.lora import is_adapter, merged, read_adapters
from t5train.model.starting_model import start_fingerprint
from t5train.progress import silent
from t5train.records.metrics import read
from t5train.records.stage_records import PairShards, TokenizerFiles
from t5train.records.witness import Witness, digest_tensor
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.training.launched import Trained, spec_of, train

pytestmark = pytest.mark.slow

VOCABULARY = 640  # rows for the 600 ids of the shards' tokenizer
LAYOUTS = ("zero0-fp32", "zero0-bf16", "zero1-fp32", "zero1-bf16", "zero2-bf16-offload", "zero3-fp32", "zero3-bf16")
SETTINGS = {
    "pairs.train": ["reverse_digits", "sort_digits"],
    "pairs.input_tokens": 48,
    "pairs.target_tokens": 48,
    "optimizer.kind": "adamw",
    "optimizer.peak_learning_rate": 0.01,
    "optimizer.final_learning_rate": 0.001,
    "finetune.lora.rank": 3,
    "finetune.lora.alpha": 5.0,
    "finetune.lora.targets": "q,v,wi_0,wo",
    "finetune.lora.dropout": 0.1,
}
STEP_2 = "step-00000002"


def _start(folder: Path) -> Path:
    """Save a random T5 v1.1, whose values bf16 cannot represent exactly, in several files."""
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes)
    )
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def _spec(layout: str, start: Path, ranks: int = 2) -> RunSpec:
    return spec_of(layout, ranks=ranks).with_settings(SETTINGS | {"model.start_from": str(start)})


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, start: Path, pydocs_tokenizer: TokenizerFiles
) -> tuple[Trained, PairShards]:
    root, spec = tmp_path_factory.mktemp("adapters") / "runs", _spec("zero1-fp32", start)
    root.mkdir()
    shards = build_pair_shards(spec.pairs, build_pairs(spec.pairs, root), pydocs_tokenizer, root, workers=1)
    of_start = {"start_fingerprint": start_fingerprint(spec.model)}

    def job(name: str, layout: str, ranks: int = 2, **more: Any) -> dict[str, Any]:
        return {"name": name, "spec": _spec(layout, start, ranks).model_dump(mode="json"), **of_start, **more}

    jobs = [job(layout, layout) for layout in LAYOUTS]
    jobs += [
        job(f"resumed {layout}", layout, killed=f"{root}/{layout}", resume_tag=STEP_2)
        for layout in ("zero0-bf16", "zero1-bf16", "zero2-bf16-offload", "zero3-bf16", "zero3-fp32")
    ]
    jobs.append(job("resharded", "zero3-fp32", other_layout=f"{root}/zero1-fp32", other_tag=STEP_2))
    train(root, jobs, shards)
    return train(root, [job("alone", "zero1-fp32", ranks=1)], shards, ranks=1), shards


def _losses(trained: Trained, name: str) -> list[Any]:
    return [line["loss"] for line in read(trained.root / name / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "alone"])
def test_every_layout_trains_the_same(trained: tuple[Trained, PairShards], layout: str) -> None:
    expected = _losses(trained[0], LAYOUTS[0])
    assert len(expected) == 4
    assert expected[3] != pytest.approx(expected[0], rel=1e-4)
    assert _losses(trained[0], layout) == pytest.approx(expected, rel=5e-3 if "bf16" in layout else 1e-5)


@pytest.mark.parametrize("layout", ["zero0-bf16", "zero1-bf16", "zero2-bf16-offload", "zero3-bf16", "zero3-fp32"])
def test_a_killed_run_resumes_bit_equal(trained: tuple[Trained, PairShards], layout: str) -> None:
    whole, resumed = (trained[0].found(name)["masters"] for name in (layout, f"resumed {layout}"))
    assert whole == resumed
    assert all(map(is_adapter, whole))
    digests = [Witness.load(trained[0].root / name / "witness").tensors for name in (layout, f"resumed {layout}")]
    assert digests[0] == digests[1]


def test_a_run_continues_in_another_layout(trained: tuple[Trained, PairShards]) -> None:
    assert _losses(trained[0], "resharded") == pytest.approx(_losses(trained[0], "zero1-fp32")[2:], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_hold_adapters_only_and_the_result_is_the_start_plus_their_product(
    trained: tuple[Trained, PairShards], start: Path, layout: str, tmp_path: Path
) -> None:
    run = trained[0].root / layout
    opened = open_checkpoint(run / "checkpoints", None, silent)
    held = {name for file in opened.names if "model" in file for name in opened.read(file)["module"]}
    assert held
    assert all(".lora_" in name for name in held)
    consolidate(run / "checkpoints", tmp_path / "weights", start_from=str(start))
    found, adapters = load_file(tmp_path / "weights/model.safetensors"), read_adapters(tmp_path / "weights")
    theirs = T5ForConditionalGeneration.from_pretrained(start)
    expected = {name: tensor.detach() for name, tensor in theirs.named_parameters()}
    assert {name.split(".")[-2] for name in adapters} == {"q", "v", "wi_0", "wo"}
    for name, (a, b) in adapters.items():
        assert b.any()
        expected[name] = merged(expected[name], a, b, 5 / 3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    witness = Witness.load(run / "witness")
    assert {name: digest_tensor(tensor) for name, tensor in found.items()} == {
        name: tensor.sha256 for name, tensor in witness.tensors.items()
    }


def test_adapters_are_not_merged_with_another_model(
    trained: tuple[Trained, PairShards], start: Path, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    other = T5ForConditionalGeneration.from_pretrained(start)
    other.shared.weight.data.normal_()
    other.save_pretrained(tmp_path / "other")
    wrong = {
        str(tmp_path / "other"): r"has adapters for another model than .*other",
        "hf://someone/t5": r"hf://someone/t5, but must be a folder .* the folder of its copy, which is below starts",
        "": "which is not a folder|lacks|has neither",
    }
    for start_from, said in wrong.items():
        with pytest.raises(InputError, match=said):
            consolidate(trained[0].root / "zero1-fp32/checkpoints", tmp_path / "weights", start_from=start_from)


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # transformers warns so for every T5 v1.1
def test_the_merged_model_is_certified(
    trained: tuple[Trained, PairShards],
    start: Path,
    pydocs_tokenizer: TokenizerFiles,
    tmp_path: Path,
    restore_torch_threads: None,
) -> None:
    run = trained[0].root / "zero3-bf16"
    weights = consolidate(run / "checkpoints", tmp_path / "weights", start_from=str(start), shard_bytes=50_000)
    assert "model.safetensors.index.json" in weights.files
    exported = export(weights, pydocs_tokenizer, run / "witness", _spec("zero3-bf16", start), tmp_path / "export")
    certificate = certify(exported.path, run / "witness", start_from=str(start))
    assert certificate.passed
    assert all(probe.bit_equal for probe in certificate.probes.values())
    assert json.loads((run / "witness/witness.json").read_text())["inputs"]["start_from"]

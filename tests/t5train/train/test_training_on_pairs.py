"""Real DeepSpeed training on pairs: it resumes bit-equal, does not depend on the ranks, and is certified."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.records.metrics import read
from t5train.records.stage_records import PairShards, TokenizerFiles
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.training.launched import Trained, job, spec_of, train

pytestmark = pytest.mark.slow

PAIRS = {
    "pairs.train": ["reverse_digits", "sort_digits#prefix=order: "],
    "pairs.input_tokens": 48,
    "pairs.target_tokens": 48,
    "optimizer.label_smoothing": 0.1,
    "optimizer.z_loss": 1e-4,
    "optimizer.schedule": "linear",
}
KEYS = ("loss", "gradient_norm", "validation_loss", "validation_exact_match", "validation_token_accuracy")
MEASURED = ("loss", "token_accuracy", "exact_match")


@pytest.fixture(scope="module")
def pair_shards(tmp_path_factory: pytest.TempPathFactory, pydocs_tokenizer: TokenizerFiles) -> PairShards:
    root, spec = tmp_path_factory.mktemp("pairs"), spec_of("zero1-fp32").with_settings(PAIRS).pairs
    return build_pair_shards(spec, build_pairs(spec, root), pydocs_tokenizer, root, workers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pair_shards: PairShards) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    killed = {"killed": f"{root}/whole", "resume_tag": "step-00000002"}
    brought = {"ranks_a_node": 1, "brought_from": f"{root}/on_nodes", "resume_tag": "step-00000002", "intact": 0}
    runs: dict[str, dict[str, Any]] = {"whole": {}, "resumed": killed}
    runs |= {"on_nodes": {"ranks_a_node": 1}, "brought": brought}
    train(root, [job(name, "zero1-fp32", PAIRS, **more) for name, more in runs.items()], pair_shards)
    return train(root, [job("alone", "zero1-fp32", PAIRS, ranks=1)], pair_shards, ranks=1)


def witness(trained: Trained, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((trained.root / name / "witness/witness.json").read_text())
    return found


def test_a_run_on_pairs_that_was_killed_resumes_bit_equal_with_dropout(trained: Trained) -> None:
    whole, resumed = trained.found("whole"), trained.found("resumed")
    assert "error" not in whole
    assert whole["step"] == resumed["step"] == 4
    assert whole["masters"] == resumed["masters"]
    assert witness(trained, "whole")["validation"] == witness(trained, "resumed")["validation"]


def test_on_nodes_without_a_shared_disk_a_node_that_was_wiped_resumes_bit_equal(trained: Trained) -> None:
    whole = trained.found("whole")["masters"]
    assert [trained.found(name, rank)["masters"] for name in ("on_nodes", "brought") for rank in (0, 1)] == [whole] * 4


def test_one_rank_trains_and_measures_what_two_ranks_do(trained: Trained) -> None:
    two, one = (read(trained.root / f"{name}/metrics.jsonl") for name in ("whole", "alone"))
    for key in KEYS:
        values = [line[key] for line in two if key in line]
        assert len(values) > 1
        assert [line[key] for line in one if key in line] == pytest.approx(values, rel=1e-4), key


def test_metrics_of_pairs_are_recorded_of_all_and_of_each_task(trained: Trained) -> None:
    found = witness(trained, "whole")["validation"]
    for split in ("validation", "test"):
        weights = {"exact_match": f"{split}_pairs"}
        for name in MEASURED:
            metric, count = f"{split}_{name}", weights.get(name, f"{split}_target_tokens")
            whole = sum(found[f"{metric}_of_task_{task}"] * found[f"{count}_of_task_{task}"] for task in range(2))
            assert found[metric] * found[count] == pytest.approx(whole)
    assert found["validation_pairs"] == 11
    assert 0 < found["validation_loss"] < 20
    assert found["unigram_loss"] > 0
    assert found["shuffled_loss"] > 0
    (validated,) = [line for line in read(trained.root / "whole/metrics.jsonl") if "validate_seconds" in line]
    assert {f"validation_{name}{task}" for name in MEASURED for task in ("", "_of_task_1")} <= validated.keys()


def test_tokens_without_padding_are_counted_beside_those_with_it(trained: Trained, pair_shards: PairShards) -> None:
    for line in read(trained.root / "whole/metrics.jsonl"):
        if "loss" in line:
            assert line["tokens_seen"] == line["step"] * 16 * (48 + 48)
            assert 0.5 < line["real_tokens_per_second"] / line["tokens_per_second"] < 1


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # transformers warns so for every T5 v1.1
def test_a_model_of_pairs_is_certified_with_padded_probes_and_its_card_names_files_tasks_and_prefixes(
    trained: Trained, pydocs_tokenizer: TokenizerFiles, tmp_path: Path, restore_torch_threads: None
) -> None:
    folder, spec = trained.root / "whole", _spec()
    probes = load_file(folder / "witness/witness.safetensors")
    assert not probes["heldout.attention_mask"].all()
    weights = consolidate(folder / "checkpoints", tmp_path / "weights")
    exported = export(weights, pydocs_tokenizer, folder / "witness", spec, tmp_path / "export")
    certificate = certify(exported.path, folder / "witness")
    assert certificate.passed
    assert all(probe.bit_equal for probe in certificate.probes.values())
    assert certificate.generation is not None
    card = (exported.path / "README.md").read_text()
    for stated in ("fine-tuned from scratch", "`sort_digits`", '| `sort_digits` | `"order: "` |'):
        assert stated in card
    assert "corpus" not in card.partition("## Lineage")[0]
    assert json.loads((exported.path / "tokenizer_config.json").read_text())["model_max_length"] == 48


def _spec() -> RunSpec:
    return spec_of("zero1-fp32").with_settings(PAIRS)

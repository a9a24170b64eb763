"""Real DeepSpeed training whose best checkpoint is chosen by the text that it generates, on any layout and resumed."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu.metrics.chrf import CHRF
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from t5train.checkpoint import sidecar
from t5train.checkpoint.consolidate import consolidate
from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs, read_pairs
from t5train.files.run_folder import tag_of
from t5train.model.starting_model import start_fingerprint
from t5train.records.best_so_far import BestSoFar
from t5train.records.metrics import read
from t5train.records.stage_records import Pairs, PairShards, TokenizerFiles
from t5train.records.witness import Witness
from tests.support.training.launched import Trained, job, spec_of, train

pytestmark = pytest.mark.slow

PAIRS = 13
"""With 4 beams, of 7 tokens or more on either side, these are more than a batch of 1,024: both ranks have some."""
SETTINGS: dict[str, Any] = {
    "pairs.input_tokens": 48,
    "pairs.target_tokens": 48,
    "optimizer.num_steps": 9,
    "optimizer.peak_learning_rate": 0.003,
    "evaluate.best_metric": "validation_chrf",
    "evaluate.best_pairs": PAIRS,
    "evaluate.num_beams": 4,
    "storage.validate_every_steps": 2,
    "storage.checkpoint_every_steps": 3,
    "storage.keep_last": 9,
}
JUDGED = [2, 4, 6, 8, 9]
START = "start"
LORA = {
    "optimizer.kind": "adamw",
    "optimizer.peak_learning_rate": 0.05,
    "optimizer.final_learning_rate": 0.01,
    "finetune.lora.rank": 3,
    "finetune.lora.targets": "q,v,wi_0,wo",
}

WORDS = "the other module returns a list of strings and raises an error when the value is not found in it"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on pairs of words: even what a hardly trained model writes then has characters of them."""
    file = tmp_path_factory.mktemp("words") / "pairs.jsonl"
    words = WORDS.split()
    texts = [" ".join(words[(number * step) % len(words)] for step in range(1, 6)) for number in range(1, 800)]
    file.write_text(
        "".join(json.dumps({"source": f"{text} {number}", "target": text}) + "\n" for number, text in enumerate(texts))
    )
    return SETTINGS | {"pairs.train": [str(file)]}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Pairs:
    return build_pairs(spec_of("zero1-fp32").with_settings(settings).pairs, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def pair_shards(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], pairs: Pairs, pydocs_tokenizer: TokenizerFiles
) -> PairShards:
    spec = spec_of("zero1-fp32").with_settings(settings).pairs
    return build_pair_shards(spec, pairs, pydocs_tokenizer, tmp_path_factory.mktemp("shards"), workers=1)


def save_start(folder: Path) -> None:
    """Save a random T5 v1.1 that adapters can be trained for."""
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    config = T5Config(vocab_size=640, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes)
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, Any],
    pair_shards: PairShards,
    pydocs_tokenizer: TokenizerFiles,
) -> Trained:
    root = tmp_path_factory.mktemp("trained") / "runs"
    given = {"vocabulary": b64encode((pydocs_tokenizer.path / "spiece.model").read_bytes()).decode()}
    jobs = [job(f"zero{stage}", f"zero{stage}-fp32", settings, **given) for stage in (1, 3)]
    killed = {"killed": f"{root}/killed", "resume_tag": tag_of(6)}
    jobs.append(job("killed", "zero1-fp32", settings, stop_at=6, **given))
    jobs.append(job("resumed", "zero1-fp32", settings, **given, **killed))
    jobs.append(job("other-vocabulary", "zero1-fp32", settings, vocabulary=b64encode(b"other").decode()))
    jobs.append(job("little-memory", "zero1-fp32", settings, fault="too little memory to predict", **given))
    save_start(root / START)
    of_start = settings | LORA | {"model.start_from": f"{root / START}"}
    digest = start_fingerprint(spec_of("zero1-fp32").with_settings(of_start).model)
    jobs += [job(f"lora{stage}", f"zero{stage}-fp32", of_start, start_fingerprint=digest, **given) for stage in (1, 3)]
    train(root, jobs, pair_shards)
    return train(root, [job("one-rank", "zero1-fp32", settings, ranks=1, **given)], pair_shards, ranks=1)


def scores(trained: Trained, name: str) -> dict[int, float]:
    lines = [line for line in read(trained.root / name / "metrics.jsonl") if "predict_seconds" in line]
    return {int(line["step"] or 0): float(line["validation_chrf"] or 0) for line in lines}


def chosen(trained: Trained, name: str) -> BestSoFar:
    best = sidecar.read(trained.root / name / "checkpoints" / tag_of(9), 0).best
    assert best is not None
    return best


def best_step(found: dict[int, float]) -> int:
    return min(found, key=lambda step: (-found[step], step))


@pytest.mark.parametrize("name", ["zero1", "zero3", "one-rank", "little-memory", "lora1", "lora3"])
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_the_scores_are_those_of_plain_transformers_with_the_weights_of_each_checkpoint(
    trained: Trained,
    settings: dict[str, Any],
    pairs: Pairs,
    pair_shards: PairShards,
    pydocs_tokenizer: TokenizerFiles,
    tmp_path: Path,
    name: str,
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(pydocs_tokenizer.path)
    samples = PairSamples(pair_shards, "validation", spec_of("zero1-fp32").with_settings(settings).pairs, 0)
    every = list(read_pairs(pairs, "validation", 0))
    assert len(every) > PAIRS, "any sample would be all pairs"
    sample = [every[number] for number in samples.batch(0, PAIRS).sample_ids]
    folder = trained.root / name / "checkpoints"
    inputs = tokenizer([pair.source for pair in sample], return_tensors="pt", padding=True)
    longest = max(len(tokenizer(pair.target)["input_ids"]) for pair in sample)
    expected = {}
    for step in JUDGED[::2]:
        start = f"{trained.root / START}" if "lora" in name else None
        weights = consolidate(folder, tmp_path / str(step), tag=tag_of(step), start_from=start)
        config = sidecar.read(folder / tag_of(step), 0).huggingface_config
        (weights.path / "config.json").write_text(json.dumps(config))
        model: Any = T5ForConditionalGeneration.from_pretrained(weights.path, dtype="float32").eval()
        with torch.inference_mode():
            ids = model.generate(**inputs, num_beams=4, max_new_tokens=longest + max(8, longest // 4))
        written = tokenizer.batch_decode(ids, skip_special_tokens=True)
        expected[step] = CHRF().corpus_score(written, [[pair.target for pair in sample]]).score
    found = scores(trained, name)
    assert list(found) == JUDGED
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-9)
    assert len(set(expected.values())) > 1
    best = chosen(trained, name)
    assert best.step == best_step(found)
    assert Witness.load(folder / tag_of(best.step)).validation["validation_chrf"] == best.value


def test_a_killed_run_resumes_with_the_same_scores_weights_and_best_checkpoint(trained: Trained) -> None:
    whole, resumed = trained.found("zero1"), trained.found("resumed")
    assert whole["masters"] == resumed["masters"]
    assert scores(trained, "zero1") == scores(trained, "resumed")
    assert chosen(trained, "zero1") == chosen(trained, "resumed")


def test_one_rank_finds_what_two_find(trained: Trained) -> None:
    assert scores(trained, "one-rank") == pytest.approx(scores(trained, "zero1"), abs=0.5)  # weights differ by rounding
    assert len({chosen(trained, name).step for name in ("one-rank", "zero1", "little-memory")}) == 1


def test_predicting_is_a_phase_of_its_own_after_each_validation_and_before_the_save(trained: Trained) -> None:
    phases = trained.found("zero1")["phases"]
    of_step = [phase for phase, step in phases if step == 4]
    assert of_step[:4] == ["step", "validate", "predict", "save"]


def test_predicting_leaves_training_as_it_is(
    trained: Trained, settings: dict[str, Any], pair_shards: PairShards
) -> None:
    silent = settings | {"evaluate.best_metric": "validation_loss", "evaluate.best_pairs": 100, "evaluate.num_beams": 1}
    plain = train(trained.root / "plain", [job("plain", "zero1-fp32", silent)], pair_shards)
    assert plain.found("plain")["masters"] == trained.found("zero1")["masters"]


def test_another_vocabulary_is_refused(trained: Trained) -> None:
    assert trained.found("other-vocabulary")["error"] == "DigestMismatch"

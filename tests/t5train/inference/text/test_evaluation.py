"""Evaluation gives the losses that training and plain transformers give on the same samples."""

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from t5train.data.corpus import build_corpus
from t5train.data.passages import Passage
from t5train.data.samples.loader import Samples, noise_keys
from t5train.data.samples.span_corruption import corrupt, geometry, is_content
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import given_tokenizer
from t5train.errors import InputError, SpecError
from t5train.inference.model_folder import Vocabulary
from t5train.inference.text.evaluation import EvaluationSpec, evaluate
from t5train.inference.text.evaluation_text import read_windows
from t5train.spec import CorpusSpec, ObjectiveSpec, ShardsSpec
from tests.support.generated_text import write_jsonl

MakeModel = Callable[..., Path]
OBJECTIVE = ObjectiveSpec(noise_density=0.2, mean_span_tokens=2.0, input_tokens=32)


def _reference(folder: Path, inputs: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels, and the mean loss that transformers itself computes."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    labels = torch.from_numpy(targets.astype(np.int64))
    with torch.inference_mode():
        output = model(input_ids=torch.from_numpy(inputs.astype(np.int64)), labels=labels)
    return output.loss, output.logits


@pytest.mark.parametrize("version", ["v1.1", "switch"])
def test_the_validation_split_of_an_export_gives_the_samples_and_losses_of_training(
    make_model: MakeModel, tmp_path: Path, version: str
) -> None:
    folder, text = make_model(version), write_jsonl(tmp_path / "text.jsonl", 200)
    corpus_spec = CorpusSpec(source=str(text), split=(700, 200, 100), split_seed=3, workers=1)
    corpus = build_corpus(corpus_spec, tmp_path)
    tokenizer = given_tokenizer(folder / "spiece.model", tmp_path)
    shards = build_shards(ShardsSpec(shard_tokens=4096, workers=1), corpus_spec, corpus, tokenizer, tmp_path)
    assert shards.counts["num_shards"] > 1
    samples = Samples(shards, "validation", OBJECTIVE, seed=5)
    half = samples.num_samples // 2
    _, _, inputs, targets, _ = samples.batch(0, half)
    loss, logits = _reference(folder, inputs, targets)

    found = evaluate(
        folder, str(text), EvaluationSpec(split="validation", batch_sequences=20, max_sequences=half), "cpu"
    )

    assert (found.sequences, found.input_tokens, found.seed) == (half, 32, 0)
    experts = 1e-4 if version == "switch" else 1e-6
    assert found.all_targets_loss == pytest.approx(loss.item(), rel=experts)
    content = is_content(targets, first_sentinel_id=399)
    right = logits.argmax(-1).numpy() == targets
    assert found.token_accuracy == pytest.approx(right[content].mean())
    every = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.tensor(targets).long(), reduction="none")
    assert found.loss == pytest.approx(every.numpy()[content].mean(), rel=experts)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    spans = [_spans(row, right_row) for row, right_row in zip(targets, right, strict=True)]
    flat = [span for row in spans for span in row]
    assert (found.spans, found.tokens) == (len(flat), int(content.sum()))
    assert found.span_accuracy == pytest.approx(np.mean([all(span) for span in flat]))
    assert found.mean_span_tokens == pytest.approx(np.mean([len(span) for span in flat]))


def _spans(targets: np.ndarray, right: np.ndarray) -> list[list[bool]]:
    """For each span of a target, which of its tokens are predicted rightly."""
    spans: list[list[bool]] = []
    for token, is_right in zip(targets[:-1].tolist(), right[:-1].tolist(), strict=True):
        if token >= 300:
            spans.append([])
        else:
            spans[-1].append(is_right)
    return spans


def _make_perfect(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong_id: int) -> None:
    """Let the model predict every target, except for one id."""

    def predicted(_: Any, __: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(targets.shape), targets != wrong_id

    monkeypatch.setattr("t5train.inference.text.evaluation._predicted", predicted)


def test_a_span_counts_only_if_every_token_of_it_is_right(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = make_model(), write_jsonl(tmp_path / "text.jsonl", 10)
    vocabulary = Vocabulary.of(folder)
    _make_perfect(folder, monkeypatch, wrong_id=-1)
    assert evaluate(folder, str(text)).span_accuracy == evaluate(folder, str(text)).token_accuracy == 1
    (ids,) = vocabulary.encode([json.loads(text.read_text().splitlines()[0])["text"]])
    _make_perfect(folder, monkeypatch, wrong_id=int(ids[0]))
    found = evaluate(folder, str(text))
    assert 0 < found.span_accuracy < found.token_accuracy < 1


def test_the_unigram_baseline_predicts_each_token_from_the_rest_of_the_text(
    make_model: MakeModel, tmp_path: Path
) -> None:
    folder, text = make_model(), tmp_path / "one.txt"
    text.write_text("one two three four " * 40)
    spec = EvaluationSpec(input_tokens=16, noise_density=0.15)
    found = evaluate(folder, str(text), spec)
    vocabulary = Vocabulary.of(folder)
    (ids,) = vocabulary.encode([text.read_text().strip()])
    losses = []
    for token in _masked(ids, spec, vocabulary):
        others = np.count_nonzero(ids == token) - 1
        losses.append(-math.log((others + 1) / (len(ids) - 1 + vocabulary.size)))
    assert found.unigram_loss == pytest.approx(np.mean(losses))
    assert found.passages == 1


def _masked(ids: np.ndarray, spec: EvaluationSpec, vocabulary: Vocabulary) -> list[int]:
    objective = {"input_tokens": spec.input_tokens, "noise_density": spec.noise_density}
    shape = geometry(OBJECTIVE.model_copy(update=objective))
    count = len(ids) // shape.window_tokens
    windows = ids[: count * shape.window_tokens].reshape(count, -1)
    numbers = np.arange(count)
    key = noise_keys(0, np.zeros_like(numbers), numbers)
    _, targets = corrupt(windows, key, shape, vocabulary.first_sentinel_id, vocabulary.eos_id)
    return [int(token) for token in targets[is_content(targets, vocabulary.first_sentinel_id)]]


def test_the_same_text_gives_the_same_result_for_every_size_of_batches(make_model: MakeModel, tmp_path: Path) -> None:
    folder, text = make_model(), str(write_jsonl(tmp_path / "text.jsonl", 6))
    found = evaluate(folder, text)
    assert evaluate(folder, text) == found
    other = evaluate(folder, text, EvaluationSpec(batch_sequences=3))
    assert other.loss == pytest.approx(found.loss, rel=1e-6)
    assert evaluate(folder, text, EvaluationSpec(seed=6)).loss != found.loss


@pytest.mark.parametrize("asked", [{}, {"split": "validation"}, {"max_sequences": 3}])
def test_progress_says_how_much_remains_while_a_text_is_read_and_as_much_as_is_asked_for_evaluated(
    make_model: MakeModel, tmp_path: Path, asked: dict[str, Any]
) -> None:
    folder, text = make_model(), str(write_jsonl(tmp_path / "text.jsonl", 300))
    reported: list[tuple[str, int, int | None]] = []
    found = evaluate(folder, text, EvaluationSpec(**asked), progress=lambda *step: reported.append(step))
    assert all(total is not None for _, _, total in reported)
    last = {what.partition(",")[0]: (done, total) for what, done, total in reported}
    if "max_sequences" in asked:
        assert (found.sequences, found.passages) == (3, 256)
    else:
        assert last["passages tokenised"] == (300, 300)
    assert last["sequences evaluated"] == (found.sequences, found.sequences)


def test_a_text_larger_than_memory_can_be_evaluated() -> None:
    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.full(1_000, len(text), np.int32) for text in texts]

    passages = (Passage(str(number), "", "x" * (number % 50)) for number in range(20_000))
    tracemalloc.start()
    try:
        found = read_windows([passages], Vocabulary(400, 399, 1, encode, np.zeros(400)), window_tokens=128)
        assert tracemalloc.get_traced_memory()[1] < found.windows.nbytes / 4
    finally:
        tracemalloc.stop()
    assert found.windows.shape == (20_000 * 1_000 // 128, 128)
    assert (found.windows.ravel()[::1_000][:50] == np.arange(50)).all()
    assert found.counts[:50].tolist() == [20_000 * 1_000 // 50] * 50


@pytest.mark.parametrize("vocabulary", ["spiece.model", "tokenizer.json"])
def test_the_folders_of_others_are_evaluated_with_t5s_objective(
    make_published: MakeModel, tmp_path: Path, vocabulary: str
) -> None:
    folder, text = make_published("v1.0", vocabulary), str(write_jsonl(tmp_path / "text.jsonl", 20))
    found = evaluate(folder, text)
    assert (found.input_tokens, found.noise_density, found.seed) == (512, 0.15, 0)
    ours = evaluate(folder.parent / "model", text, EvaluationSpec(0.15, 3.0, 512, seed=0))
    assert found.loss == pytest.approx(ours.loss, rel=1e-6)
    assert found.loss_per_byte == pytest.approx(ours.loss_per_byte, rel=1e-6)
    assert (found.masked_bytes, found.unknown_tokens) == (ours.masked_bytes, ours.unknown_tokens)


@pytest.mark.parametrize("vocabulary", ["spiece.model", "tokenizer.json"])
def test_no_text_becomes_a_control_id(make_published: MakeModel, vocabulary: str) -> None:
    found = Vocabulary.of(make_published("v1.1", vocabulary))
    (ids,) = found.encode(["a </s> b <extra_id_0> c <pad>"])
    assert ids[-1] == found.eos_id == 1
    assert not np.isin(ids[:-1], [0, 1, *range(300, 400)]).any()
    assert (found.size, found.first_sentinel_id) == (400, 399)


@pytest.mark.parametrize(
    ("spec", "error", "problem"),
    [
        (EvaluationSpec(), InputError, r"sequence takes \d+ consecutive tokens, but there are \d+ tokens in 1 pass"),
        (EvaluationSpec(noise_density=0.9), SpecError, r"noise_density is 0\.9"),
        (EvaluationSpec(input_tokens=4096), SpecError, r"needs .* spans, but there are 100 sentinels"),
    ],
)
def test_a_text_without_a_whole_window_and_masking_that_is_not_possible_are_refused(
    make_model: MakeModel, tmp_path: Path, spec: EvaluationSpec, error: type[Exception], problem: str
) -> None:
    (tmp_path / "short.txt").write_text("Too short.\n")
    with pytest.raises(error, match=problem):
        evaluate(make_model(), str(tmp_path / "short.txt"), spec)

"""Statistics of tokens equal what can be counted in the text itself."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from t5train.data.corpus import build_corpus
from t5train.data.passages import split_of
from t5train.data.segments import passages_of, read_segments
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.report import data_statistics as module
from t5train.report.data_statistics import data_plot, data_statistics, length_rows, sample_text, word_lines
from t5train.spec import CorpusSpec, ObjectiveSpec
from tests.support.generated_text import DataChain

OBJECTIVE = ObjectiveSpec(input_tokens=64)


def test_lengths_are_those_of_every_passage(data_chain: DataChain) -> None:
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    expected: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    words = 0
    for file in read_segments(data_chain.corpus.path):
        for segment in file.segments:
            for passage in passages_of(file.source, segment):
                (ids,) = vocabulary.encode([passage.text], add_eos=True)
                expected[split_of(data_chain.corpus_spec, passage.id)].append(len(ids))
                words += len(passage.text.split())
    found = data_statistics(data_chain.corpus, data_chain.tokenizer, data_chain.shards, OBJECTIVE)
    assert {split: each.tolist() for split, each in found.lengths.items()} == expected
    assert found.sampled.words == words, "the text is smaller than the sample, so all of it is counted"
    assert found.sampled.pieces == sum(map(sum, expected.values())) - found.sampled.passages
    (train, *_) = length_rows(found)
    assert train[:3] == ["train", f"{len(expected['train']):,}", f"{sum(expected['train']):,}"]
    assert train[3:] == [
        f"{value:,}" for value in np.quantile(expected["train"], [0, 0.1, 0.5, 0.9, 0.99, 1], method="nearest")
    ]


def test_characters_without_a_piece_are_named(data_chain: DataChain, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("badine el\nel \u4e2d\u4e2d ba \u00a7\n")
    corpus = build_corpus(CorpusSpec(source=str(tmp_path / "a.txt"), workers=1), tmp_path / "root")
    sampled = sample_text(corpus, Tokenizer.load(data_chain.tokenizer.path))
    assert sampled.unknown == Counter({"\u4e2d": 2, "\u00a7": 1})
    statistics = data_statistics(data_chain.corpus, data_chain.tokenizer, data_chain.shards, OBJECTIVE)
    last = word_lines(statistics._replace(sampled=sampled))[-1]
    assert last.startswith(
        "characters of the sample without a piece: '\u4e2d' (U+4E2D) 2 times, '\u00a7' (U+00A7) 1 time. "
    )


def test_a_sample_is_spread_over_the_corpus(data_chain: DataChain, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    whole = sample_text(data_chain.corpus, vocabulary)
    monkeypatch.setattr(module, "SAMPLE_BYTES", whole.bytes // 3)
    assert 0.1 * whole.bytes < sample_text(data_chain.corpus, vocabulary).bytes < 0.6 * whole.bytes


def test_the_plot_is_a_png(data_chain: DataChain) -> None:
    statistics = data_statistics(data_chain.corpus, data_chain.tokenizer, data_chain.shards, OBJECTIVE)
    assert data_plot(statistics, OBJECTIVE).startswith(b"\x89PNG")
    empty = {split: np.empty(0, "<u4") for split in statistics.lengths}
    assert data_plot(statistics._replace(lengths=empty), OBJECTIVE).startswith(b"\x89PNG")
    assert length_rows(statistics._replace(lengths=empty))[0] == ["train", "0", "0", *["-"] * 6]

"""The report on pairs: counts, lengths and unknown pieces are those of the pairs, and samples are what a model gets."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs, count_of, read_pairs
from t5train.data.passages import SPLITS
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.records.stage_records import Pairs
from t5train.report import pairs_report as module
from t5train.report.data_statistics import QUANTILE_NAMES
from t5train.report.pairs_report import pairs_report
from t5train.spec import PairsSpec, build
from tests.support.generated_text import DataChain

WORDS = ["badine", "el", "ba", "dine", "lo"]


def written(tmp_path: Path, **settings: Any) -> tuple[PairsSpec, Pairs]:
    """Pairs of growing length: of source n, the target is every second word. One target has another script."""
    lines = list[str]()
    for number in range(300):
        words = [WORDS[(number + place * place) % len(WORDS)] for place in range(1 + number % 40)]
        target = "el \u4e2d" if number == 7 else " ".join(words[::2])
        lines.append(json.dumps({"source": f"{number} {' '.join(words)}", "target": target}))
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"source": "", "target": "x"}']))
    spec = build({"recipe": "smoke", "pairs": {"train": f"{tmp_path}/a.jsonl#prefix=el: ", **settings}}).pairs
    return spec, build_pairs(spec, tmp_path / "root")


def rows_of(report: str, first: str) -> list[list[str]]:
    """The cells of the tables' rows that begin with a cell."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line[:1] == "|"]
    return [row for row in cells if row[0] == first]


def test_the_report_has_the_counts_and_lengths_of_the_pairs(data_chain: DataChain, tmp_path: Path) -> None:
    spec, pairs = written(tmp_path)
    report = pairs_report(pairs, data_chain.tokenizer, spec)
    counts, *lengths = rows_of(report, "a")
    assert counts == ["a", "`el: ...`", *(str(count_of(pairs, f"{split}_pairs", 0)) for split in SPLITS), "1", *"000"]
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    every = [pair for split in SPLITS for pair in read_pairs(pairs, split, 0)]
    for row, side in zip(lengths, ("source", "target"), strict=True):
        encoded = vocabulary.encode([getattr(pair, side) for pair in every], add_eos=True)
        expected = np.quantile([len(ids) for ids in encoded], [0, 0.1, 0.5, 0.9, 0.99, 1], method="nearest")
        assert row == ["a", side, *map(str, expected)]
    assert len(lengths[0]) == 2 + len(QUANTILE_NAMES)
    assert "- Warning: task 'a': 1 of 301 pairs have an empty source or target" in report


@pytest.mark.parametrize(("too_long", "becomes"), [("cut", "will be cut"), ("drop", "left out"), ("refuse", "refused")])
def test_what_is_longer_than_a_row_is_counted_and_shown_as_it_is_cut(
    data_chain: DataChain, tmp_path: Path, too_long: str, becomes: str
) -> None:
    spec, pairs = written(tmp_path, input_tokens=8, target_tokens=4, too_long=too_long)
    report = pairs_report(pairs, data_chain.tokenizer, spec)
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    targets = [pair.target for split in SPLITS for pair in read_pairs(pairs, split, 0)]
    over = sum(len(ids) > 4 for ids in vocabulary.encode(targets, add_eos=True))
    assert f"- Warning: a: {over} targets of 300 ({over / 300:.2%}) have more than 4 tokens" in report
    assert becomes in report
    assert ("held-out ones are no exact match" in report) is (too_long == "cut")
    samples = [line for line in report.splitlines() if line.startswith("a: `")]
    assert len(samples) == 2
    assert all(line.count("</s>") == 2 for line in samples)
    assert all("el:" in line or "<unk>" in line for line in samples)


def test_unknown_pieces_and_their_characters_are_named(data_chain: DataChain, tmp_path: Path) -> None:
    spec, pairs = written(tmp_path)
    report = pairs_report(pairs, data_chain.tokenizer, spec)
    (line,) = [each for each in report.splitlines() if "1 target (0.33%), of which the model cannot write" in each]
    assert "1 unknown piece (" in line
    assert "Characters without a piece: '\u4e2d' (U+4E2D) 1 time" in line


def test_a_sample_of_many_pairs_is_measured(
    data_chain: DataChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, pairs = written(tmp_path)
    monkeypatch.setattr(module, "SAMPLED_PAIRS", 100)
    report = pairs_report(pairs, data_chain.tokenizer, spec)
    assert "in a sample of 100 pairs of a." in report
    assert " of 100 (" in report


@pytest.mark.usefixtures("quick_workers")
def test_the_report_shows_how_full_rows_are_and_recommends_the_best_where_others_are_set(
    data_chain: DataChain, tmp_path: Path
) -> None:
    spec, pairs = written(tmp_path)
    report = pairs_report(pairs, data_chain.tokenizer, spec)
    ((own, share, longer, pairs_a_row),) = rows_of(report, "256 / 256")
    assert (own, longer) == ("256 / 256", "0.00%")
    assert 0.4 < float(share) < 0.8  # the targets are half as long as the sources
    train_pairs = pairs.counts["train_pairs"]
    (rows,) = re.findall(r"rows of 256 and 256 tokens, about (\d+) rows an epoch\.", report)
    assert int(rows) == pytest.approx(train_pairs / float(pairs_a_row), abs=1)
    shards = build_pair_shards(spec, pairs, data_chain.tokenizer, tmp_path, workers=1)
    assert int(rows) == pytest.approx(shards.counts["train_rows"], rel=0.1)
    found = re.search(r"The best rows have pairs\.input_tokens=(\d+) and pairs\.target_tokens=(\d+)\.", report)
    assert found is not None
    ((_, best, _, _),) = rows_of(report, f"{found[1]} / {found[2]}")
    assert float(best) > float(share)
    unpacked = spec.model_copy(update={"pack": False})
    assert "## Rows" not in pairs_report(pairs, data_chain.tokenizer, unpacked)

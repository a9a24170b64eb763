"""Passages that a file of ``data index duplicates`` lists are removed from training, as other near-duplicates are."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from infra.head.preflight.text_checks import require_sources
from t5train.data.checks import repetitions
from t5train.data.checks.unchanged_files import content_of, digests_of
from t5train.data.checks.whole_reading import TextFindings
from t5train.data.corpus import build_corpus
from t5train.data.passages import SourceFile, split_of
from t5train.data.segments import passages_in, read_segments
from t5train.errors import InputError
from t5train.progress import silent
from t5train.records.stage_records import REPEATED, Corpus
from t5train.report.data_statistics import repetition_lines, repetition_rows
from t5train.spec import CorpusSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import WORDS

pytestmark = pytest.mark.usefixtures("quick_workers")

SPLIT = (700, 200, 100)
FILE_ROWS = 100
HEADER = {"kind": "near-duplicates", "schema_version": 2, "source": "text", "index": None}
COUNTS = {"neighbours": 10, "cosine": 0.9, "text": 0.8, "candidates": 9, "groups": 1}
Change = Callable[[dict[str, Any], list[dict[str, Any]]], object]


def made_texts(count: int = 300) -> list[str]:
    """Texts of which every tenth is empty."""
    generator = random.Random(0)
    return ["" if row % 10 == 7 else " ".join(generator.choices(WORDS, k=60)) for row in range(count)]


def write_text(folder: Path, texts: list[str], ids: Callable[[int], str] = str) -> Path:
    folder.mkdir(parents=True)
    for first in range(0, len(texts), FILE_ROWS):
        of_file = texts[first : first + FILE_ROWS]
        columns = {"id": [ids(first + row) for row in range(len(of_file))], "text": of_file}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{first:05d}.parquet")
    return folder


def place(row: int) -> dict[str, Any]:
    return {"file": f"{row // FILE_ROWS * FILE_ROWS:05d}.parquet", "row": row % FILE_ROWS, "id": str(row)}


def write_pairs(path: Path, text: Path, pairs: list[tuple[int, int]], change: Change | None = None) -> Path:
    sources = [SourceFile(each, each.name) for each in sorted(text.iterdir())]
    header: dict[str, Any] = {**HEADER, **COUNTS, "pairs": len(pairs), "files": content_of(digests_of(sources, silent))}
    lines = [{"first": place(first), "second": place(second), "text_similarity": 0.9} for first, second in pairs]
    if change is not None:
        change(header, lines)
    path.write_text("".join(json.dumps(each) + "\n" for each in (header, *lines)))
    return path


def spec_of(text: Path, pairs: Path, *remove: str) -> CorpusSpec:
    settings = {"source": str(text), "split": SPLIT, "remove": remove, "remove_listed": str(pairs), "workers": 2}
    return CorpusSpec.model_validate(settings)


def kept(corpus: Corpus) -> set[int]:
    files = read_segments(corpus.path)
    return {int(each.id) for each in passages_in((file.source, s) for file in files for s in file.segments)}


def is_train(row: int) -> bool:
    return split_of(CorpusSpec(split=SPLIT), str(row)) == "train"


TEXTS = made_texts()
WITH_TEXT = [row for row, text in enumerate(TEXTS) if text]
TRAIN, HELD_OUT = ([row for row in WITH_TEXT if is_train(row) is wanted] for wanted in (True, False))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text", TEXTS)


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 3000])
def test_of_connected_passages_the_first_stays_and_none_if_one_is_held_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(repetitions, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("t5train.data.readers.SEGMENT_BYTES", 1000)
    monkeypatch.setattr("t5train.data.segments.SEGMENT_BYTES", 1000)
    of_training = [TRAIN[1], TRAIN[60], TRAIN[150]]
    beside_held_out = [TRAIN[5], HELD_OUT[40], TRAIN[120]]
    held_out = HELD_OUT[:2]
    pairs = [(of_training[1], of_training[2]), (of_training[0], of_training[2])]
    pairs += [(beside_held_out[0], beside_held_out[1]), (beside_held_out[1], beside_held_out[2])]
    listed = write_pairs(tmp_path / "pairs.jsonl", text, sorted([*pairs, (held_out[0], held_out[1])]))
    corpus = build_corpus(spec_of(text, listed), tmp_path / "root")
    assert {*WITH_TEXT} - kept(corpus) == {*of_training[1:], beside_held_out[0], beside_held_out[2]}
    assert corpus.counts["removed_passages"] == 4
    findings = TextFindings.of(corpus)
    assert findings is not None
    assert findings.repetitions is not None
    assert (findings.repetitions["train_listed"], findings.repetitions["train_listed_across"]) == (3, 2)
    assert findings.repetitions["train_duplicates"] == 0
    assert findings.listed is not None
    assert (findings.listed.pairs, findings.listed.cosine) == (5, 0.9)
    assert any(row[0].startswith("all these and listed pairs") for row in repetition_rows(findings))
    assert "Listed are 5 pairs in 1 group" in " ".join(repetition_lines(findings))


def test_copies_and_other_near_duplicates_are_connected_with_listed_pairs(tmp_path: Path) -> None:
    first, copy, near, other = TRAIN[0], TRAIN[20], TRAIN[40], TRAIN[60]
    texts = list(TEXTS)
    texts[copy] = f" {texts[first]}"
    texts[near] = texts[other] + " more"
    text = write_text(tmp_path / "text", texts)
    listed = write_pairs(tmp_path / "pairs.jsonl", text, [(copy, near)])
    corpus = build_corpus(spec_of(text, listed), tmp_path / "root")
    alone_removed = {*WITH_TEXT} - kept(corpus)
    assert alone_removed == {copy, near}
    assert corpus.counts[REPEATED] == 0
    with_others = {*WITH_TEXT} - kept(build_corpus(spec_of(text, listed, "near_duplicates"), tmp_path / "root"))
    assert with_others == {copy, near, other}


def test_the_corpus_depends_on_the_content_of_the_file_and_not_on_its_path(text: Path, tmp_path: Path) -> None:
    pairs = [(TRAIN[0], TRAIN[1])]
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    first = build_corpus(spec_of(text, write_pairs(here, text, pairs)), tmp_path / "root")
    moved = build_corpus(spec_of(text, write_pairs(there, text, pairs)), tmp_path / "root")
    assert moved.path == first.path
    changed = build_corpus(spec_of(text, write_pairs(here, text, [(TRAIN[0], TRAIN[2])])), tmp_path / "root")
    assert changed.fingerprint != first.fingerprint
    assert TRAIN[1] in kept(changed)
    plain = CorpusSpec(source=str(text), split=SPLIT)
    assert "remove_listed" not in plain.identity()
    assert (
        spec_of(text, here).identity() == spec_of(text, there).identity() == plain.identity() | {"remove_listed": True}
    )


def set_in_header(name: str, value: object) -> Change:
    return lambda header, _: header.update({name: value})


def change_first(**values: object) -> Change:
    return lambda _, lines: lines[0]["first"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in_header("kind", "other"), "is not a file of pairs of near-duplicates"),
        (set_in_header("schema_version", 1), "was written by another version"),
        (set_in_header("cosine", "high"), r"is damaged \(cosine in its first line\)"),
        (set_in_header("pairs", 2), "has 1 pair, but should have 2 by its first line"),
        (lambda header, _: header["files"].pop(), "it was not made of 00200.parquet, which corpus.source includes"),
        (lambda header, _: header["files"][1].update(name="b"), "it was not made of 00100.parquet"),
        (lambda header, _: header["files"][1].update(size=7), "00100.parquet had 7 bytes then, and has [0-9,]+ now"),
        (lambda header, _: header["files"][1].update(sha256="0" * 64), "00100.parquet has different content now"),
        (change_first(row=FILE_ROWS), "line 2 does not name two rows of the text"),
        (change_first(row="1"), "line 2 does not name two rows of the text"),
        (change_first(file="absent"), "line 2 does not name two rows of the text"),
        (
            change_first(id="other"),
            r"line 2 names a row that has no text, or whose id differs: 00000.parquet row \d+ \('other'\)",
        ),
        (
            change_first(**place(7)),
            r"line 2 names a row that has no text, or whose id differs: 00000.parquet row 7 \('7'\)",
        ),
        (lambda _, lines: lines[0].pop("second"), "line 2 does not name two rows of the text"),
    ],
)
def test_a_file_of_another_text_or_a_damaged_one_is_refused(
    text: Path, tmp_path: Path, change: Change, message: str
) -> None:
    listed = write_pairs(tmp_path / "pairs.jsonl", text, [(TRAIN[0], TRAIN[1])], change)
    with pytest.raises(InputError, match=rf"^corpus\.remove_listed: {listed} .*{message}"):
        build_corpus(spec_of(text, listed), tmp_path / "root")


def test_a_file_of_another_text_is_refused_before_the_text_is_read(text: Path, tmp_path: Path) -> None:
    listed = write_pairs(tmp_path / "pairs.jsonl", text, [(TRAIN[0], TRAIN[1])])
    settings = {"corpus.source": str(text), "corpus.remove_listed": str(listed)}
    require_sources(recipe("smoke").with_settings(settings))
    (text / "00300.parquet").write_bytes((text / "00200.parquet").read_bytes())
    with pytest.raises(InputError, match=r"was not made of 00300\.parquet, which corpus\.source includes"):
        require_sources(recipe("smoke").with_settings(settings))
    with pytest.raises(
        InputError,
        match=r"^corpus\.remove_listed cannot be read: [^ ]*absent\.jsonl: No such file.*\. Correct the path",
    ):
        require_sources(recipe("smoke").with_settings(settings | {"corpus.remove_listed": "absent.jsonl"}))


def test_if_all_of_training_would_be_removed_the_file_is_named(text: Path, tmp_path: Path) -> None:
    pairs = [(min(row, HELD_OUT[0]), max(row, HELD_OUT[0])) for row in TRAIN]
    listed = write_pairs(tmp_path / "pairs.jsonl", text, pairs)
    with pytest.raises(InputError, match=rf"repeat others \(removed are those of corpus\.remove_listed {listed}\)"):
        build_corpus(spec_of(text, listed), tmp_path / "root")

"""Ids decide splits: blank ones do not count, and a text whose ids repeat too much to be split is refused."""

import gzip
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from infra.head.preflight.text_checks import require_text
from t5train.data.corpus import build_corpus
from t5train.data.passages import FewIds, Passage, Row, SourceFile, split_of
from t5train.data.readers import rows
from t5train.errors import InputError
from t5train.spec import CorpusSpec
from t5train.spec.recipes import recipe

ROWS = 400


def write(path: Path, ids: Sequence[object]) -> Path:
    """Passages with these ids, as .jsonl, .tsv or .parquet."""
    texts = [f"text number {row}" for row in range(len(ids))]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "text": texts}), path)
    elif path.suffix == ".tsv":
        lines = [f"{name}\t{text}\ttitle\n" for name, text in zip(ids, texts, strict=True)]
        path.write_text("".join(["id\ttext\ttitle\n", *lines]))
    else:
        lines = [json.dumps({"id": name, "text": text}) for name, text in zip(ids, texts, strict=True)]
        path.write_text("\n".join(lines) + "\n")
    return path


def ids_in(path: Path) -> list[str]:
    return [row.passage.id for row in rows(SourceFile(path, path.name))]


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv", ".parquet"])
def test_a_row_with_a_blank_id_is_identified_by_its_place(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", ["", " ", "x"])
    first = 1 if suffix == ".tsv" else 0
    assert ids_in(path) == [f"{path.name}:{first}", f"{path.name}:{first + 1}", "x"]


def test_a_row_of_parquet_whose_id_is_nan_or_null_is_identified_by_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [1.0, float("nan"), None])
    assert ids_in(path) == ["1", "a.parquet:1", "a.parquet:2"]


LARGE = 2**53 + 2
WHOLE = ["0", "1", "-3", "1000", str(LARGE)]
FLOATS = [-0.0, 1.0, -3.0, 1e3, float(LARGE)]
DECIMALS = [Decimal("0"), Decimal("1.00"), Decimal("-3"), Decimal("1E+3"), Decimal(LARGE)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (list(map(int, WHOLE)), WHOLE),
        (FLOATS, WHOLE),
        (pyarrow.array(DECIMALS, pyarrow.decimal128(38, 2)), WHOLE),
        (pyarrow.array(WHOLE, pyarrow.binary()), WHOLE),
        (pyarrow.array(WHOLE, pyarrow.large_string()), WHOLE),
        *((pyarrow.array(np.array([1, 2.5, np.nan], each)), ["1", "2.5", "a.parquet:2"]) for each in ("f2", "f4")),
    ],
)
def test_a_whole_number_is_one_document_whatever_its_type_in_parquet(
    tmp_path: Path, content: Sequence[object], expected: list[str]
) -> None:
    assert ids_in(write(tmp_path / "a.parquet", content)) == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_whole_number_is_one_document_however_json_spells_it(tmp_path: Path, suffix: str) -> None:
    spellings = ["1", "1.0", "1e0", '"1"', "-0.0", "1E3", "-3.0", f"{LARGE}.0", f"{2**64 + 1}", f"-{2**63 + 1}"]
    others = ["1.5", '"01"', '"1.0"', "true"]
    content = "".join(f'{{"id": {each}, "text": "a"}}\n' for each in spellings + others).encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == ".jsonl.gz" else content)
    whole = ["1", "1", "1", "1", "0", "1000", "-3", str(LARGE), str(2**64 + 1), str(-(2**63) - 1)]
    assert ids_in(path) == [*whole, "1.5", "01", "1.0", "True"]


def test_a_column_of_floats_in_tsv_has_the_ids_of_whole_numbers_and_leading_zeros_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", ["1.0", "-3.0", "-0.0", "01", "01.0", "1.5", "1.00", "v1.0"])
    assert ids_in(path) == ["1", "-3", "0", "01", "01.0", "1.5", "1.00", "v1.0"]
    (tmp_path / "a.csv").write_text("id,text\n1.0,x\n01,x\n1.5,x\n")
    assert ids_in(tmp_path / "a.csv") == ["1", "01", "1.5"]


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv", ".parquet"])
def test_a_text_with_one_id_is_refused_with_file_rows_id_and_remedy(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", ["wiki"] * ROWS)
    first = 1 if suffix == ".tsv" else 0
    message = (
        rf"^{path}, rows {first} to {first + ROWS - 1}: 400 passages have the id 'wiki'\. All 400 passages of the text "
        r"have 1 different id, .*: none falls into the validation split \(corpus\.split\)\. Give each document an id"
    )
    with pytest.raises(InputError, match=message):
        build_corpus(CorpusSpec(source=str(path), workers=1), tmp_path / "root")
    with pytest.raises(InputError, match=message):
        require_text(recipe("smoke").with_settings({"corpus.source": str(path)}))


def test_ids_that_repeat_over_files_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write(tmp_path / "text/a.jsonl", ["wiki"] * 10)
    largest = write(tmp_path / "text/b.jsonl", ["wiki"] * 20)
    with pytest.raises(
        InputError, match=rf"^{largest}, rows 0 to 19: 20 passages have the id 'wiki'\. All 30 passages"
    ):
        build_corpus(CorpusSpec(source=str(tmp_path / "text"), workers=2), tmp_path / "root")


def test_documents_of_several_passages_are_a_text_like_any_other_but_a_few_books_get_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [f"document {row // 12}" for row in range(12 * ROWS)])
    assert build_corpus(CorpusSpec(source=str(path), workers=1), tmp_path / "root").counts["passages"] == 12 * ROWS
    assert "different ids" not in caplog.text
    spec = CorpusSpec(source=str(tmp_path / "a.jsonl"), workers=1, split=(700, 200, 100))
    books = [f"book {number}" for number in range(10)]
    assert {split_of(spec, each) for each in books} >= {"train", "validation"}
    write(tmp_path / "a.jsonl", [each for each in books for _ in range(40)])
    build_corpus(spec, tmp_path / "root")
    assert "All 400 passages of the text have 10 different ids" in caplog.text
    assert "so the shares of passages are train " in caplog.text


def test_only_so_many_ids_are_remembered() -> None:
    ids = FewIds()
    for number in range(FewIds.MOST + 1):
        assert ids.found is not None
        ids.add(Row(number, 0, Passage(str(number), "", "text")))
    assert ids.found is None
    ids.add(Row(0, 0, Passage("0", "", "text")))
    assert ids.found is None

"""Pairs that a run could not read are refused before anything expensive starts."""

import json
from pathlib import Path

import pytest

from infra.head.preflight.pair_checks import require_pairs
from t5train.errors import InputError
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe


def spec_of(folder: Path, *train: str) -> RunSpec:
    return recipe("reverse_and_sort", {"pairs.train": [str(folder / each) for each in train]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    row = json.dumps({"translation": {"en": "a house", "de": "ein Haus"}}) + "\n"
    (tmp_path / "wmt.jsonl").write_text(row * 50)
    (tmp_path / "flat.tsv").write_text("source\ttarget\na\tb\n")
    return tmp_path


def test_the_files_of_all_tasks_are_found_and_measured(folder: Path) -> None:
    spec = spec_of(folder, "wmt.jsonl#source=translation.en&target=translation.de", "flat.tsv")
    facts = require_pairs(spec)
    assert facts.num_files == 2
    assert facts.size_bytes == sum((folder / name).stat().st_size for name in ("wmt.jsonl", "flat.tsv"))
    assert require_pairs(recipe("reverse_and_sort")).num_files == 0


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("none.jsonl", r"pairs\.train '.*none\.jsonl' does not exist"),
        ("wmt.jsonl#source=translation.fr&target=translation.de", r"line 1 has no column 'translation\.fr', only"),
        ("flat.tsv#source=src", r"flat\.tsv.* no column 'src'"),
    ],
)
def test_missing_files_and_columns_are_named(folder: Path, train: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        require_pairs(spec_of(folder, train))


def test_held_out_files_are_checked_too(folder: Path) -> None:
    spec = spec_of(folder, "flat.tsv").with_settings({"pairs.test": [str(folder / "none.tsv")]})
    with pytest.raises(InputError, match=r"pairs\.test '.*none\.tsv' does not exist"):
        require_pairs(spec)

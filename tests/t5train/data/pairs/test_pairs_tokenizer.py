"""The vocabulary of a run on pairs: trained on both sides of those to train on, or given."""

from pathlib import Path

import pytest

from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import DigestMismatch
from t5train.records.stage_records import Pairs
from t5train.spec import PairsSpec, TokenizerSpec
from t5train.spec.recipes import recipe


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    folder = tmp_path_factory.mktemp("pairs")
    words = [f"{chr(97 + number % 13)}{chr(97 + number // 13)}" for number in range(169)]
    lines = [f"{word} {word}\t{word.upper()}" for word in words]
    (folder / "upper.tsv").write_text("\n".join(["source\ttarget", *lines]) + "\n")
    (folder / "held.tsv").write_text("source\ttarget\nx y\tX Y\n")
    held = str(folder / "held.tsv")
    return build_pairs(PairsSpec(train=(str(folder / "upper.tsv"),), validation=(held,), split=(980, 20, 0)), folder)


def test_a_vocabulary_knows_sources_and_targets_to_train_on_and_not_those_held_out(
    pairs: Pairs, tmp_path: Path
) -> None:
    spec = TokenizerSpec(vocab_size=60, character_coverage=1.0)
    seen: list[tuple[str, int, int | None]] = []
    made = build_pairs_tokenizer(spec, pairs, tmp_path, lambda *report: seen.append(report))
    pieces = "".join(Tokenizer.load(made.path).pieces)
    assert {"a", "m", "A", "M"} <= set(pieces)
    assert not {"x", "X"} & set(pieces)
    assert made.inputs == {"pairs": pairs.fingerprint}
    assert any(what == "seconds of vocabulary training" for what, _, _ in seen)
    assert build_pairs_tokenizer(spec, pairs, tmp_path).reused


def test_a_given_vocabulary_is_used_as_it_is(pairs: Pairs, tmp_path: Path) -> None:
    trained = build_pairs_tokenizer(TokenizerSpec(vocab_size=60), pairs, tmp_path / "a")
    given = build_pairs_tokenizer(TokenizerSpec(path=str(trained.path)), pairs, tmp_path / "b")
    assert (given.path / "spiece.model").read_bytes() == (trained.path / "spiece.model").read_bytes()
    assert given.inputs == {}


def test_no_vocabulary_is_trained_on_damaged_pairs(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("source\ttarget\n" + "".join(f"one {number}\tother\n" for number in range(99)))
    made = build_pairs(PairsSpec(train=(str(path),), split=(800, 100, 100)), tmp_path)
    damaged = made.path / "train-000.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b"one", b"two", 1))
    with pytest.raises(DigestMismatch, match=r"train-000\.jsonl"):
        build_pairs_tokenizer(TokenizerSpec(vocab_size=60), made, tmp_path)


def test_the_vocabulary_of_the_built_in_pairs_has_a_piece_for_each_digit_with_its_space(tmp_path: Path) -> None:
    spec = recipe("reverse_and_sort")
    made = build_pairs_tokenizer(spec.tokenizer, build_pairs(spec.pairs, tmp_path), tmp_path)
    tokenizer = Tokenizer.load(made.path)
    assert {f"\u2581{digit}" for digit in range(10)} <= set(tokenizer.pieces)

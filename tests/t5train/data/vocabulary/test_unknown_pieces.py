"""Unknown pieces are counted in the whole training split. Many of them are a warning, and more are refused."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.segments import Segment, Stretch
from t5train.data.shards import build_shards
from t5train.data.vocabulary.sentencepiece_model import Encoder
from t5train.data.vocabulary.tokenizer import SPIECE
from t5train.data.vocabulary.unknown_pieces import (
    UnknownPieces,
    counts_with_unknown,
    recorded_unknown,
    require_known,
    unknown_line,
)
from t5train.errors import InputError
from t5train.records.stage_records import TokenShards
from t5train.spec import CorpusSpec, ShardsSpec
from tests.support.generated_text import WORDS, DataChain

MANY = {"train_tokens": 1000, "unknown_pieces": 11, "lacked_character_U+003C": 7, "lacked_character_U+4E2D": 9}


def made_of(data_chain: DataChain, folder: Path, lines: Sequence[str], max_unknown_share: float = 0.1) -> TokenShards:
    """Tokenise lines of text with the vocabulary of ``data_chain``."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    spec = CorpusSpec(source=str(folder / "text.txt"), split=(800, 100, 100), workers=1)
    shards = ShardsSpec(shard_tokens=4096, workers=1, max_unknown_share=max_unknown_share)
    return build_shards(shards, spec, build_corpus(spec, folder), data_chain.tokenizer, folder)


def lines_with(rare: str, every: int, count: int = 1000) -> list[str]:
    return [f"{WORDS[number % 600]} {rare if number % every == 0 else 'el'} {WORDS[7]}" for number in range(count)]


def test_more_than_one_percent_is_a_warning_with_the_characters_and_the_remedy(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shards = made_of(data_chain, tmp_path, lines_with("\u4e2d \u00a7 \u00a7", every=4))
    unknown = shards.counts["unknown_pieces"]
    assert 0.01 < unknown / shards.counts["train_tokens"] < 0.1
    (warning,) = [record.message for record in caplog.records if "unknown piece" in record.message]
    assert f"({unknown:,} of {shards.counts['train_tokens']:,})" in warning
    assert "'\u00a7' (U+00A7)" in warning
    assert "tokenizer.character_coverage" in warning
    assert warning.index("U+00A7") < warning.index("U+4E2D"), "the most frequent character is named first"
    caplog.clear()
    assert made_of(data_chain, tmp_path, lines_with("\u4e2d \u00a7 \u00a7", every=4)).reused
    assert warning in caplog.messages


def test_few_unknown_pieces_are_counted_and_no_warning(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = made_of(data_chain, tmp_path, lines_with("\u4e2d", every=100))
    assert recorded_unknown(shards.counts).keys() == {"unknown_pieces"}
    assert shards.counts["unknown_pieces"] > 0
    assert not [message for message in caplog.messages if "unknown piece" in message]
    earlier = {name: count for name, count in shards.counts.items() if name != "unknown_pieces"}
    assert counts_with_unknown(shards.model_copy(update={"counts": earlier})) == shards.counts, "counted from the files"


def test_too_many_unknown_pieces_are_refused_unless_the_setting_or_an_earlier_version_accepted_them(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = lines_with("\u4e2d \u00a7 \u4e2d", every=1)
    with pytest.raises(InputError, match=r"'\u4e2d' \(U\+4E2D\).*raise shards\.max_unknown_share, which is 0\.1"):
        made_of(data_chain, tmp_path, text)
    assert not list(tmp_path.glob("shards/*/manifest.json"))
    accepted = made_of(data_chain, tmp_path, text, max_unknown_share=0.6)
    assert accepted.counts["unknown_pieces"] > 0.1 * accepted.counts["train_tokens"]
    with pytest.raises(InputError, match=r"raise shards\.max_unknown_share"):
        made_of(data_chain, tmp_path, text)  # also where the shards are there already
    counts = {name: count for name, count in accepted.counts.items() if name not in recorded_unknown(accepted.counts)}
    accepted.model_copy(update={"counts": counts}).commit()
    caplog.clear()
    assert made_of(data_chain, tmp_path, text).reused
    assert "of the tokens of the training split are the unknown piece" in caplog.text


def test_a_text_is_refused_as_soon_as_its_other_shards_cannot_change_it(data_chain: DataChain, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\u4e2d " * 1000)
    path = str(tmp_path / "text.txt")
    plan = [[Stretch(path, "text.txt", Segment(0, 1, 0, 1000))] for _ in range(4)]
    unknown = UnknownPieces(plan, data_chain.tokenizer.path / "spiece.model", 0.1)
    unknown.add(2, tokens=1000, unknown=900)
    with pytest.raises(InputError, match=r"90\.0% of the tokens"):
        unknown.add(0, tokens=1000, unknown=900)


def test_text_that_normalisation_makes_longer_is_not_refused_too_early(data_chain: DataChain, tmp_path: Path) -> None:
    longest = "\ufdfa"  # becomes 18 characters, more for its bytes than any other
    text_bytes, tokens = len(longest.encode()), len(Encoder(data_chain.tokenizer.path / SPIECE).normalised(longest)) + 2
    first, later = (Stretch("", "", Segment(0, 1, 0, n)) for n in (1, 900 * text_bytes))
    unknown = UnknownPieces([[first], [later]], tmp_path, 0.1)
    unknown.add(0, tokens=2000, unknown=1990)
    unknown.add(1, tokens=900 * tokens, unknown=0)  # now 10% of all


def test_a_share_at_the_limit_is_accepted() -> None:
    require_known({"train_tokens": 1000, "unknown_pieces": 100}, 0.1)
    with pytest.raises(InputError):
        require_known({"train_tokens": 1000, "unknown_pieces": 101}, 0.1)
    with pytest.raises(InputError, match="1 of 1,000 tokens"):
        require_known({"train_tokens": 1000, "unknown_pieces": 1}, 0)


def test_a_warning_names_characters_by_frequency_and_a_remedy_for_the_one_that_no_vocabulary_has() -> None:
    line = unknown_line(MANY)
    assert line.startswith("1.1% of the tokens of the training split are the unknown piece (11 of 1,000)")
    assert "'\u4e2d' (U+4E2D) 9 times, '<' (U+003C) 7 times" in line
    assert not unknown_line(MANY | {"unknown_pieces": 10})
    assert not unknown_line({})
    assert "U+2585" not in line
    assert "replace U+2585 in the text" in unknown_line(MANY | {"lacked_character_U+2585": 20})

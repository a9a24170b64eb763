"""Encoding: the reference's ids where SentencePiece's float32 sums differ, and where texts may be cut."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from t5train.data.vocabulary.held_out import write_held_out
from t5train.data.vocabulary.sentencepiece_model import Encoder
from t5train.data.vocabulary.tokenizer import Tokenizer, given_tokenizer
from t5train.errors import InputError
from t5train.records.witness import EncodedPassage
from tests.support.generated_text import ODD_CHARACTERS, WORDS, DataChain

PARAGRAPH = " ".join(WORDS[:300])
ROWS_OF_DASHES = st.text("-=", min_size=1, max_size=40)
UNICODE = st.text(st.sampled_from(ODD_CHARACTERS) | st.characters(exclude_categories=["Cs"]))


def with_pieces(data_chain: DataChain, folder: Path, pieces: dict[str, float]) -> Path:
    """Write the vocabulary of ``data_chain``, with some of its longer pieces replaced."""
    model = sentencepiece_model_pb2.ModelProto.FromString((data_chain.tokenizer.path / "spiece.model").read_bytes())
    longer = (piece for piece in model.pieces[3:] if len(piece.piece) > 3)
    for old, (piece, score) in zip(longer, pieces.items(), strict=False):
        old.piece, old.score = piece, score
    folder.mkdir()
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    return folder / "spiece.model"


@pytest.fixture(scope="module")
def ambiguous_tokenizer(data_chain: DataChain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary in which a row of dashes has many segmentations of exactly the same score."""
    folder = tmp_path_factory.mktemp("rulers")
    scores = {"-": -7.1301, "--": -9.2703, "---": -8.8107, "----": -11.3709, "=": -6.7013, "==": -8.1217, "=-": -10.01}
    return given_tokenizer(with_pieces(data_chain, folder / "given", scores), folder).path


@pytest.fixture(scope="module")
def hugging_face(ambiguous_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ambiguous_tokenizer)


@given(st.lists(ROWS_OF_DASHES | st.sampled_from(WORDS), max_size=30).map(" ".join))
def test_ties_between_segmentations_are_broken_as_by_hugging_face(
    ambiguous_tokenizer: Path, hugging_face: Any, text: str
) -> None:
    expected = hugging_face(text).input_ids
    assert Tokenizer.load(ambiguous_tokenizer).encode([text], add_eos=True)[0].tolist() == expected


def test_a_word_whose_sums_float32_rounds_is_no_other_vocabulary(data_chain: DataChain, tmp_path: Path) -> None:
    scores = {"-": -7.13, "=": -6.7, "--": -14.2592, "==": -13.3992}
    folder = given_tokenizer(with_pieces(data_chain, tmp_path / "given", scores), tmp_path).path
    text = "".join(random.Random(0).choices("-=", k=4000))
    (ids,) = Tokenizer.load(folder).encode([text], add_eos=True)
    found = [EncodedPassage(text=text, ids=ids.tolist())]
    assert write_held_out(tmp_path, found, folder / "tokenizer.json") == {"held_out_compared": 1, "held_out_tied": 1}
    half = found[0].model_copy(update={"ids": found[0].ids[: len(found[0].ids) // 2]})
    with pytest.raises(InputError, match="encodes 1 of 1 held-out passages differently"):
        write_held_out(tmp_path, [half], folder / "tokenizer.json")


@pytest.mark.parametrize("add_eos", [True, False])
def test_a_long_text_has_the_ids_of_its_words(ambiguous_tokenizer: Path, hugging_face: Any, add_eos: bool) -> None:
    tokenizer, rng = Tokenizer.load(ambiguous_tokenizer), random.Random(0)
    rows = ["".join(rng.choices("-=", k=rng.randint(2, 40))) for _ in range(300)]
    text = " ".join([PARAGRAPH, *rows] * 5)
    ids = tokenizer.encode([text, "", "el", text], add_eos=add_eos)
    of_words = [number for each in tokenizer.encode(text.split(" ")) for number in each.tolist()]
    expected = hugging_face(text, add_special_tokens=add_eos).input_ids
    assert ids[0].tolist() == ids[3].tolist() == expected == of_words + [tokenizer.eos_id] * add_eos
    assert ids[1].tolist() == [tokenizer.eos_id] * add_eos


@pytest.mark.parametrize("word", ["el\u2581", "\u2581", "el\u00a0", "\u0301", "\u200b", "日本", "\u0085"])
def test_cutting_a_long_text_does_not_change_its_ids(data_chain: DataChain, published: Any, word: str) -> None:
    encoder = Encoder(data_chain.tokenizer.path / "spiece.model")
    for start in range(1180, 1220):  # puts the word on either side of the first cut
        text = f"{PARAGRAPH[:start]} {word}  {word} {PARAGRAPH}"
        assert encoder.encode([text], add_eos=True)[0].tolist() == published(text).input_ids


def test_a_piece_of_several_words_is_never_cut(data_chain: DataChain, tmp_path: Path) -> None:
    phrase = f"\u2581{WORDS[0]}\u2581{WORDS[1]}"
    encoder = Encoder(with_pieces(data_chain, tmp_path / "given", {phrase: -0.01}))
    ids = encoder.encode([" ".join(WORDS[:2] * 1000)])[0]
    assert len(ids) == 1000
    assert len(set(ids.tolist())) == 1


@pytest.fixture(scope="module")
def published(data_chain: DataChain) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_chain.tokenizer.path)


CAUSES = {
    "U+0085 separates words": "el\u0085il",
    "a short grapheme keeps its first match only": "\uff21\u0301",
    "a space with a combining mark": "el\u00a0\u05a4il",
    "a long grapheme is not composed": "a\u030f\u0349\u032f",
    "an emoji of several code points": "\U0001f468\u200d\U0001f469",
    "parts of a syllable": "\u1100\u1161\u11a8",
    "a half-width sound mark": "\uff76\uff9e",
}


@pytest.mark.parametrize("text", CAUSES.values(), ids=CAUSES)
def test_text_that_normalisers_treat_differently_gets_the_published_tokenizers_ids(
    data_chain: DataChain, published: Any, text: str
) -> None:
    for surrounded in (text, f"el {text} il", f"{text}{text}"):
        (ids,) = Tokenizer.load(data_chain.tokenizer.path).encode([surrounded], add_eos=True)
        assert ids.tolist() == published(surrounded).input_ids


@given(st.lists(UNICODE, max_size=5))
def test_any_text_gets_the_published_tokenizers_ids(data_chain: DataChain, published: Any, texts: list[str]) -> None:
    texts = [text for text in texts if "<" not in text]  # there, the text of a control token becomes that token
    encoded = Encoder(data_chain.tokenizer.path / "spiece.model").encode(texts, add_eos=True)
    assert [ids.tolist() for ids in encoded] == [published(text).input_ids for text in texts]

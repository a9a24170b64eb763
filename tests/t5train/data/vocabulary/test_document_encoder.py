"""Documents: the compiled segmenter gives the ids of Encoder, whatever the text, and its memory is bounded."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceNormalizer, sentencepiece_model_pb2

from t5train.data.native import segmenter_build
from t5train.data.vocabulary.document_encoder import DocumentEncoder, warn_if_slow
from t5train.data.vocabulary.sentencepiece_model import Encoder, train
from t5train.spec import TokenizerSpec
from tests.support.generated_text import ODD_CHARACTERS, WORDS, DataChain

Model = sentencepiece_model_pb2.ModelProto
SMALL_CACHE = 1 << 14  # room for about a hundred words, so that most are forgotten
LITERALS = ["</s>", "<pad>", "<unk>", "<extra_id_0>", "\x00", "---", "{}", "\u65e5\u672c\u8a9e"]
CHARACTERS = st.sampled_from(ODD_CHARACTERS) | st.characters(exclude_categories=["Cs"])
PARTS = st.sampled_from([*WORDS[:60], *LITERALS, " ", "  ", "\n"]) | st.text(CHARACTERS, max_size=4)
TEXTS = st.lists(st.lists(PARTS, max_size=12).map("".join), max_size=6)


@pytest.fixture(scope="module", autouse=True)
def native() -> ModuleType:
    """The segmenter, which `make setup` has compiled."""
    module = segmenter_build.load(segmenter_build.build())
    assert module is not None
    return module


@pytest.fixture(scope="module")
def spiece(data_chain: DataChain) -> Path:
    """A vocabulary of ASCII."""
    return data_chain.tokenizer.path / "spiece.model"


def changed(spiece: Path, folder: Path, change: Callable[[Model], object]) -> Path:
    """Write a changed copy of a vocabulary."""
    model = Model.FromString(spiece.read_bytes())
    change(model)
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    return folder / "spiece.model"


# Scores with which rows of dashes have several segmentations of the same score, and marks that are pieces.
FOREIGN = {"-": -7.1301, "---": -8.8107, "----": -11.3709, "=": -6.7013, "==": -8.1217, "\u0300": -9.5, "\u0301": -9.7}


@pytest.fixture(scope="module")
def foreign_spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with pieces of other scripts, and with FOREIGN."""
    foreign = ["caf\u00e9", "\u65e5\u672c\u8a9e", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e19\u0e49\u0e33"]
    parts, folder = foreign * 20 + WORDS, tmp_path_factory.mktemp("foreign")
    texts = [" ".join(parts[first::7]) for first in range(7)] * 5
    (folder / "spiece.model").write_bytes(train(TokenizerSpec(vocab_size=300), texts))

    def replace_longer(model: Model) -> None:
        present = {piece.piece for piece in model.pieces}
        longer = (piece for piece in model.pieces[3:] if len(piece.piece) > 3)
        for text in FOREIGN.keys() - present:
            next(longer).piece = text
        for piece in model.pieces:
            piece.score = FOREIGN.get(piece.piece, piece.score)

    return changed(folder / "spiece.model", folder, replace_longer)


def assert_same(fast: DocumentEncoder, slow: Encoder, texts: list[str]) -> None:
    found = fast.encode(texts)
    expected = slow.encode(texts, add_eos=True)
    assert found.lengths.tolist() == [len(ids) for ids in expected]
    assert found.ids.tolist() == [number for ids in expected for number in ids.tolist()]


@pytest.fixture(scope="module", params=["spiece", "foreign_spiece"])
def slow(request: pytest.FixtureRequest) -> tuple[Encoder, Path]:
    path: Path = request.getfixturevalue(request.param)
    return Encoder(path), path


@pytest.fixture(scope="module", params=[1 << 22, SMALL_CACHE], ids=["large cache", "small cache"])
def both(slow: tuple[Encoder, Path], request: pytest.FixtureRequest) -> tuple[DocumentEncoder, Encoder]:
    encoder, path = slow
    return DocumentEncoder(path, request.param), encoder


@given(TEXTS)
@example([])
@example(["", " ", "\n \n"])
@example(["\u0340\u0301x", " \u0340\u0301x", "el \u0340\u0301x il", "el\u0600 \u0600 il "])
@example(["\u3131\u314f el", "\u3131\u314f e\u0301l", "\u3131\u314f el"])
@example(["el\u2581 il", "\u2581 el", "el \u2581il \u2581"])
@example(["\u00e9", "\u00e9\x00", "\u00e9\x00\x00 \u00e9"])
@example(["el\u00a0 \u05a4il", "\x00 el\x00 \x00il"])
@example(["{}.{{}}{", "el{}il.{el}", "{el,il.el}(el)"])
@example(["\u65e5", "", "el\u00a0\u3000il\u3000", "\u00a8el\u2160", "\x01", "\x01el\x02"])
def test_any_texts_have_the_ids_of_the_slow_encoder(both: tuple[DocumentEncoder, Encoder], texts: list[str]) -> None:
    assert both[0].segmenter is not None
    assert_same(*both, texts)


@given(st.lists(st.text("-=ab", min_size=1, max_size=40), max_size=60).map(" ".join))
def test_the_first_of_equal_segmentations_wins(both: tuple[DocumentEncoder, Encoder], text: str) -> None:
    assert_same(*both, [text])


LONG = {
    "a word at the bound of the cache": "a" * 255,
    "a word above it": "el" * 128,
    "a word of other characters above it": "\u00e9" * 200,
    "a word that becomes longer than the bound": "\ufdfa" * 80,
    "a word of many parts": "el.il,(el):" * 20,
    "a word whose sum is rounded": "q\u017c" * 3000,
    "a stretch whose sum is rounded": "\u65e5\u672c \u8a9e" * 300,
    "unknown characters between words": "\u65e5 el il " * 500,
    "long text": " ".join(WORDS * 5),
    "long text with a mark": " ".join(WORDS * 5) + " e\u0301 " + " ".join(WORDS),
    "spaces at a cut": " ".join(WORDS[:200]) + " " * 2000 + " ".join(WORDS[200:]),
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_words_and_texts_have_the_ids_of_the_slow_encoder(
    both: tuple[DocumentEncoder, Encoder], text: str
) -> None:
    assert_same(*both, [text, "el", f"el {text} il", text])


class Asked:
    """Record what an encoder leaves to the slow one: whole texts, and words."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        self.texts, self.words = list[str](), list[str]()
        encode_texts, encode_words = encoder._slowly, encoder._words.encode

        def note_texts(texts: Any) -> Any:
            self.texts.extend(texts)
            return encode_texts(texts)

        def note_words(words: Any, how: Any) -> Any:
            self.words.extend(words)
            return encode_words(words, how)

        encoder._slowly, encoder._words.encode = note_texts, note_words


def test_a_sum_beyond_the_exact_range_is_left_to_the_slow_encoder(spiece: Path) -> None:
    encoder = DocumentEncoder(spiece)
    asked, rounded = Asked(encoder), "\u65e5 " * 600
    encoder.encode([" ".join(WORDS * 10), rounded, "el"])
    assert asked.texts == [rounded]


def test_a_text_with_a_word_that_could_not_be_remembered_is_left_to_the_slow_encoder_at_once(spiece: Path) -> None:
    encoder = DocumentEncoder(spiece)
    asked = Asked(encoder)
    encoder.encode(["\u65e5" * 300, "cafe\u0301", "\ufdfa" * 80])
    assert asked.texts == ["\u65e5" * 300, "\ufdfa" * 80]
    assert asked.words == ["cafe\u0301"]


def test_only_words_of_texts_with_characters_that_combine_are_asked_for(foreign_spiece: Path) -> None:
    encoder = DocumentEncoder(foreign_spiece)
    asked = Asked(encoder)
    encoder.encode(["caf\u00e9 \u65e5\u672c\u8a9e \uff21\ufb04 \x01", "caf\u00e9 el cafe\u0301"])
    assert asked.words == ["caf\u00e9", "cafe\u0301"]


def test_the_cache_is_bounded_and_keeps_frequent_words(spiece: Path) -> None:
    encoder = DocumentEncoder(spiece, 1 << 20)
    assert encoder.segmenter is not None
    frequent = "cafe\u0301s"  # a word that has to be asked for
    asked = Asked(encoder).words
    for number in range(300):
        encoder.encode([f"{frequent} " + " ".join(f"{frequent}{number}x{each}" for each in range(200))])
    assert encoder.segmenter.num_bytes <= 1 << 20
    assert 1000 < encoder.segmenter.num_words < 40_000
    assert asked.count(frequent) == 1
    assert asked.count(f"{frequent}0x0") == 1
    encoder.encode([f"{frequent}0x0"])
    assert asked.count(f"{frequent}0x0") == 2, "the rare word should have been forgotten"


def other_rules(model: Model) -> None:
    normaliser = SentencePieceNormalizer(rule_name="nmt_nfkc_cf")
    model.normalizer_spec.CopyFrom(Model.FromString(normaliser.serialized_model_proto()).normalizer_spec)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.pieces[10], "piece", "a\u2581b"),
        lambda model: setattr(model.pieces[10], "score", 0.5),
        lambda model: setattr(model.pieces[10], "type", Model.SentencePiece.USER_DEFINED),
        lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", b""),
        other_rules,
    ],
    ids=["piece of two words", "positive score", "user defined", "no rules", "other rules"],
)
def test_a_vocabulary_whose_words_may_depend_on_each_other_is_encoded_slowly(
    spiece: Path, tmp_path: Path, change: Callable[[Model], None]
) -> None:
    path = changed(spiece, tmp_path, change)
    encoder = DocumentEncoder(path)
    assert encoder.segmenter is None
    assert_same(encoder, Encoder(path), ["a b el il", "", "caf\u00e9 el"])


def test_rules_that_reach_over_a_space_are_found(native: ModuleType, spiece: Path) -> None:
    table = Model.FromString(spiece.read_bytes()).normalizer_spec.precompiled_charsmap
    assert native.rules_keep_words_apart(table)
    assert not native.rules_keep_words_apart(b"")
    assert not native.rules_keep_words_apart(table[:100])
    assert not native.rules_keep_words_apart(table.replace(b"\x00 \x00", b"\x00_\x00"))
    assert not native.rules_keep_words_apart(table + b"  \x00")
    assert not native.rules_keep_words_apart(table + b"\xe2\x96\x81\x00")


def test_without_the_compiled_segmenter_ids_are_the_same_and_a_warning_names_the_remedy(
    spiece: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    warn_if_slow()
    assert not caplog.records
    monkeypatch.setattr(segmenter_build, "built", lambda: tmp_path / "segmenter.so")
    encoder = DocumentEncoder(spiece)
    assert encoder.segmenter is None
    assert_same(encoder, Encoder(spiece), ["el il", "", "caf\u00e9"])
    warn_if_slow()
    assert "python -m t5train.data.native.segmenter_build" in caplog.text


def test_a_lone_surrogate_is_refused(spiece: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        DocumentEncoder(spiece).encode(["el \ud800"])


def test_ids_have_two_bytes_where_that_suffices(spiece: Path, tmp_path: Path) -> None:
    many = [Model.SentencePiece(piece=f"z{number}", score=-9.0) for number in range(1 << 16)]
    large = changed(spiece, tmp_path, lambda model: model.pieces.extend(many))
    for path, dtype in {spiece: np.uint16, large: np.uint32}.items():
        encoder = DocumentEncoder(path)
        assert encoder.segmenter is not None
        assert [array.dtype for array in encoder.encode(["el"])] == [dtype, np.uint32]
    assert_same(encoder, Encoder(large), ["z65535 z1z12 zel", f"{'z65534,' * 30}"])

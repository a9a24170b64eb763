"""Runs of words are those of a plain definition, and MinHash finds as many near-duplicates as its formula says."""

import random
import unicodedata
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.checks import word_grams
from t5train.data.checks.word_grams import BUCKETS, Grams, WordHashes, _patterns, bucket_keys, grams, words_of
from tests.support.generated_text import WORDS

TEXTS = st.lists(st.text("ab c", max_size=40), max_size=8)


def runs_of(text: str, length: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


@given(TEXTS, st.integers(1, 5))
def test_two_runs_have_the_same_hash_exactly_if_they_have_the_same_words(texts: list[str], length: int) -> None:
    found = grams(WordHashes().of(texts), length)
    expected = [run for text in texts for run in runs_of(text, length)]
    assert found.counts.tolist() == [len(runs_of(text, length)) for text in texts]
    assert len(set(zip(found.hashes.tolist(), expected, strict=True))) == len(set(expected))
    assert len(set(found.hashes.tolist())) == len(set(expected))


def test_case_punctuation_and_white_space_do_not_count() -> None:
    one, other, third = (
        WordHashes().of(["Don't stop, Ünal!\n", "don t  STOP ünal", "don t stop unal"]).hashes.reshape(3, 4)
    )
    assert one.tolist() == other.tolist() != third.tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी में वाक्य", ["हिन्दी", "में", "वाक्य"]),
        ("مَرْحَبًا بِكُمْ", ["مَرْحَبًا", "بِكُمْ"]),
        ("cafe\u0301 CAFÉ naïve", ["café", "café", "naïve"]),
        ("我买了苹果。你呢!", list("我买了苹果你呢")),
        ("ひらカナ x1", [*"ひらカナ", "x1"]),
        ("กำ ไทย", ["ก", "ำ", "ไ", "ท", "ย"]),
        ("\U00020000\U00020001 \U0001d431\U0001d432 \U0001f642", ["\U00020000", "\U00020001", "\U0001d431\U0001d432"]),
        ("Snake_case 3½ ²", ["snake_case", "3½", "²"]),
    ],
)
def test_words_are_those_of_their_script(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_text_without_marks_is_divided_alike_by_both_patterns(text: str) -> None:
    lower = unicodedata.normalize("NFC", text).lower()
    in_any_script, is_needed = _patterns()
    if not is_needed.search(lower):
        assert in_any_script.findall(lower) == words_of(text)


def keys_of(texts: list[str]) -> np.ndarray:
    return bucket_keys(grams(WordHashes().of(texts), 5))


@given(st.lists(st.text("ab c", max_size=60), min_size=1, max_size=8))
def test_the_keys_of_a_text_do_not_depend_on_the_others(texts: list[str]) -> None:
    together = keys_of(texts)
    assert together.shape == (BUCKETS, len(texts))
    for number, text in enumerate(texts):
        assert together[:, number].tolist() == keys_of([text])[:, 0].tolist()
        assert (together[:, number] != 0).all() if runs_of(text, 5) else not together[:, number].any()


def test_the_keys_do_not_depend_on_how_many_runs_are_hashed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(random.Random(number).choices(WORDS, k=number % 40)) for number in range(200)]
    whole = keys_of(texts)
    for size in (1, 50, 1000):
        monkeypatch.setattr(word_grams, "_CHUNK_GRAMS", size)
        assert (keys_of(texts) == whole).all()


def test_the_keys_are_the_same_on_every_machine() -> None:
    keys = keys_of(["the quick brown fox jumps over the lazy dog"])
    assert sha256(keys.astype("<u8").tobytes()).hexdigest()[:16] == "4be7e7f614c1ef89"


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.05), (0.6, 0.21), (0.72, 0.65), (0.8, 0.92), (0.9, 1.0)])
def test_near_duplicates_are_found_as_often_as_documented(share: float, expected: float) -> None:
    """Sets of hashes with a known share in common stand for texts."""
    generator, pairs, size = np.random.default_rng(0), 2000, 100
    common = round(2 * size * share / (1 + share))
    hashes = generator.integers(1, 1 << 64, (pairs, 2 * size - common), np.uint64)
    both = np.concatenate([hashes[:, :size], hashes[:, size - common :]], axis=1)
    keys = bucket_keys(Grams(both.ravel(), np.full(2 * pairs, size)))
    found = (keys[:, ::2] == keys[:, 1::2]).any(axis=0).mean()
    assert found == pytest.approx(expected, abs=0.04)

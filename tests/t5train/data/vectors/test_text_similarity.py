"""The similarity of texts is the share of their runs of five words, as documented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.vectors.text_similarity import NEAR_DUPLICATE, text_similarity, word_grams

WORDS = [f"word{number}" for number in range(110)]
PASSAGE = " ".join(WORDS[:100])


def changed(*places: int) -> str:
    return " ".join("other" if place in places else word for place, word in enumerate(WORDS[:100]))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (PASSAGE, 1.0),
        (PASSAGE.upper().replace(" ", ",\n "), 1.0),
        (changed(50), 91 / 101),
        (changed(30, 60), 86 / 106),
        (changed(20, 50, 80), 81 / 111),
        (" ".join(WORDS[10:110]), 86 / 106),
        (" ".join(reversed(WORDS[:100])), 0.0),
        ("", 0.0),
    ],
)
def test_similarities_are_those_of_the_documentation(other: str, expected: float) -> None:
    assert text_similarity(PASSAGE, other) == pytest.approx(expected)


def test_two_changed_words_in_a_hundred_are_a_near_duplicate_and_three_are_not() -> None:
    assert 81 / 111 < NEAR_DUPLICATE <= 86 / 106


def test_short_texts_are_compared_as_a_whole_and_texts_without_words_are_similar_to_nothing() -> None:
    assert text_similarity("One, two three", "one two THREE") == 1
    assert text_similarity("one two three", "one two four") == 0
    assert text_similarity("...", "...") == 0
    assert word_grams("a b c d e f") == {("a", "b", "c", "d", "e"), ("b", "c", "d", "e", "f")}


@given(st.text("ab \n.", max_size=60), st.text("ab \n.", max_size=60))
def test_similarity_is_symmetric_and_between_0_and_1(one: str, other: str) -> None:
    value = text_similarity(one, other)
    assert value == text_similarity(other, one)
    assert 0 <= value <= 1
    assert text_similarity(one, one) == (1 if word_grams(one) else 0)

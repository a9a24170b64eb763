"""What a model generated is put into the gaps of a text."""

import pytest

from t5train.inference.text.generation import filled, is_as_trained, sentinels_in, spans_of

S0, S1, S2 = "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"


class WordPieces:
    def convert_tokens_to_string(self, pieces: list[str]) -> str:
        return "".join(pieces).replace("\u2581", " ")


def _fill(text: str, *pieces: str) -> str:
    return filled(text, spans_of(pieces, sentinels_in(text)), WordPieces())


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        (f"The {S0} fox", ("<pad>", S0, "▁quick", "▁brown", "</s>"), "The quick brown fox"),
        (f"The walk {S0} fox", (S0, "ing"), "The walking fox"),
        (f"a {S0} b {S1} c", (S0, S1, "▁x", S2, "▁y"), "a b x c"),
        (f"a {S0} b {S1} c", (S1, "▁x"), f"a {S0} b x c"),
        (f"a {S0} b", (S0, "▁x", S0, "▁y"), "a x b"),
        (f"a {S0} b", ("▁before", S0, "▁x", "</s>", "▁after"), "a x b"),
        (f"{S0} b", (S0, "▁x"), "x b"),
        (f"({S0})", (S0, "▁x"), "(x)"),
        (f"a\n{S0} b", (S0, "▁x"), "a\nx b"),
        (f"a {S0} b {S0}", (S0, "▁x"), "a x b x"),
    ],
)
def test_spans_replace_their_sentinels(text: str, pieces: tuple[str, ...], expected: str) -> None:
    assert _fill(text, *pieces) == expected


def test_sentinels_are_found_once_each_and_only_those_of_t5() -> None:
    assert sentinels_in(f"{S1} {S0} {S1} <extra_id_100> <extra_id_x>") == [S1, S0]
    assert sentinels_in("none") == []


@pytest.mark.parametrize(("sentinels", "as_trained"), [([S0, S1], True), ([S1, S0], False), ([S1], False), ([], True)])
def test_sentinels_as_trained_count_up_from_0(sentinels: list[str], as_trained: bool) -> None:
    assert is_as_trained(sentinels) is as_trained

"""Finds the sentinels of a text, and puts the spans that a model generated for them in their place."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from t5train.spec import NUM_SENTINELS

_SENTINEL = re.compile("<extra_id_([0-9]+)>")
_SPACE = "\u2581"  # SentencePiece's symbol for a space, with which a piece begins a word


def sentinels_in(text: str) -> list[str]:
    """Return the sentinels of a text in their order, each once."""
    found = [match[0] for match in _SENTINEL.finditer(text) if int(match[1]) < NUM_SENTINELS]
    return list(dict.fromkeys(found))


def is_as_trained(sentinels: Sequence[str]) -> bool:
    """Return whether sentinels count up from ``<extra_id_0>``, as in every text that a T5 was pre-trained with."""
    return list(sentinels) == [f"<extra_id_{index}>" for index in range(len(sentinels))]


def spans_of(pieces: Sequence[str], sentinels: Sequence[str]) -> dict[str, list[str]]:
    """Return the pieces after each of ``sentinels`` in what a model generated, up to its next sentinel or its end.

    A sentinel that was not generated is left out. Of one that was generated twice, the first counts.
    """
    spans: dict[str, list[str]] = {}
    current: list[str] | None = None
    for piece in pieces:
        if piece in ("</s>", "<pad>"):
            current = None
        elif _SENTINEL.fullmatch(piece):
            current = spans.setdefault(piece, []) if piece in sentinels and piece not in spans else None
        elif current is not None:
            current.append(piece)
    return spans


def filled(text: str, spans: Mapping[str, Sequence[str]], tokenizer: Any) -> str:
    """Return the text with the spans in place of their sentinels. A sentinel without a span stays.

    The space before a sentinel is dropped if its span continues the word before it, or is empty.
    """

    def replacement(match: re.Match[str]) -> str:
        space, sentinel = match.groups()
        if sentinel not in spans:
            return match[0]
        span = spans[sentinel]
        begins_word = bool(span) and span[0].startswith(_SPACE)
        return (space if begins_word else "") + text_of(span, tokenizer)

    return re.sub(r"(\s*)(<extra_id_[0-9]+>)", replacement, text)


def text_of(span: Sequence[str], tokenizer: Any) -> str:
    """Return the text of a span of pieces."""
    return str(tokenizer.convert_tokens_to_string(list(span))).strip() if span else ""

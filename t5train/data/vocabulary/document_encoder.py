"""Encodes documents in batches, with the compiled segmenter where it gives the same ids as ``Encoder``.

The segmenter splits texts at spaces, normalises words with SentencePiece's table, segments them and remembers their
ids. That gives the ids of ``Encoder`` for these reasons:

- Neither a piece nor an unknown run nor a rule of normalisation spans two words, so the ids of a text are those of its
  words. The segmenter is used only if that holds (``_can_segment``). A word then includes spaces next to a character
  that may combine with them. A text with U+2581, which is a space only after normalisation, is left to Encoder.
- Encoder's sums are exact up to 8192 nats, so the ids of a word do not depend on the words before it. A text in which
  a sum of Encoder would exceed that is left to Encoder.
- ``Encoder`` normalises a text in one of two ways, which depends on the whole text. Where no character may combine with
  others, SentencePiece does, and the segmenter does the same with its table. Otherwise, ``Encoder`` is asked for the
  words that are not of printable ASCII, which are then remembered.
- A text with a very long word, which could not be remembered, is left to Encoder as a whole: so are texts in scripts
  without spaces.
"""

import logging
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from t5train.data.native import segmenter_build
from t5train.data.vocabulary.sentencepiece_model import (
    SCORE_STEPS,
    SPACE,
    UNK_ID,
    Encoder,
    combining,
    require_t5_form_of,
)
from t5train.errors import SpecError

_UNKNOWN_NATS = 10  # SentencePiece's kUnkPenalty: an unknown character costs this more than the rarest piece
_CACHE_BYTES = 128 << 20
_NEVER = frozenset(" \0")
"""No piece of what is segmented in C++ has these: spaces become SPACE, and words with zeros are left to Encoder."""
_log = logging.getLogger(__name__)


class Documents(NamedTuple):
    """The ids of several documents one after the other, each with EOS, and the number of ids of each (uint32).

    Ids are uint16 if the segmenter has found them and the vocabulary is small enough; else uint32.
    """

    ids: np.ndarray
    lengths: np.ndarray


class DocumentEncoder:
    """Encodes documents to the ids of ``Encoder``. An object may be used by one thread at a time.

    Each object remembers words in up to ``cache_bytes`` of memory (128 MiB).
    """

    def __init__(self, spiece: Path, cache_bytes: int = _CACHE_BYTES) -> None:
        self._encoder = Encoder(spiece)
        self._words = _Words(self._encoder)
        self.segmenter = _segmenter(self._encoder, self._words, cache_bytes)

    def encode(self, texts: list[str]) -> Documents:
        """Return the ids of each text, each followed by EOS."""
        if self.segmenter is None:
            return self._slowly(texts)
        return Documents(*self.segmenter.encode(texts, self._words.encode, self._slowly))

    def _slowly(self, texts: list[str]) -> Documents:
        return Documents(*_flat(self._encoder.encode(texts, add_eos=True)))


def warn_if_slow() -> None:
    """Log a warning if the segmenter is not compiled, which makes a difference where much text is encoded."""
    if segmenter_build.load(segmenter_build.built()) is None:
        _log.warning(
            "text is tokenised at a third of the usual speed or less, because the segmenter is not compiled. To "
            "compile it, run %s (in a checkout: make setup)",
            segmenter_build.COMMAND,
        )


class _Segmenter(Protocol):
    """The C++ class (``t5train/data/native/segmenter.cpp``)."""

    num_words: int
    num_bytes: int

    def encode(self, texts: list[str], encode_words: object, encode_texts: object) -> tuple[np.ndarray, np.ndarray]: ...


class _Words:
    """Encodes the words that the segmenter does not, and bounds the sums that Encoder forms for them."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.pieces = encoder.pieces
        scores = [0.0] * (UNK_ID + 1) + [piece.score for piece in encoder.model.pieces[UNK_ID + 1 :]]
        self.costs = np.array([-round(score * SCORE_STEPS) for score in scores], np.int64)
        self.unknown_cost = int(self.costs[UNK_ID + 1 :].max(initial=0)) + _UNKNOWN_NATS * SCORE_STEPS
        self._lengths = np.array([len(piece) for piece in self.pieces], np.int64)

    def encode(self, words: list[str], combines: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return ids, the number of ids of each word, and an upper bound of each word's cost in steps of the scores."""
        encoded = self._encoder.encode_alike(words, combines)
        ids, lengths = _flat(encoded)
        ends = np.cumsum(lengths, dtype=np.int64)
        sums = np.concatenate([[0], np.cumsum(self.costs[ids])])
        bounds = sums[ends] - sums[ends - lengths]
        of_unknown = np.concatenate([[0], np.cumsum(ids == UNK_ID)])
        for number in np.flatnonzero(of_unknown[ends] > of_unknown[ends - lengths]):
            bounds[number] = self._bound(words[number], encoded[number])
        return ids, lengths, bounds.tolist()

    def _bound(self, word: str, ids: np.ndarray) -> int:
        """Return the bound for a word with unknown characters."""
        known = ids[ids != UNK_ID]
        # One id stands for several unknown characters. With the space before the word, they are at most:
        characters = 1 + max(len(word), len(self._encoder.normalised(word)))
        return int(self.costs[known].sum()) + self.unknown_cost * (characters - int(self._lengths[known].sum()))


def _flat(encoded: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for ids in encoded], np.uint32)
    return np.concatenate([np.empty(0, np.int32), *encoded]).astype(np.uint32), lengths


def _segmenter(encoder: Encoder, words: _Words, cache_bytes: int) -> _Segmenter | None:
    """Return a segmenter for the vocabulary, None if it would give other ids or is not compiled."""
    native = segmenter_build.load(segmenter_build.built())
    table = encoder.model.normalizer_spec.precompiled_charsmap
    if native is None or not _can_segment(encoder, words) or not native.rules_keep_words_apart(table):
        return None
    pieces = [
        (piece.replace(SPACE, " ").encode(), number)
        for number, piece in enumerate(words.pieces)
        if number > UNK_ID and _NEVER.isdisjoint(piece)
    ]
    kind = native.Segmenter16 if len(words.pieces) <= 1 << 16 else native.Segmenter32
    segmenter: _Segmenter = kind(pieces, words.costs, words.unknown_cost, table, _combining_bits(), cache_bytes)
    return segmenter


def _can_segment(encoder: Encoder, words: _Words) -> bool:
    """Return whether the vocabulary is in T5's form, words are independent, and sums are exact.

    No cost may be negative: if the sum of the whole is in the exact range, so are its parts. The C++ code adds up the
    costs of up to 256 characters in 32 bits.
    """
    try:
        require_t5_form_of(encoder.model, "the vocabulary")
    except SpecError:
        return False
    costs = words.costs[UNK_ID + 1 :]
    return encoder.falls_apart_at_spaces and costs.min(initial=0) >= 0 and words.unknown_cost < 1 << 22


def _combining_bits() -> bytes:
    """Return a bit for each character of the basic plane: whether it may combine with others."""
    plane = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    bits = np.zeros(0x10000, bool)
    bits[[ord(match.group()) for match in combining().finditer(plane)]] = True
    return np.packbits(bits, bitorder="little").tobytes()

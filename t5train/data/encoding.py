"""Text to ids: SentencePiece's segmentation, made to agree with Hugging Face's tokenizer, the reference.

A published model is used with that one, so a text that the two encode differently would be trained on with ids that
nobody gives it later. They differ in three ways.

Sums: SentencePiece adds up scores in float32 from the beginning of a text on, the reference in float64, word by word.
So scores are rounded to a grid on which float32 sums are exact up to 8192, and segmentations that are equally good
(``---``+``-``, ``-``+``---``) tie instead of being told apart by rounding errors. And a long text is encoded in
stretches short enough for that; they end at spaces, where the segmentation of a text falls apart anyway.

Normalisation: SentencePiece replaces the longest match of its table wherever it stands. The reference goes grapheme by
grapheme. One of less than six bytes it replaces by the shortest match at its beginning, and drops the rest of it
(a full-width A with an acute accent becomes a plain A); a longer one it replaces character by character, and never
composes it. Spaces: the reference splits words at U+0085 too, which the table leaves as it is. Both matter only
in texts with characters that combine with others, or with U+0085: these are normalised by the reference's own
normaliser, and SentencePiece segments the result as it is.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers.normalizers import Precompiled

_SCORE_STEPS = 1 << 11  # a nat; float32 has 24 bits, so sums are exact below 2**24 / 2**11
_STRETCH_CHARACTERS = 1200  # at 2 to 3 nats a character; 8192 leaves room for 6.8
_SPACE = "\u2581"  # what SentencePiece writes for a space
_NEXT_LINE = "\u0085"
_COMBINING = {"Mn", "Mc", "Me", "Cf", "Cn"}  # unassigned ones may combine in a later version of Unicode
# Of the basic plane, what combines though its category does not say so: prefixes, vowels of Thai and Lao that follow
# their consonant, parts of Hangul syllables, half-width Japanese sound marks.
_ALSO_COMBINING = "\u0d4e\u0e33\u0eb3\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff\uff9e\uff9f"
_LOCAL_RULES = {"nmt_nfkc", "nfkc", "identity"}  # normalisations without a rule for a space and its neighbours


class Encoder:
    """Text to ids as Hugging Face's T5 tokenizer forms them, except that no text becomes a control id."""

    def __init__(self, spiece: Path) -> None:
        model = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
        for piece in model.pieces:
            piece.score = round(piece.score * _SCORE_STEPS) / _SCORE_STEPS
        self._falls_apart_at_spaces = _falls_apart_at_spaces(model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self._normaliser = _normaliser(model)
        model.normalizer_spec.ClearField("precompiled_charsmap")
        self._of_normalised = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.num_pieces = len(model.pieces)

    def encode(self, texts: list[str], *, add_eos: bool = False) -> list[np.ndarray]:
        """int32 ids of each text; its EOS comes last if ``add_eos``."""
        ids: list[np.ndarray] = []
        for combines, some in groupby(texts, _combines):
            if combines:
                ids += self._encoded(self._of_normalised, [self._normalised(text) for text in some], add_eos)
            else:
                ids += self._encoded(self._processor, list(some), add_eos)
        return ids

    def _normalised(self, text: str) -> str:
        """As the reference does, which then splits at white space: all but U+0085 is a plain space by then."""
        if self._normaliser:
            text = self._normaliser.normalize_str(text)
        return text.replace(_NEXT_LINE, " ")

    def _encoded(
        self, processor: sentencepiece.SentencePieceProcessor, texts: list[str], add_eos: bool
    ) -> list[np.ndarray]:
        if not self._falls_apart_at_spaces or all(len(text) <= _STRETCH_CHARACTERS for text in texts):
            return _segmented(processor, texts, add_eos)
        stretches = [_stretches(text) for text in texts]
        encoded = iter(_segmented(processor, [each for some in stretches for each in some], add_eos))
        return [_joined(encoded, len(some), add_eos) for some in stretches]


def _segmented(processor: sentencepiece.SentencePieceProcessor, texts: list[str], add_eos: bool) -> list[np.ndarray]:
    # One thread: processes share the work, threads would fight over it.
    ids: list[np.ndarray] = processor.encode(texts, return_type="numpy", add_eos=add_eos, num_threads=1)
    return ids


def _normaliser(model: sentencepiece_model_pb2.ModelProto) -> Precompiled | None:
    """The normaliser of the reference; None where the vocabulary has no table for it."""
    table = model.normalizer_spec.precompiled_charsmap
    return Precompiled(table) if table else None


def _combines(text: str) -> bool:
    """Whether a text may have U+0085, or a grapheme of several characters."""
    return not text.isascii() and _combining().search(text) is not None


@cache
def _combining() -> re.Pattern[str]:
    """Also every character beyond the basic plane: they are rare, and a pattern of one range is fast."""
    found = [chr(code) for code in range(0x80, 0xD800) if unicodedata.category(chr(code)) in _COMBINING]
    found += [chr(code) for code in range(0xE000, 0x10000) if unicodedata.category(chr(code)) in _COMBINING]
    return re.compile(f"[{_NEXT_LINE}{_ALSO_COMBINING}{''.join(map(re.escape, found))}\U00010000-\U0010ffff]")


def _stretches(text: str) -> list[str]:
    """The text, cut at spaces."""
    cut, first = [], 0
    while (end := text.find(" ", first + _STRETCH_CHARACTERS)) >= 0:
        cut.append(text[first:end])
        first = end + 1
    return [*cut, text[first:]]


def _falls_apart_at_spaces(model: sentencepiece_model_pb2.ModelProto) -> bool:
    """Whether no piece, unknown run or rule of normalisation reaches from one word into the next."""
    pieces = {piece.piece for piece in model.pieces}
    return (
        model.normalizer_spec.name in _LOCAL_RULES
        and not model.trainer_spec.treat_whitespace_as_suffix
        and _SPACE in pieces
        and not any(_SPACE in piece[1:] for piece in pieces)
    )


def _joined(encoded: Iterator[np.ndarray], count: int, add_eos: bool) -> np.ndarray:
    """The next ``count`` arrays in one, of whose EOS only the last stays."""
    if count == 1:
        return next(encoded)
    parts = [next(encoded) for _ in range(count)]
    if add_eos:
        parts[:-1] = [part[:-1] for part in parts[:-1]]
    return np.concatenate(parts)

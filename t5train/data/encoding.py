"""Text to ids: SentencePiece's segmentation, with ties and long texts resolved as exact arithmetic would.

SentencePiece adds up scores in float32 from the beginning of a text on; Hugging Face's tokenizer, the reference,
does so in float64, word by word. So two things differ from SentencePiece alone. Scores are rounded to a grid on
which float32 sums are exact up to 8192, so that segmentations that are equally good (``---``+``-``, ``-``+``---``)
tie instead of being told apart by rounding errors. And a long text is encoded in stretches short enough for that;
they end at spaces, where the segmentation of a text falls apart anyway.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

_SCORE_STEPS = 1 << 11  # a nat; float32 has 24 bits, so sums are exact below 2**24 / 2**11
_STRETCH_CHARACTERS = 1200  # at 2 to 3 nats a character; 8192 leaves room for 6.8
_SPACE = "\u2581"  # what SentencePiece writes for a space
_LOCAL_RULES = {"nmt_nfkc", "nfkc", "identity"}  # normalisations without a rule for a space and its neighbours


class Encoder:
    """Text to ids as Hugging Face's T5 tokenizer forms them, except that no text becomes a control id."""

    def __init__(self, spiece: Path) -> None:
        model = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
        for piece in model.pieces:
            piece.score = round(piece.score * _SCORE_STEPS) / _SCORE_STEPS
        self._falls_apart_at_spaces = _falls_apart_at_spaces(model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.num_pieces = len(model.pieces)

    def encode(self, texts: list[str], *, add_eos: bool = False) -> list[np.ndarray]:
        """int32 ids of each text; its EOS comes last if ``add_eos``."""
        if not self._falls_apart_at_spaces or all(len(text) <= _STRETCH_CHARACTERS for text in texts):
            return self._segmented(texts, add_eos)
        stretches = [_stretches(text) for text in texts]
        encoded = iter(self._segmented([each for some in stretches for each in some], add_eos))
        return [_joined(encoded, len(some), add_eos) for some in stretches]

    def _segmented(self, texts: list[str], add_eos: bool) -> list[np.ndarray]:
        # One thread: processes share the work, threads would fight over it.
        ids: list[np.ndarray] = self._processor.encode(texts, return_type="numpy", add_eos=add_eos, num_threads=1)
        return ids


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

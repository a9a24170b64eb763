"""Vocabularies that other files than T5's spiece.model describe, as SentencePiece models in T5's form.

mT5's model has the sentinels as its last pieces, and spells characters without a piece in bytes. The tokenizer of
transformers does not: it takes the names of bytes for plain pieces. So does the model in T5's form, in which all ids
are the same. A folder that transformers 5 wrote has only a ``tokenizer.json``.
"""

import base64
import json
from itertools import chain
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from t5train.data.vocabulary.sentencepiece_model import EOS_ID, PAD_ID, SPACE, SPECIAL_PIECES, UNK_ID
from t5train.errors import InputError
from t5train.spec import NUM_SENTINELS

SENTINELS = tuple(f"<extra_id_{index}>" for index in reversed(range(NUM_SENTINELS)))
"""In the order of their ids."""
_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


def is_sentinel(piece: str, sentinel: str) -> bool:
    """Whether a piece is this sentinel, which mT5's model writes as a word."""
    return piece.removeprefix(SPACE) == sentinel


def in_t5_form(proto: bytes) -> bytes:
    """Return a SentencePiece model in T5's form if it ends with all sentinels; other models, and any other bytes, as
    they are.
    """
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    except Exception:  # of protobuf; require_t5_form says what is wrong
        return proto
    if not _ends_with_sentinels([piece.piece for piece in model.pieces]):
        return proto
    del model.pieces[-NUM_SENTINELS:]
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.byte_fallback = False
    del model.trainer_spec.user_defined_symbols[:]
    for piece in model.pieces:
        if piece.type == _Piece.BYTE:
            piece.type = _Piece.NORMAL
    changed: bytes = model.SerializeToString(deterministic=True)
    return changed


def of_tokenizer_json(file: Path) -> bytes:
    """Return the model that a ``tokenizer.json`` describes, in T5's form. Raises InputError if the file is damaged."""
    model = sentencepiece_model_pb2.ModelProto()
    try:
        document = json.loads(file.read_bytes())
        for piece, score in document["model"]["vocab"]:
            model.pieces.add(piece=str(piece), score=float(score))
        for special, kind in ((PAD_ID, _Piece.CONTROL), (EOS_ID, _Piece.CONTROL), (UNK_ID, _Piece.UNKNOWN)):
            model.pieces[special].type = kind
        table = _table(document["normalizer"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise InputError(f"{file} is not a unigram tokenizer in JSON. Copy it again from where you got it") from None
    if _ends_with_sentinels([piece.piece for piece in model.pieces]):
        del model.pieces[-NUM_SENTINELS:]
    trained = model.trainer_spec
    trained.model_type, trained.vocab_size = trained.UNIGRAM, len(model.pieces)
    trained.pad_id, trained.eos_id, trained.unk_id, trained.bos_id = PAD_ID, EOS_ID, UNK_ID, -1
    trained.pad_piece, trained.eos_piece, trained.unk_piece = SPECIAL_PIECES
    model.normalizer_spec.name, model.normalizer_spec.precompiled_charsmap = "nmt_nfkc", table
    made: bytes = model.SerializeToString(deterministic=True)
    return made


def _ends_with_sentinels(pieces: list[str]) -> bool:
    last = pieces[-NUM_SENTINELS:]
    return len(last) == NUM_SENTINELS and all(map(is_sentinel, last, SENTINELS))


def _table(normalizer: Any) -> bytes:
    """Return the normalisation table, which may be one step of several; empty if there is none."""
    steps = [normalizer, *chain((normalizer or {}).get("normalizers", ()))]
    tables = [step["precompiled_charsmap"] for step in steps if step and "precompiled_charsmap" in step]
    return base64.b64decode(tables[0]) if tables else b""

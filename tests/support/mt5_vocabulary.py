"""A small vocabulary in the form of mT5's: pieces for all bytes, and the sentinels as its last pieces."""

import io
import json
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from t5train.spec import NUM_SENTINELS


def write_mt5_vocabulary(folder: Path, pieces: int = 412) -> None:
    """Write spiece.model, with as many pieces and 100 sentinels, and the tokenizer's configuration."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the time of year number {index} and the way of the day" for index in range(400)]),
        model_writer=content,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc",
        byte_fallback=True,
        vocab_size=pieces,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(content.getvalue())
    user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    for index in reversed(range(NUM_SENTINELS)):
        model.pieces.add(piece=f"\u2581<extra_id_{index}>", score=0.0, type=user_defined)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 0, "tokenizer_class": "T5Tokenizer"}))

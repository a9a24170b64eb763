"""SentencePiece models in T5's form: what makes one, and how to train one."""

import io
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from t5train.errors import InputError, SpecError
from t5train.progress import Progress
from t5train.spec import TokenizerSpec

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SPECIAL_PIECES = ("<pad>", "</s>", "<unk>")
_SENTINEL = re.compile("<extra_id_[0-9]+>")
_NUM_THREADS = 8  # part of the result: sums are formed per thread
_SENTENCE_CHARACTERS = 1000  # at most 4 bytes each, so below the length that the trainer would skip
_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


def require_t5_form(proto: bytes, where: str) -> None:
    """SpecError unless ``proto`` is a SentencePiece model that encodes text as T5's does.

    That is: a unigram without byte fallback, ``<pad>``, ``</s>``, ``<unk>`` first, and every other piece plain
    text, so that no text becomes a control id.
    """
    model = _parsed(proto, where)
    if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM or model.trainer_spec.byte_fallback:
        raise SpecError(f"tokenizer.path: {where} is not a unigram without byte fallback, as T5's vocabulary is")
    spelling = model.normalizer_spec
    if not (spelling.add_dummy_prefix and spelling.remove_extra_whitespaces and spelling.escape_whitespaces):
        raise SpecError(f"tokenizer.path: {where} treats spaces in another way than T5's vocabulary does")
    first = tuple(piece.piece for piece in model.pieces[:3])
    if first != SPECIAL_PIECES:
        raise SpecError(f"tokenizer.path: {where} begins with the pieces {first}: T5's begins with {SPECIAL_PIECES}")
    kinds = [piece.type for piece in model.pieces[:3]]
    if kinds != [_Piece.CONTROL, _Piece.CONTROL, _Piece.UNKNOWN]:
        raise SpecError(f"tokenizer.path: {where}: the types of {first} must be control, control, unknown")
    for piece in model.pieces[3:]:
        if piece.type != _Piece.NORMAL or _SENTINEL.search(piece.piece):
            raise SpecError(
                f"tokenizer.path: {where} has the special piece {piece.piece!r}, which text could spell: "
                "take a model with <pad>, </s>, <unk> and plain pieces only"
            )


def train(spec: TokenizerSpec, texts: Iterable[str], progress: Progress) -> bytes:
    """Train a unigram of ``spec.vocab_size`` pieces, T5's special ones among them, with T5's normalisation.

    The same texts in the same order give the same bytes. SpecError when the texts cannot fill the vocabulary.
    """
    with ThreadPoolExecutor(1) as pool:  # the trainer has no callback; the clock at least shows that it lives
        started = time.monotonic()
        training = pool.submit(_train, spec, texts)
        while True:
            try:
                trained = training.result(timeout=1)
            except NotYet:
                progress("seconds of vocabulary training", int(time.monotonic() - started), None)
            else:
                seconds = int(time.monotonic() - started)
                progress("seconds of vocabulary training", seconds, seconds)
                return trained


def _train(spec: TokenizerSpec, texts: Iterable[str]) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=spec.vocab_size,
            character_coverage=spec.character_coverage,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            pad_piece=SPECIAL_PIECES[PAD_ID],
            eos_piece=SPECIAL_PIECES[EOS_ID],
            unk_piece=SPECIAL_PIECES[UNK_ID],
            normalization_rule_name="nmt_nfkc",
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise _training_error(spec, str(error)) from error
    return model.getvalue()


def _training_error(spec: TokenizerSpec, why: str) -> SpecError:
    if match := re.search(r"value <= (\d+)", why):
        return SpecError(
            f"tokenizer.vocab_size is {spec.vocab_size}: this corpus gives at most {match[1]} pieces; "
            "lower it or add text"
        )
    if match := re.search(r"smaller than required_chars\D*\d+ vs (\d+)", why):
        return SpecError(
            f"tokenizer.vocab_size is {spec.vocab_size}: the corpus has more characters than that ({match[1]}); "
            "raise it or lower tokenizer.character_coverage"
        )
    return SpecError(f"tokenizer.vocab_size {spec.vocab_size} cannot be trained on this corpus: {why}")


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), _SENTENCE_CHARACTERS):
            yield text[start : start + _SENTENCE_CHARACTERS]


def _parsed(proto: bytes, where: str) -> sentencepiece_model_pb2.ModelProto:
    """The model, if SentencePiece itself takes it for one."""
    try:
        sentencepiece.SentencePieceProcessor(model_proto=proto)
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(proto)
    except Exception as error:
        # protobuf and SentencePiece share no class of errors narrower than this
        raise InputError(f"{where} is not a SentencePiece model: {error}") from error
    if not model.pieces:
        raise InputError(f"{where} is not a SentencePiece model: it has no pieces")
    return model

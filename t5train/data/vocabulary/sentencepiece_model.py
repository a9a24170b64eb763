"""SentencePiece models in T5's form: how to recognise one, train one, and encode text with one.

Text is encoded with SentencePiece, adjusted to give the ids of Hugging Face's tokenizer ("the reference" below), except
where two segmentations are equally probable but for rounding. A published model is used with the reference. If the two
encoded a text differently, the model would have been trained on ids that it never sees in use. Without the adjustments,
they differ in three ways.

Sums: SentencePiece adds up scores in float32 from the beginning of a text; the reference adds them in float64, word by
word. Scores are therefore rounded to a grid on which float32 sums are exact up to 8192. Equally good segmentations
(``---``+``-`` and ``-``+``---``) then tie instead of being decided by rounding errors. Rounding can also make a tie of
segmentations whose scores differ by less than the grid: of such a word, the ids may not be those of the reference. That
is rare: 24 of 42,400 hostile texts had one. A long text is encoded in stretches that are short enough to stay below
8192. They end at spaces, which always separate pieces. Only a word of thousands of characters without a space (base64,
hexadecimal digits) can cost more: of such a word, too, rounding may decide between segmentations that almost tie.

Normalisation: SentencePiece replaces the longest match of its table, wherever it occurs. The reference works grapheme
by grapheme. It replaces a grapheme of fewer than six bytes by the shortest match at its beginning, and drops the rest
(a full-width A with an acute accent becomes a plain A). It replaces a longer grapheme character by character, and never
composes it.

Spaces: the reference also splits words at U+0085, which the table leaves unchanged.

Normalisation and spaces matter only in texts with combining characters or U+0085. The reference's own normaliser
normalises these texts, and SentencePiece segments the result without normalising it again.
"""

import io
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers.normalizers import Precompiled

from t5train.errors import InputError, SpecError

if TYPE_CHECKING:  # importing it takes long for a worker process, which only encodes
    from t5train.spec import TokenizerSpec

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SPECIAL_PIECES = ("<pad>", "</s>", "<unk>")
_SENTINEL = re.compile("<extra_id_[0-9]+>")
_RULE = "nmt_nfkc"
_NMT_NFKC_TABLES = {
    "0942789e0111452f1cc446f70036e26d24458c3c7858c53cc12ca4d87531279b",  # up to 0.1.91, and T5's own
    "51d3684747b35ef99cd4802f37cc1ee0c6bec4d060814f774efb1066d3c167f2",  # 0.1.99 and 0.2.0
    "79372c41389c2b9b29bc171017ab5400e352debd686b02670a42bec709015074",  # 0.2.1
    "1e2c7b43d3ee9755ceaa2ac335e253d8703604e0249ee1e81156c92b46423844",  # 0.2.3
}
"""sha256 of the table of the rule nmt_nfkc in versions of SentencePiece, which differ in their version of Unicode."""
_WHILE_TRAINING = ("pad piece", "eos piece", "unk piece")
"""SentencePiece's trainer cuts text where it spells a special piece, and does not count these characters. It does not
find these names in any text, because there a space is U+2581 by then."""
_NUM_THREADS = 8  # changes the result, because sums are formed per thread
_SENTENCE_CHARACTERS = 1000  # at most 4 bytes each: the trainer skips sentences of more than 4192 bytes
TRAINERS_UNKNOWN = "\u2585"  # the trainer's own symbol for unknown characters: it skips sentences that contain it
_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


FINISH_OR_BEGIN_ANOTHER = (
    "begin a new run (another --name) with a vocabulary like T5's, or finish it with the version that began it"
)
"""The remedy for a run that an earlier version began with a vocabulary that is now refused."""


def require_t5_form(proto: bytes, where: str) -> None:
    """Raise SpecError unless ``proto`` is a SentencePiece model that encodes text as T5's does.

    Of a given vocabulary, transformers' T5 tokenizer uses the pieces, their scores and the normalisation table. It does
    everything else as for T5's own: it splits text at white space, puts a space before each word, and has no byte
    fallback. A model with other properties would be trained on ids that the published tokenizer does not produce.

    So it must be a unigram model without byte fallback, with T5's normalisation and treatment of spaces. Its first
    pieces must be ``<pad>``, ``</s>`` and ``<unk>``, and all others plain parts of words, so that no text is encoded as
    a control id. Raises InputError if ``proto`` is not a SentencePiece model at all.
    """
    require_t5_form_of(_parsed(proto, where), where)


def require_t5_form_of(model: sentencepiece_model_pb2.ModelProto, where: str) -> None:
    """Raise SpecError unless a parsed model is one that ``require_t5_form`` accepts."""
    if (difference := next(chain(_differing_settings(model), _differing_pieces(model)), None)) is not None:
        raise SpecError(
            f"tokenizer.path: {where} {difference}. transformers' T5 tokenizer would encode text otherwise than "
            "training does. Choose a vocabulary like T5's, or leave out tokenizer.path to train one. A run that an "
            f"earlier version began with this vocabulary cannot use another: {FINISH_OR_BEGIN_ANOTHER}"
        )


def _differing_settings(model: sentencepiece_model_pb2.ModelProto) -> Iterator[str]:
    trained, normalised = model.trainer_spec, model.normalizer_spec
    if trained.model_type != trained.UNIGRAM:
        kind = trained.ModelType.Name(trained.model_type).lower()
        yield f"is a SentencePiece model of type {kind}, but must be a unigram model"
    for name, value, required in (
        ("byte_fallback", trained.byte_fallback, False),
        ("treat_whitespace_as_suffix", trained.treat_whitespace_as_suffix, False),
        ("add_dummy_prefix", normalised.add_dummy_prefix, True),
        ("remove_extra_whitespaces", normalised.remove_extra_whitespaces, True),
        ("escape_whitespaces", normalised.escape_whitespaces, True),
    ):
        if value != required:
            yield f"has {name}={str(value).lower()}, but T5's vocabulary has {name}={str(required).lower()}"
    if (trained.eos_piece or SPECIAL_PIECES[EOS_ID]) != SPECIAL_PIECES[EOS_ID]:
        yield f"ends texts with {trained.eos_piece!r} (eos_piece), but T5's vocabulary with {SPECIAL_PIECES[EOS_ID]!r}"
    if not _has_t5_table(model):
        yield f"has another normalisation table than {_RULE} (its rule is named {normalised.name or 'identity'!r})"
    if model.denormalizer_spec.precompiled_charsmap:
        yield "has denormalization rules, but T5's vocabulary has none"


def _differing_pieces(model: sentencepiece_model_pb2.ModelProto) -> Iterator[str]:
    first = tuple(piece.piece for piece in model.pieces[:3])
    if first != SPECIAL_PIECES:
        yield f"begins with the pieces {first}, but must begin with {SPECIAL_PIECES}"
    kinds = [piece.type for piece in model.pieces[:3]]
    if kinds != [_Piece.CONTROL, _Piece.CONTROL, _Piece.UNKNOWN]:
        names = ", ".join(_Piece.Type.Name(kind).lower() for kind in kinds)
        yield f"has the pieces {first} of the types {names}, but they must be control, control and unknown"
    lowest = min((piece.score for piece in model.pieces[3:]), default=0)
    for piece in model.pieces[:3]:
        if piece.score < lowest:  # transformers derives the cost of unknown characters from the lowest score of all
            yield f"has the score {piece.score:g} for {piece.piece}, but no other piece has a score below {lowest:g}"
    for piece in model.pieces[3:]:
        if piece.type != _Piece.NORMAL or piece.piece in SPECIAL_PIECES or _SENTINEL.search(piece.piece):
            yield f"has the special piece {piece.piece!r}, but beside {SPECIAL_PIECES}, all pieces must be plain text"
        if not -_LARGEST_COST <= piece.score <= 0:
            yield (
                f"has the score {piece.score:g} for the piece {piece.piece!r}, but scores must be from "
                f"-{_LARGEST_COST} to 0 (log probabilities)"
            )
        if SPACE in piece.piece[1:]:
            yield f"has the piece {piece.piece!r} with a space after its beginning, but no piece may span words"
    if SPACE not in {piece.piece for piece in model.pieces}:
        yield f"has no piece for a space ({SPACE!r}), but must have one: else an unknown word joins its neighbours"


def _has_t5_table(model: sentencepiece_model_pb2.ModelProto) -> bool:
    """Return whether the normalisation table is that of nmt_nfkc, in any version of SentencePiece that is known."""
    table = model.normalizer_spec.precompiled_charsmap
    return sha256(table).hexdigest() in _NMT_NFKC_TABLES or table == _installed_table()


@cache
def _installed_table() -> bytes:
    """Return the table that ``train`` uses."""
    normaliser = sentencepiece.SentencePieceNormalizer(rule_name=_RULE)
    spec = sentencepiece_model_pb2.ModelProto.FromString(normaliser.serialized_model_proto()).normalizer_spec
    table: bytes = spec.precompiled_charsmap
    return table


def train(spec: "TokenizerSpec", texts: Iterable[str]) -> bytes:
    """Train a unigram model of ``spec.vocab_size`` pieces, including T5's special ones, with T5's normalisation.

    Text that spells a special piece counts like any other. The same texts in the same order give the same bytes.
    Signals are not handled before it returns, but other threads run. Raises SpecError if the vocabulary is too large or
    too small for the texts.
    """
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
            pad_piece=_WHILE_TRAINING[PAD_ID],
            eos_piece=_WHILE_TRAINING[EOS_ID],
            unk_piece=_WHILE_TRAINING[UNK_ID],
            normalization_rule_name=_RULE,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise _training_error(spec, str(error)) from error
    return _with_special_pieces(model.getvalue())


def _with_special_pieces(proto: bytes) -> bytes:
    """Return a trained model with the names of T5's special pieces."""
    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    for piece, name in zip(model.pieces, SPECIAL_PIECES, strict=False):
        piece.piece = name
    model.trainer_spec.pad_piece = SPECIAL_PIECES[PAD_ID]
    model.trainer_spec.eos_piece = SPECIAL_PIECES[EOS_ID]
    model.trainer_spec.unk_piece = SPECIAL_PIECES[UNK_ID]
    named: bytes = model.SerializeToString()
    return named


def _training_error(spec: "TokenizerSpec", why: str) -> SpecError:
    if match := re.search(r"value <= (\d+)", why):
        return SpecError(
            f"tokenizer.vocab_size is {spec.vocab_size}: this corpus gives at most {match[1]} pieces. "
            f"Lower tokenizer.vocab_size to {match[1]}, add text, or use an existing vocabulary (tokenizer.path)"
        )
    if match := re.search(r"smaller than required_chars\D*\d+ vs (\d+)", why):
        return SpecError(
            f"tokenizer.vocab_size is {spec.vocab_size}: the characters of this corpus alone need {match[1]} pieces. "
            f"Raise tokenizer.vocab_size, well above {match[1]} if words are to have pieces, or lower "
            "tokenizer.character_coverage"
        )
    return SpecError(
        f"a vocabulary with tokenizer.vocab_size {spec.vocab_size} cannot be trained on this corpus. SentencePiece "
        f"reports: {why}"
    )


def most_pieces(error: SpecError) -> int | None:
    """Return the size of the largest vocabulary that the texts give, if an error of ``train`` says so."""
    match = re.search(r" gives at most (\d+) pieces\. ", str(error))
    return None if match is None else int(match[1])


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), _SENTENCE_CHARACTERS):
            yield text[start : start + _SENTENCE_CHARACTERS].replace(TRAINERS_UNKNOWN, " ")


def _parsed(proto: bytes, where: str) -> sentencepiece_model_pb2.ModelProto:
    """Parse the model. Raises InputError if SentencePiece does not accept it, or if it has no pieces."""
    try:
        sentencepiece.SentencePieceProcessor(model_proto=proto)
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(proto)
    except Exception as error:
        # protobuf and SentencePiece share no narrower base class
        raise InputError(
            f"{where} is not a SentencePiece model, or is damaged ({str(error).rstrip('. ')}). Restore the file or "
            "choose another model (tokenizer.path)"
        ) from error
    if not model.pieces:
        raise InputError(
            f"{where} is not a SentencePiece model: it has no pieces. Choose another model (tokenizer.path)"
        )
    return model


SCORE_STEPS = 1 << 11  # per nat; float32 has 24 bits, so sums are exact below 2**24 / 2**11
_LARGEST_COST = 1 << 10  # nats; trained scores are above -20, and sums up to 8192 are exact
_STRETCH_CHARACTERS = 1200  # text has 2 to 3 nats per character, and a sum of 8192 allows 6.8
SPACE = "\u2581"  # SentencePiece's symbol for a space
_NEXT_LINE = "\u0085"
_COMBINING = {"Mn", "Mc", "Me", "Cf", "Cn"}  # unassigned ones may combine in a later version of Unicode
# Characters of the basic plane that combine although their category does not say so: prefixes, vowels of Thai and Lao
# that follow their consonant, parts of Hangul syllables, half-width Japanese sound marks.
_ALSO_COMBINING = "\u0d4e\u0e33\u0eb3\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff\uff9e\uff9f"


def num_pieces(model: bytes, texts: Iterable[str]) -> int:
    """Return how many pieces a model divides texts into."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return sum(len(processor.encode(text)) for text in texts)


class Encoder:
    """Encodes text to the ids of Hugging Face's T5 tokenizer, except that no text becomes a control id.

    A word may also have other ids if two of its segmentations are equally probable but for the rounding of scores.
    """

    def __init__(self, spiece: Path | bytes) -> None:
        """``spiece`` is a model's file, or its content."""
        proto = spiece if isinstance(spiece, bytes) else spiece.read_bytes()
        model = sentencepiece_model_pb2.ModelProto.FromString(proto)
        for piece in model.pieces:
            piece.score = round(piece.score * SCORE_STEPS) / SCORE_STEPS
        self.model = model
        self.falls_apart_at_spaces = _falls_apart_at_spaces(model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self._normaliser = _normaliser(model)
        self.num_pieces = len(model.pieces)

    @cached_property
    def _of_normalised(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=_without_table(self.model))

    def encode(self, texts: list[str], *, add_eos: bool = False) -> list[np.ndarray]:
        """Return the int32 ids of each text, followed by EOS if ``add_eos``."""
        ids: list[np.ndarray] = []
        for combines, some in groupby(texts, _combines):
            ids += self.encode_alike(list(some), combines, add_eos=add_eos)
        return ids

    def encode_alike(self, texts: list[str], combines: bool, *, add_eos: bool = False) -> list[np.ndarray]:
        """Encode texts that all have characters that may combine, or all have none, or parts of such texts."""
        if combines:
            return self._encoded(self._of_normalised, [self.normalised(text) for text in texts], add_eos)
        return self._encoded(self._processor, texts, add_eos)

    @property
    def pieces(self) -> list[str]:
        """The pieces of the vocabulary by id, without sentinels."""
        return [piece.piece for piece in self.model.pieces]

    def piece(self, token_id: int) -> str:
        """Return the text of an id of the vocabulary, not a sentinel, with a space in place of SentencePiece's mark."""
        piece: str = self._processor.id_to_piece(token_id)
        return f" {piece}" if token_id < len(SPECIAL_PIECES) else piece.replace(SPACE, " ")

    def normalised(self, text: str) -> str:
        """Normalise as the reference does, and replace U+0085 by a space, because the reference splits words there."""
        if self._normaliser:
            text = self._normaliser.normalize_str(text)
        return text.replace(_NEXT_LINE, " ")

    def _encoded(
        self, processor: sentencepiece.SentencePieceProcessor, texts: list[str], add_eos: bool
    ) -> list[np.ndarray]:
        if not self.falls_apart_at_spaces or all(len(text) <= _STRETCH_CHARACTERS for text in texts):
            return _segmented(processor, texts, add_eos)
        stretches = [_stretches(text) for text in texts]
        encoded = iter(_segmented(processor, [each for some in stretches for each in some], add_eos))
        return [_joined(encoded, len(some), add_eos) for some in stretches]


def _segmented(processor: sentencepiece.SentencePieceProcessor, texts: list[str], add_eos: bool) -> list[np.ndarray]:
    # One thread, because worker processes already share the work, and more threads would compete with them.
    ids: list[np.ndarray] = processor.encode(texts, return_type="numpy", add_eos=add_eos, num_threads=1)
    return ids


def _normaliser(model: sentencepiece_model_pb2.ModelProto) -> Precompiled | None:
    """Return the reference's normaliser; None if the model has no normalisation table."""
    table = model.normalizer_spec.precompiled_charsmap
    return Precompiled(table) if table else None


def _without_table(model: sentencepiece_model_pb2.ModelProto) -> bytes:
    """Return the model without its normalisation table."""
    plain = sentencepiece_model_pb2.ModelProto()
    plain.CopyFrom(model)
    plain.normalizer_spec.ClearField("precompiled_charsmap")
    proto: bytes = plain.SerializeToString()
    return proto


def _combines(text: str) -> bool:
    """Return whether a text may contain U+0085, or a grapheme of several characters."""
    return not text.isascii() and combining().search(text) is not None


@cache
def combining() -> re.Pattern[str]:
    """Return a pattern for U+0085 and characters that may combine.

    It also matches every character beyond the basic plane: they are rare, and a single range is fast.
    """
    found = [chr(code) for code in range(0x80, 0xD800) if unicodedata.category(chr(code)) in _COMBINING]
    found += [chr(code) for code in range(0xE000, 0x10000) if unicodedata.category(chr(code)) in _COMBINING]
    return re.compile(f"[{_NEXT_LINE}{_ALSO_COMBINING}{''.join(map(re.escape, found))}\U00010000-\U0010ffff]")


def _stretches(text: str) -> list[str]:
    """Cut a text at spaces into stretches of about 1200 characters."""
    cut, first = [], 0
    while (end := text.find(" ", first + _STRETCH_CHARACTERS)) >= 0:
        cut.append(text[first:end])
        first = end + 1
    return [*cut, text[first:]]


def _falls_apart_at_spaces(model: sentencepiece_model_pb2.ModelProto) -> bool:
    """Return whether words are encoded independently: no piece, unknown run or normalisation rule spans two words.

    No rule of nmt_nfkc combines a space with its neighbours.
    """
    pieces = {piece.piece for piece in model.pieces}
    return (
        _has_t5_table(model)
        and not model.trainer_spec.treat_whitespace_as_suffix
        and SPACE in pieces
        and not any(SPACE in piece[1:] for piece in pieces)
    )


def _joined(encoded: Iterator[np.ndarray], count: int, add_eos: bool) -> np.ndarray:
    """Concatenate the next ``count`` arrays, and keep only the last EOS."""
    if count == 1:
        return next(encoded)
    parts = [next(encoded) for _ in range(count)]
    if add_eos:
        parts[:-1] = [part[:-1] for part in parts[:-1]]
    return np.concatenate(parts)

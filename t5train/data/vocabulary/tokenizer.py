"""The tokenizer stage, and encoding with its result."""

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any, Self

from t5train.data.passages import split_of
from t5train.data.readers import OpenFile
from t5train.data.segments import Stretch, passages_of, read_segments, stretches_of
from t5train.data.vocabulary.sentencepiece_model import (
    EOS_ID,
    PAD_ID,
    SCORE_STEPS,
    SPECIAL_PIECES,
    UNK_ID,
    Encoder,
    require_t5_form,
    train,
)
from t5train.data.vocabulary.t5_form import SENTINELS, in_t5_form, is_sentinel, of_tokenizer_json
from t5train.data.worker_processes import Advance, Json, in_processes
from t5train.errors import InputError, SpecError
from t5train.files.atomic import replacing, write_json
from t5train.files.os_errors import library_errors
from t5train.files.output_folder import making, stage_folder
from t5train.progress import Progress, silent
from t5train.records.changed_files import keep_changed_files, require_as_recorded
from t5train.records.digests import digest_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards, reusable
from t5train.spec import NUM_SENTINELS, CorpusSpec, TokenizerSpec

SPIECE = "spiece.model"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
HUGGING_FACE_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, "special_tokens_map.json")
# How the tokenizer was loaded, which transformers also writes, and the name that version 5 has for special tokens.
_NOT_KEPT = {"is_local", "local_files_only", "extra_special_tokens"}
_STAGE_VERSION = 1  # incremented when the same inputs would give other files
SAMPLE_BYTES = 200 << 20
"""A vocabulary is trained on about so much text, at most."""
_MODEL_MAX_TOKENS = 512  # T5's input length in pre-training; its relative positions impose no limit
_log = logging.getLogger(__name__)


class Tokenizer(Encoder):
    """An encoder that also knows the special ids and the sentinels of its vocabulary.

    Ids: ``<pad>`` 0, ``</s>`` 1, ``<unk>`` 2, the pieces, then the sentinels with ``<extra_id_0>`` highest.
    """

    pad_id, eos_id, unk_id = PAD_ID, EOS_ID, UNK_ID

    def __init__(self, spiece: Path | bytes) -> None:
        super().__init__(spiece)
        self.vocab_size = self.num_pieces + NUM_SENTINELS
        self.sentinel_ids = [self.vocab_size - 1 - index for index in range(NUM_SENTINELS)]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder with a ``spiece.model``."""
        return cls(folder / SPIECE)

    def texts_of(self, ids: Sequence[Sequence[int]], *, unknown: bool = False) -> list[str]:
        """Return the texts of sequences of ids. Only pieces are spelled and, with ``unknown``, the unknown one."""
        first = UNK_ID if unknown else UNK_ID + 1
        spelled = [[each for each in row if first <= each < self.num_pieces] for row in ids]
        texts: list[str] = self._processor.decode(spelled)
        return texts


def stored_spiece(root: Path, digest: str) -> bytes:
    """Return the content of the vocabulary below a root that has this sha256. Raises InputError if there is none."""
    contents = (path.read_bytes() for path in sorted((root / "tokenizer").glob(f"*/{SPIECE}")))
    if (found := next((each for each in contents if sha256(each).hexdigest() == digest), None)) is None:
        raise InputError(
            f"{root / 'tokenizer'} lacks the vocabulary of the shards, with which evaluate.best_metric reads what the "
            "model generates: start `t5-pretrain finetune` again, which makes it"
        )
    return found


def build_tokenizer(
    spec: TokenizerSpec,
    corpus_spec: CorpusSpec,
    corpus: Corpus,
    root: Path,
    progress: Progress = silent,
    *,
    out: Path | None = None,
) -> TokenizerFiles:
    """Train a vocabulary on the train split, or use the one at ``spec.path``. A finished tokenizer is reused.

    Args:
        spec: The number of pieces to train, without the 100 sentinels, or the path of an existing vocabulary.
        corpus_spec: The spec of ``corpus``, which determines its train split.
        corpus: The text to train on.
        root: The root folder.
        progress: Called with the number of stretches of about 64 KiB of text read, then with seconds of training.
        out: Folder of the result, which transformers can load; if left out,
            ``{root}/tokenizer/{name}-{first 12 digits of the fingerprint}``.

    Returns:
        The record of the tokenizer's files; its count ``vocab_size`` includes sentinels.

    Raises:
        InputError: The file at ``spec.path`` is not a SentencePiece model, or the folder there also has a
            ``tokenizer.json`` that is damaged or of another vocabulary.
        SpecError: That model is not in T5's form, or ``spec.vocab_size`` does not fit the text.
        StorageError: The folder cannot be written, or holds something else.
        WorkerLost: The process that trains the vocabulary was killed.

    """
    if spec.path is not None:
        return given_tokenizer(Path(spec.path), root, progress, out=out)
    inputs = {"corpus": corpus.fingerprint}
    identity = _trained_identity(spec, corpus_spec, inputs)
    folder = out or stage_folder(root, "tokenizer", f"unigram{spec.vocab_size}", identity)
    with making(folder, identity):
        if found := reusable(TokenizerFiles, folder, identity, progress):
            return found
        proto = _trained(spec, corpus_spec, corpus, progress)
        return finished(folder, proto, identity, inputs)


def _trained_identity(spec: TokenizerSpec, corpus_spec: CorpusSpec, inputs: dict[str, str]) -> str:
    return trained_identity(spec.identity() | corpus_spec.split_identity(), inputs)


def trained_identity(settings: dict[str, Any], inputs: dict[str, str]) -> str:
    """Return the fingerprint of a vocabulary that is trained with these settings on these inputs."""
    return fingerprint({"kind": "tokenizer", "stage": _STAGE_VERSION, "settings": settings, "inputs": inputs})


def is_vocabulary_of(shards: TokenShards, spec: TokenizerSpec, corpus_spec: CorpusSpec) -> bool:
    """Return whether a spec gives the vocabulary of ``shards``, if the text is still the one that they were made of.

    Raises the errors of ``build_tokenizer`` for a vocabulary at ``spec.path``.
    """
    if spec.path is not None:
        return shards.inputs["vocabulary"] == sha256(given_proto(Path(spec.path))).hexdigest()
    return shards.inputs["tokenizer"] == _trained_identity(spec, corpus_spec, {"corpus": shards.inputs["corpus"]})


def expected_vocab_size(spec: TokenizerSpec) -> int:
    """Return the number of ids that the tokenizer of a spec has or will have, including sentinels.

    Raises the errors of ``build_tokenizer`` for a vocabulary at ``spec.path``.
    """
    return spec.vocab_size + NUM_SENTINELS if spec.path is None else open_given(Path(spec.path)).vocab_size


def given_tokenizer(path: Path, root: Path, progress: Progress = silent, *, out: Path | None = None) -> TokenizerFiles:
    """Make the tokenizer of a ``spiece.model`` or a Hugging Face folder. Raises the errors of ``build_tokenizer``."""
    proto = given_proto(path)
    _require_one_vocabulary(path, Tokenizer(proto))
    content = sha256(proto).hexdigest()
    identity = fingerprint({"kind": "tokenizer", "stage": _STAGE_VERSION, "spiece": content})
    folder = out or stage_folder(root, "tokenizer", "given", identity)
    with making(folder, identity):
        return reusable(TokenizerFiles, folder, identity, progress) or finished(folder, proto, identity, {})


def open_given(path: Path) -> Tokenizer:
    """Load the tokenizer of a ``spiece.model`` or a Hugging Face folder. Raises the errors of ``build_tokenizer``."""
    tokenizer = Tokenizer(given_proto(path))
    _require_one_vocabulary(path, tokenizer)
    return tokenizer


def _require_one_vocabulary(path: Path, tokenizer: Tokenizer) -> None:
    """Raise InputError if a folder has a ``tokenizer.json`` of another vocabulary than its ``spiece.model``."""
    if (path / TOKENIZER_JSON).is_file() and (difference := differing_piece(path / TOKENIZER_JSON, tokenizer)):
        raise InputError(
            f"{path} holds two vocabularies: {difference} in its {SPIECE}. Copy both files again from where the "
            f"vocabulary was published, or remove {TOKENIZER_JSON} if the {SPIECE} is the one to use"
        )


def differing_piece(file: Path, tokenizer: Tokenizer) -> str | None:
    """Describe the first id for which a ``tokenizer.json`` has another piece, score or sentinel than ``tokenizer``.

    Raises InputError if the file is damaged.
    """
    try:
        document = json.loads(file.read_bytes())
        found = {index: (str(piece), float(score)) for index, (piece, score) in enumerate(document["model"]["vocab"])}
        added = {each["id"]: each["content"] for each in document["added_tokens"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{file} is not a unigram tokenizer in JSON. Copy it again from where you got it") from error
    for index, piece in enumerate([*tokenizer.pieces, *SENTINELS]):
        other, score = found.get(index, (None, 0.0))
        other = added.get(index, other)
        if other != piece and not (index >= tokenizer.num_pieces and is_sentinel(str(other), piece)):
            return f"id {index} is {other!r} in its {TOKENIZER_JSON}, but {piece!r}"
        expected = tokenizer.model.pieces[index].score if len(SPECIAL_PIECES) <= index < tokenizer.num_pieces else score
        if not abs(score - expected) <= 1 / SCORE_STEPS:  # not a number differs, too
            return f"id {index} is {piece!r} with the score {score:g} in its {TOKENIZER_JSON}, but {expected:g}"
    return None


def given_proto(path: Path) -> bytes:
    """Return the SentencePiece model, in T5's form, of a file, or of a folder with a ``spiece.model`` or
    ``tokenizer.json``. Raises the errors of ``build_tokenizer``.
    """
    if path.is_dir() and not (path / SPIECE).is_file() and (path / TOKENIZER_JSON).is_file():
        require_as_recorded(path, [TOKENIZER_JSON])
        proto = of_tokenizer_json(path / TOKENIZER_JSON)
        require_t5_form(proto, str(path / TOKENIZER_JSON))
        return proto
    spiece = _spiece_in(path)
    given = spiece.read_bytes()
    proto = in_t5_form(given)
    own = NUM_SENTINELS if proto == given else 0
    if path.is_dir() and (sentinels := _num_sentinels(path / TOKENIZER_CONFIG, own)) not in (own, NUM_SENTINELS):
        raise SpecError(
            f"tokenizer.path is {path}, and in its {TOKENIZER_CONFIG} extra_ids is {sentinels}: only {NUM_SENTINELS} "
            f"sentinels are supported. Choose a vocabulary with {NUM_SENTINELS}"
        )
    require_t5_form(proto, str(spiece))
    return proto


def _spiece_in(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise SpecError(f"tokenizer.path is {path}, but there is no such file or folder. Correct the path")
    if not (path / SPIECE).is_file():
        raise SpecError(
            f"tokenizer.path is {path}, but that folder has neither {SPIECE} nor {TOKENIZER_JSON}. Copy the {SPIECE} "
            "that the vocabulary was published with into that folder"
        )
    require_as_recorded(path, [SPIECE])
    return path / SPIECE


def _num_sentinels(config: Path, default: int) -> Any:
    """Return ``extra_ids`` of a Hugging Face tokenizer's configuration, or a default."""
    if not config.exists():
        return default
    try:
        settings = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"tokenizer.path: {config} is not JSON ({error}). Restore the file, or remove it: without the file, "
            f"{default} sentinels beside its pieces are assumed"
        ) from error
    return settings.get("extra_ids", default) if isinstance(settings, dict) else None


def _trained(spec: TokenizerSpec, corpus_spec: CorpusSpec, corpus: Corpus, progress: Progress) -> bytes:
    """Train a model on texts of the train split."""
    stretches = _training_stretches(corpus)
    job = {"spec": spec.model_dump(mode="json"), "stretches": stretches, **corpus_spec.split_identity()}
    function = "t5train.data.vocabulary.tokenizer:train_vocabulary"
    return trained_by(function, job, "stretches of text read for the vocabulary", len(stretches), progress)


def trained_by(function: str, job: Json, reading: str, total: int, progress: Progress) -> bytes:
    """Return the model that a function trains with ``train_reporting``, having reported how much it has read.

    In a worker process: SentencePiece cannot be interrupted, and training takes minutes, but a process can be killed.
    """
    started = time.monotonic()
    read = 0

    def advance(newly_read: int) -> None:
        nonlocal read
        read += newly_read
        if read < total:
            progress(reading, read, total)
        else:
            progress("seconds of vocabulary training", int(time.monotonic() - started), None)

    (result,) = in_processes(function, [job], 1, advance)
    seconds = int(time.monotonic() - started)
    progress("seconds of vocabulary training", seconds, seconds)
    return b64decode(result["proto"])


def _training_stretches(corpus: Corpus) -> list[Stretch]:
    """Return stretches of text, at most about 200 MiB, spread evenly over the corpus."""
    total = int(corpus.counts["text_bytes"])
    stride = -(-total // SAMPLE_BYTES)
    files = read_segments(corpus.path)
    found = [
        Stretch(str(file.source.path), file.source.name, each, file.source.part)
        for file in files
        for each in file.segments
    ][::stride]
    share = "all" if stride == 1 else f"1/{stride}"
    _log.info("training a vocabulary on %s of the train split", share)
    return found


def train_vocabulary(job: Json, advance: Advance) -> Json:
    """Train a model on the train split of stretches of text. ``build_tokenizer`` makes the job.

    Every second, ``advance`` is called with the number of stretches read since the last time.
    """
    texts = _Texts(job)
    return train_reporting(TokenizerSpec.model_validate(job["spec"]), texts, texts.newly_read, advance)


def train_reporting(spec: TokenizerSpec, texts: Iterator[str], newly_read: Callable[[], int], advance: Advance) -> Json:
    """Train a model on texts, and return it for ``trained_by``.

    Every second, ``advance`` is called with what ``newly_read`` returns: how much was read since the last call.
    """
    training: Future[bytes] = Future()
    # A daemon, so that the process can end before the training when the one that started it is killed.
    Thread(target=_train, args=(training, spec, texts), daemon=True).start()
    while not wait([training], timeout=1).done:
        advance(newly_read())
    proto = training.result()
    advance(newly_read())
    return {"proto": b64encode(proto).decode()}


def _train(training: Future[bytes], spec: TokenizerSpec, texts: Iterator[str]) -> None:
    try:
        training.set_result(train(spec, texts))
    except BaseException as error:
        training.set_exception(error)  # for the main thread


class _Texts(Iterator[str]):
    """The texts to train on. ``newly_read`` may be called by another thread."""

    def __init__(self, job: Json) -> None:
        self._rule = CorpusSpec.model_validate({name: job[name] for name in ("split", "split_seed")})
        self._stretches = stretches_of(job)
        self._read = self._reported = 0
        self._texts = self._all()

    def __next__(self) -> str:
        return next(self._texts)

    def newly_read(self) -> int:
        """Return how many stretches were read to their end since the last call."""
        read, before = self._read, self._reported
        self._reported = read
        return read - before

    def _all(self) -> Iterator[str]:
        with OpenFile() as opened:
            for stretch in self._stretches:
                for passage in passages_of(*stretch, opened):
                    if split_of(self._rule, passage.id) == "train":
                        yield passage.text
                self._read += 1


def finished(folder: Path, proto: bytes, identity: str, inputs: dict[str, str]) -> TokenizerFiles:
    """Write a model and what transformers reads of it to a folder, and commit its record."""
    keep_changed_files(folder)
    with replacing(folder / SPIECE) as file:
        file.write(proto)
    write_hugging_face_files(folder)
    tokenizer = Tokenizer.load(folder)
    return TokenizerFiles(
        path=folder,
        fingerprint=identity,
        inputs=inputs,
        files=digest_files(folder, [SPIECE, *HUGGING_FACE_FILES]),
        counts={"pieces": tokenizer.num_pieces, "vocab_size": tokenizer.vocab_size, "num_sentinels": NUM_SENTINELS},
    ).commit()


def write_hugging_face_files(folder: Path, max_tokens: int = _MODEL_MAX_TOKENS) -> None:
    """Make HUGGING_FACE_FILES, which ``AutoTokenizer.from_pretrained`` reads, from the spiece.model in ``folder``.

    ``max_tokens`` is the input length that the model is trained with. Sentinels are listed under the key that all
    versions of transformers read: version 4 cannot read the one that version 5 writes.
    """
    from transformers import T5Tokenizer  # takes seconds to import, and only this stage needs it

    with library_errors("transformers", folder):
        tokenizer = T5Tokenizer.from_pretrained(folder, extra_ids=NUM_SENTINELS, model_max_length=max_tokens)
        tokenizer.save_pretrained(folder)
    pad, eos, unk = SPECIAL_PIECES
    sentinels = [f"<extra_id_{index}>" for index in range(NUM_SENTINELS)]
    config = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
    kept = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    write_json(folder / TOKENIZER_CONFIG, {**kept, "additional_special_tokens": sentinels})
    write_json(
        folder / "special_tokens_map.json",
        {"pad_token": pad, "eos_token": eos, "unk_token": unk, "additional_special_tokens": sentinels},
    )

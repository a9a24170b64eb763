"""The folder of a T5 on this machine: checked without torch, then loaded with plain ``transformers``.

``spiece.model`` encodes as training does: no text becomes a control id. A folder that has only ``tokenizer.json`` is
used with the library ``tokenizers``; control ids that it finds in a text are dropped.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from t5train.data.vocabulary.sentencepiece_model import SPACE, SPECIAL_PIECES
from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON, open_given
from t5train.errors import DigestMismatch, InputError, SpecError
from t5train.files.run_folder import EXPORT
from t5train.host_resources import num_cores
from t5train.model.model_shape import cache_whole_decoder
from t5train.model.starting_model import CONFIG, INDEX, WEIGHTS, HuggingFaceFolder, listed_files, require_family
from t5train.records.changed_files import recorded_files
from t5train.records.digests import (
    FileDigest,
    FileStamp,
    SafetensorsDigest,
    digest_file,
    digest_safetensors,
    verify_file,
)
from t5train.release.certificate import CERTIFICATE
from t5train.release.model_card import CARD_FILES, README, RecordedRun, recorded_run
from t5train.spec import NUM_SENTINELS

PATH = "PATH"
DType = Literal["float32", "bfloat16", "float16"]
"""torch's name of the type of the weights, and of what is computed."""
Digests = Mapping[str, FileDigest | SafetensorsDigest]
"""Of files of a model, by their names."""
_log = logging.getLogger(__name__)
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_TRAINED_TOKENS = 512  # T5's own input length, where a folder does not say otherwise


_READ = re.compile(
    r".*\.model|.*\.jinja|(adapter_)?model\.safetensors(\.index\.json)?|"
    r"(config|adapter_config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|"
    r"(vocab|tekken)\.json"
)


class Vocabulary(NamedTuple):
    """The vocabulary of a folder, for text that is evaluated.

    ``encode`` returns the int32 ids of each text, followed by EOS. Sentinels count down from the first.
    ``spelled_bytes`` int64 [size] is how many bytes of text each id spells, in UTF-8; 0 if it spells none: of control
    ids, sentinels, and the unknown piece.
    """

    size: int
    first_sentinel_id: int
    eos_id: int
    encode: Callable[[list[str]], list[np.ndarray]]
    spelled_bytes: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Open the vocabulary of a folder. Raises InputError if it is damaged, or has other sentinels than T5's."""
        if not (folder / SPIECE).is_file():
            return cls._fast(folder / TOKENIZER_JSON)
        try:
            tokenizer = open_given(folder)
        except SpecError as error:
            if not (folder / TOKENIZER_JSON).is_file():
                raise InputError(f"the vocabulary cannot be used: {error}") from error
            return cls._fast(folder / TOKENIZER_JSON)
        return cls(
            size=tokenizer.vocab_size,
            first_sentinel_id=tokenizer.sentinel_ids[0],
            eos_id=tokenizer.eos_id,
            encode=lambda texts: tokenizer.encode(texts, add_eos=True),
            spelled_bytes=_spelled_bytes(tokenizer.pieces, SPECIAL_PIECES, tokenizer.vocab_size, _utf8_bytes),
        )

    @classmethod
    def _fast(cls, file: Path) -> Self:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers.decoders import ByteLevel

        try:
            tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(f"{file} cannot be read ({error}). Copy it again from where you got the model") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        names = ("</s>", "<pad>", *(f"<extra_id_{index}>" for index in range(NUM_SENTINELS)))
        known = [found for name in names if (found := tokenizer.token_to_id(name)) is not None]
        if len(known) < len(names) or known[2:] != list(range(known[2], known[2] - NUM_SENTINELS, -1)):
            raise InputError(
                f"{file} is not a T5's vocabulary: it must have <pad>, </s>, and the sentinels <extra_id_0> to "
                f"<extra_id_{NUM_SENTINELS - 1}> with descending ids. Choose another model"
            )
        eos_id, first_sentinel_id = known[0], known[2]

        def encode(texts: list[str]) -> list[np.ndarray]:
            found = (np.array(each.ids, np.int32) for each in tokenizer.encode_batch(texts, add_special_tokens=False))
            return [np.append(each[~np.isin(each, known)], np.int32(eos_id)) for each in found]

        size = tokenizer.get_vocab_size()
        pieces = [tokenizer.id_to_token(number) or "" for number in range(size)]
        # A byte-level vocabulary writes each byte as one character.
        count = len if isinstance(tokenizer.decoder, ByteLevel) else _utf8_bytes
        spelled = _spelled_bytes(pieces, {*names, *SPECIAL_PIECES}, size, count)
        return cls(size, first_sentinel_id, eos_id, encode, spelled)


def _spelled_bytes(
    pieces: Sequence[str], special: Collection[str], size: int, count: Callable[[str], int]
) -> np.ndarray:
    """Return how many bytes each of ``size`` ids spells: none if it has no piece, or a special one."""
    spelled = np.zeros(size, np.int64)
    spelled[: len(pieces)] = [0 if piece in special else count(piece) for piece in pieces]
    return spelled


def _utf8_bytes(piece: str) -> int:
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())


class ModelFolder(NamedTuple):
    """A complete model. ``run`` is what its card states of its training; empty if this project did not train it.

    ``recorded`` has the digests that the files must have; empty if nothing is known of them. ``stamps`` are those of
    the files when they were checked.
    """

    path: Path
    config: dict[str, Any]
    run: RecordedRun
    recorded: Digests
    stamps: Mapping[str, FileStamp]

    @classmethod
    def open(cls, path: Path, recorded: Digests | None = None) -> Self:
        """Check that a folder holds a T5 with its vocabulary, without loading the weights.

        The sizes of all files and the digests of all but the weights must be as ``recorded`` or, if that is left out,
        as in the manifest, if there is one. ``load`` verifies the weights. Of the model card and its picture, a
        difference is only logged.

        Raises InputError if the folder is missing, incomplete or damaged, or if its weights are pickled; DigestMismatch
        or RecordError if it is not as recorded; and SpecError if the model is not a T5.
        """
        if not (path / CONFIG).is_file() and (path / EXPORT / CONFIG).is_file():
            raise InputError(f"{PATH} is {path}, the folder of a run. Set {PATH} to its model: {path / EXPORT}")
        stamps = _stamps(path) if path.is_dir() else {}
        folder = HuggingFaceFolder.open(path, PATH)
        require_family(folder.config, path / CONFIG, PATH)
        if not any((path / name).is_file() for name in (SPIECE, TOKENIZER_JSON)):
            raise InputError(
                f"{path} has neither {SPIECE} nor {TOKENIZER_JSON}. Copy the vocabulary that the model was published "
                "with into that folder"
            )
        recorded = recorded_files(path) or {} if recorded is None else recorded
        _require_recorded(path, recorded)
        run = _recorded(path / README)
        if not run.settings and (path / CERTIFICATE).is_file():
            _log.warning(
                "%s does not record how this model was trained, as its model card did: spans are masked as T5's are, "
                "with %d input tokens, unless you say otherwise",
                path / README,
                _TRAINED_TOKENS,
            )
        return cls(path, folder.config, run, recorded, stamps)

    def digested(self) -> Self:
        """Return a copy that has recorded the digests of all files that transformers reads, those of weights, too."""
        names = names_read(self.path)
        return self._replace(recorded={name: self.recorded.get(name) or _digest(self.path / name) for name in names})

    @property
    def trained_tokens(self) -> int:
        """The number of input tokens that the model was trained with, as far as the folder says."""
        recorded = self._lengths().get("input_tokens")
        return int(recorded or self.config.get("n_positions") or _TRAINED_TOKENS)

    @property
    def target_tokens(self) -> int:
        """The number of tokens of the longest targets that the model was fine-tuned with; 0 if it does not say so."""
        return int(self._lengths().get("target_tokens", 0))

    def _lengths(self) -> dict[str, Any]:
        """Return the settings of what the model was trained on; empty if the folder does not record them."""
        found: dict[str, Any] = self.run.settings.get("pairs", self.run.settings.get("objective", {}))
        return found

    def vocabulary(self) -> Vocabulary:
        """Open the vocabulary. Raises InputError if it is damaged, not a T5's, or larger than the model's."""
        found, ids = Vocabulary.of(self.path), self.config.get("vocab_size")
        if not isinstance(ids, int) or found.size > ids:
            raise InputError(
                f"{self.path} has a vocabulary of {found.size} ids, but {CONFIG} says that the model has {ids}. Copy "
                "the vocabulary that the model was published with into that folder"
            )
        return found

    def load(self, device: str, dtype: DType = "float32") -> Any:
        """Return the model on a device, ready for inference.

        Raises InputError if its weights do not fit, and DigestMismatch if they are not as recorded, or if a file was
        changed since the folder was opened.
        """
        from transformers import AutoModelForSeq2SeqLM

        with quiet_transformers(), self._verifying_weights():
            model, loading = AutoModelForSeq2SeqLM.from_pretrained(
                self.path, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        wrong = {kind: sorted(map(str, loading[kind])) for kind in ("missing_keys", "mismatched_keys") if loading[kind]}
        for kind, names in wrong.items():
            raise InputError(
                f"{self.path} is not a complete model: {kind.replace('_', ' ')} {', '.join(names[:3])}. Copy the "
                "model again from where you got it"
            )
        self._require_unchanged()
        cache_whole_decoder(model.config)
        return model.eval().to(device)

    def _require_unchanged(self) -> None:
        now = _stamps(self.path)
        if changed := sorted(name for name in {*now, *self.stamps} if self._has_changed(name, now.get(name))):
            raise DigestMismatch(
                f"{self.path / changed[0]} was changed while the model was loaded, so parts of two models may have "
                "been read. Start again when the folder is complete"
            )

    def _has_changed(self, name: str, now: FileStamp | None) -> bool:
        """Whether a file was written, added or removed; of one with a digest, new links or permissions do not count."""
        before = self.stamps.get(name)
        if now is not None and before is not None and name in self.recorded:
            now = now._replace(changed_ns=before.changed_ns)
        return now != before

    @contextmanager
    def _verifying_weights(self) -> Iterator[None]:
        """Hash the files of weights on all cores while they are loaded in the block, and compare their digests.

        If both fail, the error that names the damaged file is raised.
        """
        weights = [name for name in self.recorded if _is_weights(name)]
        with ThreadPoolExecutor(num_cores()) as threads:
            running = [threads.submit(verify_file, self.path / name, self.recorded[name]) for name in weights]
            try:
                yield
            finally:
                for verified in running:
                    verified.result()

    def load_tokenizer(self) -> Any:
        """Return the tokenizer that ``AutoTokenizer`` makes of the folder. Code in the folder is never run."""
        from transformers import AutoTokenizer

        with quiet_transformers():
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)


def names_read(folder: Path) -> list[str]:
    """Return the names of the files in a folder that transformers reads because they are there.

    Raises InputError if the index of the weights is damaged.
    """
    found = {each.name for each in folder.iterdir() if _READ.fullmatch(each.name) and each.is_file()}
    if INDEX in found and WEIGHTS not in found:
        found |= {name for name, file in listed_files(folder, PATH).items() if file.is_file()}
    return sorted(found)


def _stamps(folder: Path) -> dict[str, FileStamp]:
    return {name: FileStamp.of(folder / name) for name in names_read(folder)}


def _require_recorded(folder: Path, recorded: Digests) -> None:
    """Raise DigestMismatch, naming the file, if one is missing, changed, or was added where transformers may read it.

    Of weights, only the size is compared. Model cards are edited where models are shared, so a difference is logged.
    """
    if not recorded:
        return
    for name, digest in recorded.items():
        path = folder / name
        if name in CARD_FILES:
            _warn_if_changed(path, digest)
        elif not _is_weights(name) or not path.is_file() or path.stat().st_size != digest.size:
            verify_file(path, digest)
    if added := sorted({*names_read(folder)} - {*recorded}):
        raise DigestMismatch(
            f"{folder / added[0]} was added after the digests of this model were recorded, and transformers reads it, "
            "so it can change what the model computes. Remove it"
        )


def _warn_if_changed(path: Path, digest: FileDigest | SafetensorsDigest) -> None:
    try:
        verify_file(path, digest)
    except DigestMismatch as error:
        read = ", but `evaluate` masks spans by the settings that the card has" if path.name == README else ""
        _log.warning("%s. The model is used all the same: transformers does not read this file%s", error, read)


def _digest(path: Path) -> FileDigest | SafetensorsDigest:
    return digest_safetensors(path) if _is_weights(path.name) else digest_file(path)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def chosen_device(device: str | None) -> str:
    """Return the given device, or this machine's accelerator, or ``cpu``. Raises InputError if it is not available."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    if device is None:
        return available[0]
    kind, _, number = device.partition(":")
    count = torch.accelerator.device_count() if kind != "cpu" and kind in available else 1
    if kind not in available or (number and (not number.isdecimal() or int(number) >= count)):
        has = f"one of {', '.join(available)}" if len(available) > 1 else "cpu: this machine has no accelerator"
        raise SpecError(f"device is {device!r}, but it must be {has}")
    return device


def require_dtype(dtype: DType, device: str) -> None:
    """Raise SpecError if a model is not computed in that type on a device."""
    if dtype == "float16" and device == "cpu":
        raise SpecError(
            "--dtype is float16, but a CPU has hardly any instructions for it: it must be float32 or bfloat16, or "
            "--device an accelerator"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and remarks, and restore its settings.

    One of these remarks is made of every T5 v1.1: that its output layer is not tied, which is correct. What would be
    wrong with a model is found by other means.
    """
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _recorded(card: Path) -> RecordedRun:
    try:
        return recorded_run(card.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return RecordedRun({}, {}, {})

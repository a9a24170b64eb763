"""The model a run continues from: whether it is the one that the settings ask for, and what identifies it."""

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from t5train.config_agreement import require_agreement, told_by
from t5train.data.tokenizer import SPIECE
from t5train.errors import DigestMismatch, InputError, RecordError, SpecError
from t5train.fingerprint import fingerprint
from t5train.huggingface_folder import CONFIG, HuggingFaceFolder
from t5train.locations import local_folder
from t5train.model.parameters import parameter_shapes
from t5train.model.shape import T5Shape, resolve
from t5train.progress import Progress, silent
from t5train.records import MANIFEST, FileDigest, digest_file
from t5train.spec import ModelSpec
from t5train.tensor_files import FLOATING, StoredTensor, StoredTensors
from t5train.verify import parse_manifest

# Older versions of transformers wrote it; none reads it.
_NEVER_READ = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_log = logging.getLogger(__name__)


def require_fit(model: ModelSpec, tokenizer_vocab_size: int) -> None:
    """Nothing without ``start_from``; else refuse a folder whose model is not the one the settings describe.

    Raises SpecError that names every field of its ``config.json`` that differs, and what to set; InputError for a
    folder that cannot be read, or whose tensors are too few, too many or of another shape.
    """
    if (path := _folder(model)) is None:
        return
    folder = HuggingFaceFolder.open(path)
    told = told_by(folder.config, path / CONFIG)
    if told["vocab_size"] < tokenizer_vocab_size:
        raise SpecError(
            f"model.start_from is {path}, with a vocabulary of {told['vocab_size']}, and the tokenizer has "
            f"{tokenizer_vocab_size} ids: set tokenizer.path to the vocabulary that it was trained with"
        )
    shape = resolve(model, tokenizer_vocab_size)
    require_agreement(told, shape, path / CONFIG)
    _tensors(folder, shape)


def tensors_of(model: ModelSpec, shape: T5Shape) -> dict[str, StoredTensor] | None:
    """Where each parameter lies in the folder of ``start_from``, None without one; errors as of ``require_fit``.

    As with transformers, copies of tied tensors may stand beside them, and an output that the files leave out is the
    embedding, also where it is to be trained by itself.
    """
    path = _folder(model)
    return None if path is None else _tensors(HuggingFaceFolder.open(path), shape)


def _tensors(folder: HuggingFaceFolder, shape: T5Shape) -> dict[str, StoredTensor]:
    found = {name: tensor for name, tensor in folder.tensors.items() if name != _NEVER_READ}
    copies = {name: found.pop(name) for name in (*_COPIES, *([_HEAD] if shape.tied else [])) if name in found}
    if copies:
        _require_equal(folder, {_SHARED: found.setdefault(_SHARED, next(iter(copies.values())))} | copies)
    if _SHARED in found and not shape.tied:
        found.setdefault(_HEAD, found[_SHARED])
    _require_tensors(folder, found, parameter_shapes(shape))
    return found


def start_fingerprint(model: ModelSpec, progress: Progress = silent) -> str | None:
    """What identifies the weights that a run continues from, wherever they lie; None without ``start_from``.

    Of their files' sha256, which are formed once a process as long as nothing about a file changes. Raises
    DigestMismatch where a manifest of ours lies beside them and recorded others.
    """
    if (path := _folder(model)) is None:
        return None
    folder = HuggingFaceFolder.open(path)
    total, done, digests = sum(file.stat().st_size for file in folder.files), 0, {}
    for file in folder.files:
        status = file.stat()
        digests[file.name] = _sha256(file, status.st_size, status.st_mtime_ns, status.st_ino)
        done += status.st_size
        progress("bytes of the weights to continue from verified", done, total)
    _require_as_recorded(path, digests)
    return fingerprint({"config": told_by(folder.config, path / CONFIG), "files": digests})


def start_name(model: ModelSpec) -> str | None:
    """The name of the folder whose weights a run continues from; None without ``start_from``."""
    folder = _folder(model)
    return None if folder is None else folder.name


def require_vocabulary(model: ModelSpec, spiece_sha256: str) -> None:
    """SpecError where the folder of ``start_from`` has another vocabulary than the run's: its ids mean other text."""
    path = _folder(model)
    if path is None or not (path / SPIECE).is_file():
        return
    if (found := digest_file(path / SPIECE).sha256) != spiece_sha256:
        raise SpecError(
            f"model.start_from is {path}, whose {SPIECE} has sha256 {found[:12]}, and the run's vocabulary "
            f"{spiece_sha256[:12]}: set tokenizer.path={path}"
        )


def _folder(model: ModelSpec) -> Path | None:
    return None if model.start_from is None else local_folder(model.start_from)


@lru_cache
def _sha256(file: Path, _size: int, _mtime_ns: int, _inode: int) -> str:
    return digest_file(file).sha256


def _require_as_recorded(folder: Path, digests: Mapping[str, str]) -> None:
    if not (folder / MANIFEST).is_file():
        return
    try:
        recorded = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST)).files
    except RecordError as error:  # somebody else's file of that name
        _log.warning("%s: the files beside it are taken as they are", error)
        return
    for name, sha256 in digests.items():
        expected = recorded.get(name)
        if not isinstance(expected, FileDigest) or expected.sha256 != sha256:
            raise DigestMismatch(f"{folder / name} has sha256 {sha256}, {expected} was recorded: restore it")


def _require_equal(folder: HuggingFaceFolder, copies: dict[str, StoredTensor]) -> None:
    import torch  # only where the files hold copies, which must be compared

    stored = StoredTensors(copies)
    for name in copies:
        if not torch.equal(stored.whole(name), stored.whole(_SHARED)):
            raise SpecError(
                f"model.start_from is {folder.path}, where {name} is tied to {_SHARED}, and the files hold other "
                "values of it: name a model whose embeddings are one, or set model.version=v1.1 if that is what it is"
            )


def _require_tensors(
    folder: HuggingFaceFolder, found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    wrong = {
        "are missing": [name for name in expected if name not in found],
        "are of no such model": [name for name in found if name not in expected],
        "have another shape": [name for name in expected if name in found and found[name].shape != expected[name]],
        "are no floating-point numbers of 16 or 32 bits": [
            n for n, held in found.items() if held.dtype not in FLOATING
        ],
    }
    said = [f"{', '.join(names[:3])}{' and more' * (len(names) > 3)} {what}" for what, names in wrong.items() if names]
    if said:
        raise InputError(f"model.start_from is {folder.path}: {'; '.join(said)}; name the folder of a whole model")

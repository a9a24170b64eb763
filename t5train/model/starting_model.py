"""The model that a run continues from: its Hugging Face folder, whether it fits the settings, and its fingerprint.

Weight files are only hashed. Tensors are read only to compare copies of tied ones.
"""

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self

from t5train.data.vocabulary.sentencepiece_model import EOS_ID, PAD_ID
from t5train.data.vocabulary.t5_form import in_t5_form
from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON, Tokenizer, differing_piece
from t5train.errors import DigestMismatch, InputError, SpecError
from t5train.files.confined import child
from t5train.files.os_errors import in_one_line
from t5train.model.model_shape import T5Shape, huggingface_config, preset_of, resolve, sparse_step
from t5train.model.parameters import parameter_shapes
from t5train.model.tensor_files import FLOATING, StoredTensor, StoredTensors, list_tensors
from t5train.progress import Progress, silent
from t5train.records.changed_files import recorded_files, require_as_recorded
from t5train.records.digests import FileDigest, FileStamp, digest_file
from t5train.records.identity import differences, fingerprint
from t5train.records.locations import local_folder
from t5train.records.stage_records import MANIFEST
from t5train.records.start_copy import is_awaited, origin
from t5train.spec import ModelSpec, pad_vocabulary

_SETTING = "model.start_from"
_SIZES = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")
_SPARSE = ("num_experts", "num_sparse_encoder_layers", "num_sparse_decoder_layers")
_COUNTS = {
    "t5": ("vocab_size", *_SIZES),
    "mt5": ("vocab_size", *_SIZES),
    "switch_transformers": ("vocab_size", *_SIZES, *_SPARSE),
}
_IDS = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "decoder_start_token_id": PAD_ID}
_LEFT_OUT = {  # defaults for configurations that are older than these fields
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
}
_SCALED = "scale_decoder_outputs"
_FEED_FORWARDS = ("relu", "gated-gelu")  # of v1.0 and v1.1
_NO_REMEDY = "No settings describe such a model (the vocabulary must be a multiple of 128). Choose another folder"


def require_family(config: Mapping[str, Any], file: Path, named: str) -> str:
    """Return the type of a model. Raises SpecError if it is not a T5. ``named`` is what the user chose it with."""
    kind = config.get("model_type")
    if kind not in [*_COUNTS]:  # it may be no text
        raise SpecError(f"{named}: model_type is {kind!r} in {file}. Choose a model of type {' or '.join(_COUNTS)}")
    return str(kind)


def described_by(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the fields of a configuration that determine what its model computes.

    Raises SpecError if it is not the configuration of a T5. v1.0, whose output is tied, also scales it. transformers 5
    has a separate field for scaling; older versions derive it from ``tie_word_embeddings``. An mT5 is computed as a T5
    v1.1, whatever is said of tying. Raises SpecError also if ids of padding, end or start are not the vocabulary's.
    """
    kind = require_family(config, file, _SETTING)
    for name, expected in _IDS.items():
        if config.get(name, expected) != expected:
            raise SpecError(
                f"model.start_from: {name} is {config[name]!r} in {file}, but {expected} in the vocabularies of T5 and "
                "mT5. Correct the file if the model was trained with that id, or choose another model"
            )
    described = {name: config.get(name) for name in _COUNTS[kind]}
    if described["num_decoder_layers"] is None:
        described["num_decoder_layers"] = described["num_layers"]
    for name, value in described.items():
        if type(value) is not int or value < 1:
            raise SpecError(
                f"model.start_from: {name} is {value!r} in {file}, but must be a number above zero. Restore the file, "
                "or choose another model"
            )
    form = {name: config.get(name, usual) for name, usual in _LEFT_OUT.items()}
    is_mt5 = kind == "mt5"
    scaled = not is_mt5 and config.get(_SCALED, config.get("tie_word_embeddings") is not False)
    return {"model_type": "t5" if is_mt5 else kind, **described, **form, _SCALED: bool(scaled)}


def require_agreement(described: Mapping[str, Any], shape: T5Shape, file: Path) -> None:
    """Raise SpecError if a configuration differs from a shape. The error names every such field, and what to set."""
    config = huggingface_config(shape, pad_id=0, eos_id=1) | {_SCALED: shape.tied}
    expected = {name: config.get(name, usual) for name, usual in (dict.fromkeys(described) | _LEFT_OUT).items()}
    if changed := differences(expected, described):
        remedy = _settings(expected, described)
        raise SpecError(
            f"model.start_from: {file} describes another model than the settings (settings -> file: "
            f"{'; '.join(changed)}). "
            + (
                f"To continue from that model, set {' '.join(f'{name}={value}' for name, value in remedy.items())}"
                if remedy
                else _NO_REMEDY
            )
        )


def _settings(expected: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes after which the settings describe this model; empty if there are none."""
    version, feed_forward = ("v1.0", _FEED_FORWARDS[0]) if described[_SCALED] else ("v1.1", _FEED_FORWARDS[1])
    if any(expected[name] != described[name] for name in _LEFT_OUT if name != "feed_forward_proj"):
        return {}
    if (
        described["feed_forward_proj"] not in _FEED_FORWARDS
        or pad_vocabulary(described["vocab_size"]) > described["vocab_size"]
        or (experts := _experts(expected, described)) is None
    ):
        return {}
    found: dict[str, Any] = {} if expected[_SCALED] == described[_SCALED] else {"model.version": version}
    if described["feed_forward_proj"] not in (feed_forward, expected["feed_forward_proj"]):
        found["model.feed_forward"] = described["feed_forward_proj"]
    found |= experts
    if found or any(expected[name] != described[name] for name in _SIZES):
        preset = preset_of(version, [described[name] for name in _SIZES])
        found |= {"model.preset": preset} if preset else {f"model.{name}": described[name] for name in _SIZES}
    return found | (
        {"model.vocab_size": described["vocab_size"]} if expected["vocab_size"] != described["vocab_size"] else {}
    )


def _experts(expected: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return changes after which the settings have the same experts; None if there are none."""
    if described["model_type"] == "t5":
        return {} if expected["model_type"] == "t5" else {"model.moe.num_experts": 0}
    if all(expected.get(name) == described[name] for name in _SPARSE):
        return {}
    step = sparse_step([described[name] for name in _SIZES[-2:]], [described[name] for name in _SPARSE[1:]])
    return {"model.moe.num_experts": described["num_experts"], "model.moe.every_n_layers": step} if step else None


CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.ckpt", "*.h5", "*.msgpack")


class HuggingFaceFolder(NamedTuple):
    """A model's folder. ``tensors`` are named as in the files, which may hold copies of a tied tensor."""

    path: Path
    config: dict[str, Any]
    files: list[Path]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path, named: str = _SETTING) -> Self:
        """Open a folder with ``model.safetensors``, or with the shards that its index names.

        ``named`` is the setting or argument with which the user chose it. Raises InputError if the folder is missing,
        damaged or incomplete, or if its weights are pickled, because a pickle can run arbitrary code.
        """
        if not path.is_dir():
            hub = ", or write hf://OWNER/NAME for a model on the Hub" if named == _SETTING else ""
            raise InputError(f"{named} is {path}, which is not a folder on this machine. Correct the path{hub}")
        files = _weight_files(path, named)
        return cls(path, _read_json(path / CONFIG, named), files, list_tensors(files))


def _weight_files(folder: Path, named: str) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise InputError(_without_weights(folder, named))
    files = listed_files(folder, named)
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise InputError(
            f"{folder} lacks the weight file {missing[0]}, which {INDEX} names. Copy {missing[0]} to that folder, too"
        )
    return list(files.values())


def listed_files(folder: Path, named: str = _SETTING) -> dict[str, Path]:
    """Return the weight files that the index in the folder names, sorted by name; they may be missing.

    Raises InputError if the index does not list them, or names others than safetensors in the folder.
    """
    places = _read_json(folder / INDEX, named).get("weight_map")
    if not places or not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(
            f"{folder / INDEX} does not list the model's weight files: the entry weight_map is missing or damaged. "
            f"Copy {INDEX} again from where you got the model"
        )
    files = {name: child(folder, name, str(folder / INDEX), InputError) for name in sorted(set(places.values()))}
    if others := [name for name in files if not name.endswith(".safetensors")]:
        raise InputError(
            f"{folder / INDEX} names the weight file {others[0]!r}, but only safetensors are read. Choose another model"
        )
    return files


def _without_weights(folder: Path, named: str) -> str:
    if others := sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)):
        return (
            f"{folder} has its weights in {others[0]}, which can run code when it is loaded, so only safetensors are "
            "read. If you trust the model, load it with from_pretrained of transformers, save it with save_pretrained "
            f"to another folder, and set {named} to that folder"
        )
    return f"{folder} has neither {WEIGHTS} nor {INDEX}. Set {named} to the folder of a complete model"


def _read_json(path: Path, named: str) -> dict[str, Any]:
    try:
        if not path.is_file():  # a named pipe would be waited for
            raise InputError(f"{path} is missing, or is not a file. Set {named} to the folder of a complete model")
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read ({in_one_line(error)}). If it is damaged, copy it again from where you got it"
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. Copy the file again from where you got the model")
    return found


# Older versions of transformers wrote this tensor; none reads it.
_NEVER_READ = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_log = logging.getLogger(__name__)


def require_fit(model: ModelSpec, tokenizer_vocab_size: int) -> None:
    """Check that the model in the ``start_from`` folder, if there is one, is the model that the settings describe.

    Raises SpecError if it is not. The error names every field of ``config.json`` that differs, and what to set. Raises
    InputError if the folder cannot be read, or has missing tensors, extra tensors or tensors of another shape. The
    tensors of a model that is still to be copied from the Hub or a bucket are not looked at.
    """
    if (path := _folder(model)) is None:
        return
    folder = None if is_awaited(path) else HuggingFaceFolder.open(path)
    described = described_by(folder.config if folder else _read_json(path / CONFIG, _SETTING), path / CONFIG)
    if described["vocab_size"] < tokenizer_vocab_size:
        raise SpecError(
            f"model.start_from is {path}, with a vocabulary of {described['vocab_size']}, but the tokenizer has "
            f"{tokenizer_vocab_size} ids. Set tokenizer.path to the vocabulary that the model was trained with"
        )
    shape = resolve(model, tokenizer_vocab_size)
    require_agreement(described, shape, path / CONFIG)
    if folder is not None:
        _tensors(folder, shape)


def tensors_of(model: ModelSpec, shape: T5Shape) -> dict[str, StoredTensor] | None:
    """Return where the ``start_from`` folder stores each parameter; None without ``start_from``.

    As in transformers, the files may hold copies of tied tensors. If they have no output layer, it starts as a copy of
    the embedding, even if the two are then trained separately. Raises InputError if the folder cannot be read or
    tensors do not match the shape, SpecError if copies of a tied tensor differ.
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
    """Return the fingerprint of the weights that a run continues from, regardless of their path.

    Returns None without ``start_from``. The fingerprint is made of the configuration and the files' sha256, which a
    process computes once unless a file changes. Raises DigestMismatch if the folder has a manifest of this project with
    other digests.
    """
    if (path := _folder(model)) is None:
        return None
    folder = HuggingFaceFolder.open(path)
    total, done, digests = sum(file.stat().st_size for file in folder.files), 0, {}
    for file in folder.files:
        stamp = FileStamp.of(file)
        digests[file.name] = _sha256(file, stamp)
        done += stamp.size
        progress("bytes of the weights to continue from verified", done, total)
    _require_as_recorded(path, digests)
    require_as_recorded(path, [CONFIG])
    return fingerprint({"config": described_by(folder.config, path / CONFIG), "files": digests})


def start_name(model: ModelSpec) -> str | None:
    """Return the name of the folder whose weights a run continues from; None without ``start_from``.

    Of a copy from the Hub, it is OWNER/NAME@COMMIT.
    """
    if (folder := _folder(model)) is None:
        return None
    source = origin(folder) or ""
    return source.removeprefix("hf://") if source.startswith("hf://") else folder.name


def require_vocabulary(model: ModelSpec, spiece_sha256: str) -> None:
    """Raise SpecError if the vocabulary in the ``start_from`` folder, if there is one, differs from that of the run."""
    path = _folder(model)
    if path is None or not (path / SPIECE).is_file():
        return
    if (found := sha256(in_t5_form((path / SPIECE).read_bytes())).hexdigest()) != spiece_sha256:
        raise SpecError(
            f"model.start_from is {path}, which has another vocabulary than the run: its {SPIECE} has sha256 "
            f"{found[:12]}, the run's has {spiece_sha256[:12]}. Set tokenizer.path={path}"
        )


def require_pieces(model: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise SpecError if the ``start_from`` folder has a ``tokenizer.json`` with other pieces or scores.

    Logs a warning if the folder has no vocabulary at all. Raises InputError for a ``tokenizer.json`` that is damaged.
    """
    if (path := _folder(model)) is None:
        return
    if (path / TOKENIZER_JSON).is_file():
        _require_pieces_in(path, tokenizer)
    elif not (path / SPIECE).is_file():
        _log.warning(
            "%s has neither %s nor %s: whether the vocabulary is that of the model cannot be checked",
            *(path, SPIECE, TOKENIZER_JSON),
        )


def _require_pieces_in(path: Path, tokenizer: Tokenizer) -> None:
    remedy = "Set tokenizer.path to that model's vocabulary"
    if (path / SPIECE).is_file():  # require_vocabulary compares it
        remedy = f"Its {SPIECE} has the run's vocabulary. Copy both files again from where you got the model"
    if difference := differing_piece(path / TOKENIZER_JSON, tokenizer):
        raise SpecError(
            f"model.start_from is {path}, which has another vocabulary than the run: {difference} in tokenizer.path. "
            f"{remedy}"
        )


def _folder(model: ModelSpec) -> Path | None:
    return None if model.start_from is None else local_folder(model.start_from)


@lru_cache
def _sha256(file: Path, _: FileStamp) -> str:
    return digest_file(file).sha256


def _require_as_recorded(folder: Path, digests: Mapping[str, str]) -> None:
    if (recorded := recorded_files(folder)) is None:
        return
    for name, digest in digests.items():
        expected = recorded.get(name)
        if not isinstance(expected, FileDigest) or expected.sha256 != digest:
            raise DigestMismatch(
                f"{folder / name} is damaged or was changed: its sha256 is {digest}, but {expected or 'no digest'} was "
                f"recorded in {MANIFEST}. "
                + (
                    f"Remove {folder}: it is copied again at the next start"
                    if origin(folder)
                    else "Restore the file, or choose another model (model.start_from)"
                )
            )


def _require_equal(folder: HuggingFaceFolder, copies: dict[str, StoredTensor]) -> None:
    import torch  # needed only if the files hold copies, which must be compared

    stored = StoredTensors(copies)
    for name in copies:
        if not torch.equal(stored.whole(name), stored.whole(_SHARED)):
            raise SpecError(
                f"model.start_from is {folder.path}, where {name} is tied to {_SHARED}, but the files hold different "
                f"values for {name} and {_SHARED}. Choose a model in which they are equal, or set model.version=v1.1 "
                "if this is a v1.1 model"
            )


def _require_tensors(
    folder: HuggingFaceFolder, found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    wrong = {
        "are missing": [name for name in expected if name not in found],
        "do not belong to this model": [name for name in found if name not in expected],
        "have another shape": [name for name in expected if name in found and found[name].shape != expected[name]],
        "are not 16-bit or 32-bit floating-point numbers": [
            n for n, held in found.items() if held.dtype not in FLOATING
        ],
    }
    said = [f"{', '.join(names[:3])}{' and more' * (len(names) > 3)} {what}" for what, names in wrong.items() if names]
    if said:
        raise InputError(
            f"model.start_from is {folder.path}, whose tensors are not those that {CONFIG} describes: "
            f"{'; '.join(said)}. Choose the folder of a complete model"
        )

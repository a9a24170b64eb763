"""Whether a Hugging Face ``config.json`` is of the model that the settings ask for, and which settings would be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5train.errors import SpecError
from t5train.fingerprint import differences
from t5train.model.shape import T5Shape, huggingface_config, preset_of
from t5train.spec import pad_vocabulary

_SIZES = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")
_SPARSE = ("num_experts", "num_sparse_encoder_layers", "num_sparse_decoder_layers")
_COUNTS = {"t5": ("vocab_size", *_SIZES), "switch_transformers": ("vocab_size", *_SIZES, *_SPARSE)}
_LEFT_OUT = {  # by configurations that are older than the field
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
}
_SCALED = "scale_decoder_outputs"
_FEED_FORWARDS = ("relu", "gated-gelu")  # of v1.0 and v1.1
_NO_REMEDY = "no settings ask for a model of that form (the vocabulary must be a multiple of 128); name another folder"


def told_by(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The fields of a configuration that decide what its model computes; SpecError where it is no T5's.

    v1.0, which is tied, scales its output; transformers 5 says so in a field of its own, older ones by the tie.
    """
    kind = config.get("model_type")
    if kind not in _COUNTS:
        raise SpecError(f"model.start_from: {file} has the model_type {kind!r}: there are {' and '.join(_COUNTS)}")
    told = {name: config.get(name) for name in _COUNTS[kind]}
    if told["num_decoder_layers"] is None:
        told["num_decoder_layers"] = told["num_layers"]
    for name, value in told.items():
        if not isinstance(value, int) or value < 1:
            raise SpecError(f"model.start_from: {file} has {value!r} for {name}: it must be a number above zero")
    form = {name: config.get(name, usual) for name, usual in _LEFT_OUT.items()}
    scaled = config.get(_SCALED, config.get("tie_word_embeddings") is not False)
    return {"model_type": kind, **told, **form, _SCALED: bool(scaled)}


def require_agreement(told: Mapping[str, Any], shape: T5Shape, file: Path) -> None:
    """SpecError that names every field in which a configuration differs from a shape, and what to set."""
    config = huggingface_config(shape, pad_id=0, eos_id=1) | {_SCALED: shape.tied}
    asked = {name: config.get(name, usual) for name, usual in (dict.fromkeys(told) | _LEFT_OUT).items()}
    if changed := differences(asked, told):
        remedy = _settings(asked, told)
        raise SpecError(
            f"model.start_from: {file} is of another model than the settings ({'; '.join(changed)}): "
            + (f"set {' '.join(f'{name}={value}' for name, value in remedy.items())}" if remedy else _NO_REMEDY)
        )


def _settings(asked: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """What to set so that the settings ask for the model there; nothing where none do."""
    version, feed_forward = ("v1.0", _FEED_FORWARDS[0]) if told[_SCALED] else ("v1.1", _FEED_FORWARDS[1])
    if any(asked[name] != told[name] for name in _LEFT_OUT if name != "feed_forward_proj"):
        return {}
    if told["feed_forward_proj"] not in _FEED_FORWARDS or pad_vocabulary(told["vocab_size"]) > told["vocab_size"]:
        return {}
    found: dict[str, Any] = {} if asked[_SCALED] == told[_SCALED] else {"model.version": version}
    if told["feed_forward_proj"] not in (feed_forward, asked["feed_forward_proj"]):
        found["model.feed_forward"] = told["feed_forward_proj"]
    found |= _experts(asked, told)
    if found or any(asked[name] != told[name] for name in _SIZES):
        preset = preset_of(version, [told[name] for name in _SIZES])
        found |= {"model.preset": preset} if preset else {f"model.{name}": told[name] for name in _SIZES}
    return found | ({"model.vocab_size": told["vocab_size"]} if asked["vocab_size"] != told["vocab_size"] else {})


def _experts(asked: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    if told["model_type"] == "t5":
        return {} if asked["model_type"] == "t5" else {"model.moe.num_experts": 0}
    if all(asked.get(name) == told[name] for name in _SPARSE):
        return {}
    step = told["num_layers"] // told["num_sparse_encoder_layers"]
    return {"model.moe.num_experts": told["num_experts"], "model.moe.every_n_layers": step}

"""The published T5 shapes, and the Hugging Face configuration of each.

v1.0: Raffel et al. 2020, table of the model sizes. v1.1: the t5.1.1 family released with the same code.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from t5train.errors import SpecError
from t5train.spec import NUM_SENTINELS, ExpertsSpec, ModelSpec, pad_vocabulary

RELATIVE_BUCKETS = 32
RELATIVE_MAX_DISTANCE = 128
LAYER_NORM_EPSILON = 1e-6
# Capacity of Hugging Face's experts, in tokens of a sequence: more than any sequence has, so that no token is dropped.
UNLIMITED_CAPACITY = 1 << 30


class _Size(NamedTuple):
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int


_SIZES: dict[str, dict[str, _Size]] = {
    "v1.1": {
        "smoke": _Size(128, 32, 256, 4, 2),
        "tiny": _Size(256, 64, 512, 4, 4),
        "small": _Size(512, 64, 1024, 6, 8),
        "base": _Size(768, 64, 2048, 12, 12),
        "large": _Size(1024, 64, 2816, 16, 24),
        "3b": _Size(2048, 64, 5120, 32, 24),
        "11b": _Size(4096, 64, 10240, 64, 24),
    },
    "v1.0": {
        "smoke": _Size(128, 32, 512, 4, 2),
        "tiny": _Size(256, 64, 1024, 4, 4),
        "small": _Size(512, 64, 2048, 8, 6),
        "base": _Size(768, 64, 3072, 12, 12),
        "large": _Size(1024, 64, 4096, 16, 24),
        "3b": _Size(1024, 128, 16384, 32, 24),
        "11b": _Size(1024, 128, 65536, 128, 24),
    },
}


class T5Shape(BaseModel):
    """All numbers that determine the tensors of a T5 and what they compute."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    gated: bool
    tied: bool
    dropout_rate: float
    moe: ExpertsSpec = ExpertsSpec()

    @property
    def inner(self) -> int:
        """Total width of all heads."""
        return self.num_heads * self.d_kv

    def is_sparse(self, index: int) -> bool:
        """Return whether layer ``index`` of a stack has experts, as in Switch Transformers."""
        return self.moe.num_experts > 0 and index % self.moe.every_n_layers == 1 % self.moe.every_n_layers

    def count_sparse(self, num_layers: int) -> int:
        """Return the number of layers with experts in a stack of ``num_layers``."""
        return sum(map(self.is_sparse, range(num_layers)))


def resolve(spec: ModelSpec, tokenizer_vocab_size: int) -> T5Shape:
    """Return the shape that a spec describes, for a tokenizer with this many ids (including sentinels).

    Raises SpecError if ``model.vocab_size`` is set and too small, or if Hugging Face's configuration cannot express the
    number of layers with experts.
    """
    size = _SIZES[spec.version][spec.preset]
    vocab_size = spec.vocab_size or pad_vocabulary(tokenizer_vocab_size)
    if vocab_size < tokenizer_vocab_size:
        raise SpecError(
            f"model.vocab_size is {vocab_size}, but the tokenizer has {tokenizer_vocab_size} ids "
            f"({NUM_SENTINELS} of them sentinels). Leave model.vocab_size out or set "
            f"model.vocab_size={pad_vocabulary(tokenizer_vocab_size)}"
        )
    num_layers = spec.num_layers or size.num_layers
    shape = T5Shape(
        vocab_size=vocab_size,
        d_model=spec.d_model or size.d_model,
        d_kv=spec.d_kv or size.d_kv,
        d_ff=spec.d_ff or size.d_ff,
        num_heads=spec.num_heads or size.num_heads,
        num_layers=num_layers,
        num_decoder_layers=spec.num_decoder_layers or num_layers,
        gated=spec.is_gated,
        tied=spec.version == "v1.0",
        dropout_rate=spec.dropout_rate,
        moe=spec.moe,
    )
    for setting in ("num_layers", "num_decoder_layers"):
        _require_switch_can_count(shape, setting)
    return shape


def preset_of(version: str, sizes: Sequence[Any]) -> str | None:
    """Return the preset with these d_model, d_kv, d_ff, num_heads and two numbers of layers; None if there is none."""
    wanted = {preset: (*size, size.num_layers) for preset, size in _SIZES[version].items()}
    return next((preset for preset, size in wanted.items() if size == tuple(sizes)), None)


def sparse_step(layers: Sequence[int], sparse: Sequence[int]) -> int | None:
    """Return n if every n-th layer of both stacks has experts, given the number of their layers and of sparse ones.

    None if there is no such n.
    """
    step = layers[0] // sparse[0]
    is_regular = step > 0 and all(
        len(range(1 % step, count, step)) == found for count, found in zip(layers, sparse, strict=True)
    )
    return step if is_regular else None


def _require_switch_can_count(shape: T5Shape, setting: str) -> None:
    """Raise SpecError if Hugging Face's configuration cannot express which layers are sparse.

    It has only the number of sparse layers. For "every n-th layer is sparse", it computes n by division.
    """
    layers, step = int(getattr(shape, setting)), shape.moe.every_n_layers
    sparse = shape.count_sparse(layers)
    if shape.moe.num_experts and (not sparse or layers // sparse != step):
        raise SpecError(
            f"model.moe.every_n_layers is {step} and model.{setting} {layers}: the configuration of Switch "
            f"Transformers cannot describe {sparse} sparse layers of {layers}. Make model.{setting} a multiple of "
            "model.moe.every_n_layers"
        )


def count_parameters(shape: T5Shape) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    encoder, decoder = block_parameters(shape)
    blocks = shape.num_layers * encoder + shape.num_decoder_layers * decoder
    sparse = shape.count_sparse(shape.num_layers) + shape.count_sparse(shape.num_decoder_layers)
    more_experts = sparse * ((shape.moe.num_experts - 1) * _feed_forward(shape) + shape.moe.num_experts * shape.d_model)
    embeddings = (1 if shape.tied else 2) * shape.vocab_size * shape.d_model
    return blocks + more_experts + embeddings + 2 * (shape.d_model + RELATIVE_BUCKETS * shape.num_heads)


def block_parameters(shape: T5Shape) -> tuple[int, int]:
    """Return the number of elements of an encoder block and of a decoder block, without experts and position biases."""
    attention, feed_forward = 4 * shape.d_model * shape.inner, _feed_forward(shape)
    return attention + feed_forward + 2 * shape.d_model, 2 * attention + feed_forward + 3 * shape.d_model


def _feed_forward(shape: T5Shape) -> int:
    return (3 if shape.gated else 2) * shape.d_model * shape.d_ff


def count_expert_parameters(shape: T5Shape) -> int:
    """Return the number of elements of all experts, which expert-parallel ranks share out; excludes routers."""
    sparse = shape.count_sparse(shape.num_layers) + shape.count_sparse(shape.num_decoder_layers)
    return sparse * shape.moe.num_experts * _feed_forward(shape)


def huggingface_config(shape: T5Shape, pad_id: int, eos_id: int) -> dict[str, Any]:
    """Return the model's ``config.json``, which also names the transformers class that loads it."""
    return {
        **(_switch_config(shape) if shape.moe.num_experts else _t5_config(shape)),
        "is_encoder_decoder": True,
        "vocab_size": shape.vocab_size,
        "d_model": shape.d_model,
        "d_kv": shape.d_kv,
        "d_ff": shape.d_ff,
        "num_heads": shape.num_heads,
        "num_layers": shape.num_layers,
        "num_decoder_layers": shape.num_decoder_layers,
        "tie_word_embeddings": shape.tied,
        "relative_attention_num_buckets": RELATIVE_BUCKETS,
        "relative_attention_max_distance": RELATIVE_MAX_DISTANCE,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "dropout_rate": shape.dropout_rate,
        "initializer_factor": 1.0,
        "pad_token_id": pad_id,
        "eos_token_id": eos_id,
        "decoder_start_token_id": pad_id,
        "use_cache": True,
    }


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``generation_config.json`` for a configuration: only ids, so that generation is greedy by default."""
    return {name: config[name] for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}


def cache_whole_decoder(config: Any) -> None:
    """Have ``generate()`` make a cache for all layers of the decoder: transformers counts those of the encoder.

    ``config`` is that of a loaded model, whose layers are not changed.
    """
    config.num_layers = config.num_decoder_layers


def _t5_config(shape: T5Shape) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "feed_forward_proj": "gated-gelu" if shape.gated else "relu",
    }


def _switch_config(shape: T5Shape) -> dict[str, Any]:
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "dense_act_fn": "relu",
        "num_experts": shape.moe.num_experts,
        "num_sparse_encoder_layers": shape.count_sparse(shape.num_layers),
        "num_sparse_decoder_layers": shape.count_sparse(shape.num_decoder_layers),
        "expert_capacity": UNLIMITED_CAPACITY,
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": shape.moe.aux_loss,
        "router_z_loss_coef": shape.moe.z_loss,
    }

"""Name and shape of every parameter of a T5, as in Hugging Face's models, and where an engine keeps it.

Does not import torch. Tied parameters appear once.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from t5train.model.model_shape import RELATIVE_BUCKETS, T5Shape, count_parameters
from t5train.spec import LoraSpec

Named = Iterator[tuple[str, tuple[int, ...]]]


def parameter_shapes(shape: T5Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    found: dict[str, tuple[int, ...]] = {"shared.weight": (shape.vocab_size, shape.d_model)}
    found |= dict(_stack("encoder", shape, shape.num_layers))
    found |= dict(_stack("decoder", shape, shape.num_decoder_layers))
    return found if shape.tied else found | {"lm_head.weight": (shape.vocab_size, shape.d_model)}


def _stack(stack: str, shape: T5Shape, num_layers: int) -> Named:
    attentions = ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
    for index in range(num_layers):
        block = f"{stack}.block.{index}.layer"
        for number, attention in enumerate(attentions):
            yield from _attention(f"{block}.{number}.{attention}", shape)
            yield f"{block}.{number}.layer_norm.weight", (shape.d_model,)
        if index == 0:
            bias = f"{block}.0.SelfAttention.relative_attention_bias.weight"
            yield bias, (RELATIVE_BUCKETS, shape.num_heads)
        yield from _feed_forward(f"{block}.{len(attentions)}", shape, is_sparse=shape.is_sparse(index))
        yield f"{block}.{len(attentions)}.layer_norm.weight", (shape.d_model,)
    yield f"{stack}.final_layer_norm.weight", (shape.d_model,)


def _attention(path: str, shape: T5Shape) -> Named:
    for projection in ("q", "k", "v"):
        yield f"{path}.{projection}.weight", (shape.inner, shape.d_model)
    yield f"{path}.o.weight", (shape.d_model, shape.inner)


def _feed_forward(layer: str, shape: T5Shape, *, is_sparse: bool) -> Named:
    if not is_sparse:
        yield from _projections(f"{layer}.{'mlp' if shape.moe.num_experts else 'DenseReluDense'}", shape)
        return
    yield f"{layer}.mlp.router.classifier.weight", (shape.moe.num_experts, shape.d_model)
    for expert in range(shape.moe.num_experts):
        yield from _projections(f"{layer}.mlp.experts.expert_{expert}", shape)


def _projections(path: str, shape: T5Shape) -> Named:
    for projection in ("wi_0", "wi_1") if shape.gated else ("wi",):
        yield f"{path}.{projection}.weight", (shape.d_ff, shape.d_model)
    yield f"{path}.wo.weight", (shape.d_model, shape.d_ff)


def count_trained(shape: T5Shape, lora: LoraSpec) -> int:
    """Return the number of elements that are trained: of the factors of adapters, or without LoRA of all parameters."""
    if lora.rank is None:
        return count_parameters(shape)
    sizes = (size for name, size in parameter_shapes(shape).items() if name.split(".")[-2] in lora.targets)
    return sum(lora.rank * sum(size) for size in sizes)


def name_of_factor(name: str) -> str:
    """Return the name in checkpoints for a parameter of a module, which differs for an adapter's factors only.

    There, ``.lora_a`` or ``.lora_b`` follows the name of the weight: ``q.lora_a`` becomes ``q.weight.lora_a``.
    """
    layer, _, own = name.rpartition(".")
    return f"{layer}.weight.{own}" if own in {"lora_a", "lora_b"} else name


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Return whether weight decay shrinks a parameter, by Hugging Face's name: norms and position biases are exempt."""
    return len(shape) > 1 and not name.endswith(".relative_attention_bias.weight")


Precision = Literal["fp32", "bf16", "fp16"]
_EXPERTS, _GATE = "deepspeed_moe.experts.deepspeed_experts.", "deepspeed_moe.gate.wg."
PIPELINE_LAYER = r"\d+|tied_modules\.[^.]+"
"""Pattern of DeepSpeed's name of a pipeline layer."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ParameterSlot(_Part):
    """Position of one parameter in the flat buffer of its parameter group, with all ranks' partitions joined.

    At ZeRO 3, which partitions every parameter separately, ``offset`` is the start of each rank's part in that rank's
    own buffer. ``name`` is Hugging Face's; ``offset`` and ``numel`` count elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    numel: int = Field(ge=0)

    @classmethod
    def of(cls, name: str, shape: Sequence[int], offset: int) -> Self:
        """Return the slot of a parameter of this shape at this offset."""
        return cls(name=name, shape=tuple(shape), offset=offset, numel=math.prod(shape))

    @model_validator(mode="after")
    def _shape_agrees(self) -> Self:
        if math.prod(self.shape) != self.numel:
            raise ValueError(
                f"{self.name} has the shape {self.shape}, but numel is {self.numel}, not the product of the shape"
            )
        return self


class ExpertLayer(_Part):
    """One layer with a mixture of experts.

    ``path`` is Hugging Face's name of the layer (``"encoder.block.1.layer.1.mlp"``). ``module`` is the name of its
    DeepSpeed ``MoE`` in checkpoint files, after the model's prefix. DeepSpeed names experts and gate differently.
    Expert-parallel rank e of ``expert_parallel_size`` holds experts ``e * n`` to ``e * n + n - 1``, with n =
    ``num_experts // expert_parallel_size``.
    """

    path: str = Field(min_length=1)
    module: str = Field(min_length=1)
    num_experts: int = Field(ge=1)
    expert_parallel_size: int = Field(ge=1)

    def huggingface_name(self, name: str) -> str:
        """Return Hugging Face's name for ``name`` in checkpoint files. Experts are numbered over all ranks."""
        experts, gate = f"{self.module}.{_EXPERTS}", f"{self.module}.{_GATE}"
        if name.startswith(experts):
            return f"{self.path}.experts.expert_{name.removeprefix(experts)}"
        return f"{self.path}.router.classifier.{name.removeprefix(gate)}" if name.startswith(gate) else name

    @model_validator(mode="after")
    def _ranks_hold_equally_many(self) -> Self:
        if self.num_experts % self.expert_parallel_size:
            raise ValueError(
                f"{self.path}: num_experts is {self.num_experts}, but must be a multiple of expert_parallel_size "
                f"({self.expert_parallel_size})"
            )
        return self


def huggingface_name(name: str, model_prefix: str, pipeline_layers: Mapping[str, str]) -> str:
    """Return Hugging Face's name for parameter ``name`` of the engine's module.

    Raises ValueError if the name does not begin with ``model_prefix``, or with a layer of the pipeline.
    """
    if not name.startswith(model_prefix):
        raise ValueError(f"{name!r} does not begin with {model_prefix!r}, as the name of every parameter must")
    rest = name.removeprefix(model_prefix)
    if not pipeline_layers:
        return rest
    match = re.fullmatch(rf"({PIPELINE_LAYER})\.(.+)", rest)
    if match is None or match[1] not in pipeline_layers:
        raise ValueError(f"{name!r} is in none of the pipeline's layers {sorted(pipeline_layers)}")
    path = pipeline_layers[match[1]]
    return f"{path}.{match[2]}" if path else match[2]

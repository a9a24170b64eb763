"""Initial values of every parameter. They depend only on seed and name, so every layout starts from the same values."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from t5train.model.model_shape import T5Shape

# Factor for the variance of experts and routers (Fedus et al. 2022, section 2.4: the usual one made training unstable).
EXPERT_SCALE = 0.1

Fill = Callable[[str, nn.Parameter], None]
"""Fills a parameter in place with the initial value for its Hugging Face name."""


def initialise(name: str, parameter: nn.Parameter, shape: T5Shape, seed: int) -> None:
    """Fill a parameter in place with the initial value for a seed and its Hugging Face name."""
    with torch.no_grad():
        parameter.copy_(first_value(name, parameter.shape, shape, seed))


def first_value(name: str, size: torch.Size, shape: T5Shape, seed: int) -> Tensor:
    """Return the initial value, fp32 [*size]: ones for norms, otherwise normal with T5's deviation for that name."""
    if name.endswith("layer_norm.weight"):
        return torch.ones(size)
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.empty(size).normal_(0.0, deviation(name, shape), generator=generator)


def deviation(name: str, shape: T5Shape) -> float:
    """Return the standard deviation of T5's initialisation (Mesh TensorFlow's, which scales q instead of attention)."""
    scale = math.sqrt(EXPERT_SCALE) if ".experts." in name or ".router." in name else 1.0
    return scale * _dense_deviation(name, shape)


def _dense_deviation(name: str, shape: T5Shape) -> float:
    match name.split(".")[-2]:
        case "shared":
            return 1.0
        case "q":
            return 1 / math.sqrt(shape.d_model * shape.d_kv)
        case "o":
            return 1 / math.sqrt(shape.inner)
        case "wo":
            return 1 / math.sqrt(shape.d_ff)
        case "k" | "v" | "wi" | "wi_0" | "wi_1" | "relative_attention_bias" | "lm_head" | "classifier":
            return 1 / math.sqrt(shape.d_model)
    raise KeyError(f"no initialisation is known for {name}")

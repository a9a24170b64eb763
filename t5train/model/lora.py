"""LoRA: a frozen weight W [out, in], and an adapter beside it that is trained (Hu et al. 2021).

The adapter has two factors, A [rank, in] and B [out, rank]. A layer computes ``x W^T + scaling dropout(x) A^T B^T``.
B starts at zero, so that training starts from the frozen model. W is kept in the precision of the computation; A and B
have fp32 masters, as all weights that are trained.
"""

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from t5train.model.tensor_files import StoredTensors, list_tensors

A, B = ".lora_a", ".lora_b"
"""What follows the name of a weight in the names of the factors of its adapter."""
ADAPTERS = "adapters"
"""Stem of the file, beside consolidated weights, that has the factors in fp32 (``read_adapters``)."""


class Adapter(NamedTuple):
    """The factors of an adapter, fp32: A [rank, in] and B [out, rank]."""

    a: Tensor
    b: Tensor


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name is a factor of an adapter."""
    return name.endswith((A, B))


def first_factor(name: str, size: torch.Size, seed: int) -> Tensor:
    """Return the initial value, fp32 [*size], of a factor, which depends on seed and name only.

    B is zero. A is uniform within 1 / sqrt(in), as Kaiming's initialisation with sqrt(5) in the LoRA paper's code and
    in PEFT.
    """
    if name.endswith(B):
        return torch.zeros(size)
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    bound = 1 / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return B A, fp32 [out, in], on the CPU.

    The terms are added in the order of the rank, by operators that round each number for itself. A matrix product adds
    in an order that depends on the processor, the library and the number of threads; this one gives the same bits
    everywhere, whole or row by row.
    """
    total = torch.zeros(b.shape[0], a.shape[1])
    for column, row in zip(b.float().unbind(1), a.float().unbind(0), strict=True):
        total += torch.outer(column, row)
    return total


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the weight [out, in] with its adapter, fp32: ``weight + scaling x B A``, the same bits everywhere."""
    return weight.float() + product(a, b).mul_(scaling)


def read_adapters(folder: Path) -> dict[str, Adapter]:
    """Return the adapters beside consolidated weights, by the name of the weight, in the order of the names.

    Empty if the weights were not trained with LoRA. The caller has verified the folder's files.
    """
    file = folder / f"{ADAPTERS}.safetensors"
    if not file.is_file():
        return {}
    places = list_tensors([file])
    stored = StoredTensors(places)
    weights = sorted(name.removesuffix(A) for name in places if name.endswith(A))
    return {name: Adapter(stored.whole(name + A), stored.whole(name + B)) for name in weights}

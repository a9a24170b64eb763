"""Linear layers, and LoRA: a frozen weight W [out, in], and an adapter beside it that is trained (Hu et al. 2021).

The adapter has two factors, A [rank, in] and B [out, rank]. A layer computes ``x W^T + scaling dropout(x) A^T B^T``.
B starts at zero, so that training starts from the frozen model. W is kept in the precision of the computation; A and B
have fp32 masters, as all weights that are trained.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.counted_dropout import CountedDropout, branch
from t5train.model.tensor_files import StoredTensors, list_tensors
from t5train.spec import LoraSpec

LORA_A, LORA_B = ".lora_a", ".lora_b"
"""What follows the name of a weight in the names of the factors of its adapter."""
ADAPTERS = "adapters"
"""Stem of the file, beside consolidated weights, that has the factors in fp32 (``read_adapters``)."""


class Adapter(NamedTuple):
    """The factors of an adapter, fp32: A [rank, in] and B [out, rank]."""

    a: Tensor
    b: Tensor


class LoraLinear(nn.Linear):
    """A frozen linear layer without offset, and its adapter. ``path`` is that of the layer in the model."""

    branch: Tensor

    def __init__(self, frozen: nn.Linear, lora: LoraSpec, rank: int, path: str) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate another weight
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight = frozen.weight
        self.register_parameter("bias", None)
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank))
        self.scaling, self.dropout = lora.scaling, CountedDropout(lora.dropout)
        # The keys of several layers may be the same. A tensor, as code is compiled for one value of a number.
        self.register_buffer("branch", torch.tensor(_hashed(path)), persistent=False)

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out]; ``keys`` int64 [...] of the tokens decide what dropout drops."""
        kept = self.dropout(hidden, branch(keys, self.branch)) if self.dropout.p else hidden
        inner = functional.linear(kept, self.lora_a)
        return functional.linear(hidden, self.weight) + self.scaling * functional.linear(inner, self.lora_b)


def projected(layer: nn.Linear, hidden: Tensor, keys: Tensor | None) -> Tensor:
    """Return the output of a linear layer; ``keys`` of the tokens decide what the dropout of its adapter drops."""
    output: Tensor = layer(hidden, keys) if isinstance(layer, LoraLinear) else layer(hidden)
    return output


def joint_projection(hidden: Tensor, layers: Sequence[nn.Linear], keys: Sequence[Tensor | None]) -> Tensor:
    """Return the outputs of linear layers without offsets, one after the other in the last dimension.

    One large product is faster than several small ones, and the gradient of ``hidden`` is a product instead of a sum of
    products. The last bits differ. Layers with adapters have products of their own, and use the ``keys`` for each.
    """
    if any(isinstance(layer, LoraLinear) for layer in layers):
        return torch.cat([projected(layer, hidden, own) for layer, own in zip(layers, keys, strict=True)], dim=-1)
    return functional.linear(hidden, torch.cat([layer.weight for layer in layers]))


def add_adapters(model: nn.Module, lora: LoraSpec) -> None:
    """Freeze a model, and give each target an adapter, whose factors are still to be filled. Nothing without LoRA."""
    if lora.rank is None:
        return
    model.requires_grad_(False)
    for path, layer in [*model.named_modules()]:
        parent, _, name = path.rpartition(".")
        if name in lora.targets and isinstance(layer, nn.Linear):
            setattr(model.get_submodule(parent), name, LoraLinear(layer, lora, lora.rank, path))


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def first_factor(name: str, size: torch.Size, seed: int) -> Tensor:
    """Return the initial value, fp32 [*size], of a factor, which depends on seed and name only.

    B is zero. A is uniform within 1 / sqrt(in), as Kaiming's initialisation with sqrt(5) in the LoRA paper's code and
    in PEFT.
    """
    if name.endswith(LORA_B):
        return torch.zeros(size)
    generator = torch.Generator().manual_seed(_hashed(f"{seed}|{name}"))
    bound = 1 / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def _hashed(text: str) -> int:
    """Return a number of 63 bits that follows from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (2**63 - 1)


_BLOCK_ELEMENTS = 30_000  # they stay in the processor's cache, and with more, torch starts threads


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return B A, fp32 [out, in], of factors in fp32 on the CPU.

    The terms are added in the order of the rank, by operators that round each number for itself. A matrix product adds
    in an order that depends on the processor, the library and the number of threads; this one gives the same bits
    everywhere, whole or row by row.
    """
    return torch.cat([_of_rows(a, rows) for rows in torch.split(b, max(1, _BLOCK_ELEMENTS // a.shape[1]))])


def _of_rows(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(b.shape[0], a.shape[1])
    for column, row in zip(b.unbind(1), a.unbind(0), strict=True):
        total += torch.outer(column, row)
    return total


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the weight [out, in] with its adapter, fp32: ``weight + scaling x B A``, the same bits everywhere."""
    return weight.float() + product(a, b).mul_(scaling)


class Merging(NamedTuple):
    """Merges an adapter with consecutive elements of its weight, in row-major order."""

    adapter: Adapter
    scaling: float

    def merged(self, values: Tensor, start: int) -> Tensor:
        """Return elements ``start`` to ``start + n`` of the merged weight, fp32 [n], from those of the weight."""
        (a, b), width = self.adapter, self.adapter.a.shape[1]
        rows = slice(start // width, -(-(start + len(values)) // width))
        added = product(a, b[rows]).mul_(self.scaling).view(-1)[start - rows.start * width :]
        return values.float() + added[: len(values)]


def read_adapters(folder: Path) -> dict[str, Adapter]:
    """Return the adapters beside consolidated weights, by the name of the weight, in the order of the names.

    Empty if the weights were not trained with LoRA. The caller has verified the folder's files.
    """
    file = folder / f"{ADAPTERS}.safetensors"
    if not file.is_file():
        return {}
    places = list_tensors([file])
    stored = StoredTensors(places)
    weights = sorted(name.removesuffix(LORA_A) for name in places if name.endswith(LORA_A))
    return {name: Adapter(stored.whole(name + LORA_A), stored.whole(name + LORA_B)) for name in weights}

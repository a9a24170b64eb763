"""Dropout whose mask is a pure function of keys, instead of numbers that a generator draws.

Every token of a pair has a key, 64 bits that follow from seed, epoch, pair and place in the pair. Keys branch as the
model does: into stack, block, sublayer and the places within. What is dropped at a place depends on the token's key
there and the number of the feature; of an attention weight, on the keys of both tokens and the head. So a pair is
masked alike in every batch, row, rank and layout, and when activations are computed again. All arithmetic is of
integers, hence the same on every device.
"""

from typing import overload

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_GOLDEN_32 = 0x9E3779B9 - (1 << 32)


class CountedDropout(nn.Dropout):
    """nn.Dropout, or with keys one whose mask is a function of them."""

    def forward(self, values: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map [..., features] to the same shape; ``keys`` are int64 [...]."""
        if keys is None or not self.training:
            return super().forward(values)
        features = torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)
        return dropped(values, self.p, keys, features)


def dropped(values: Tensor, rate: float, keys: Tensor, columns: Tensor) -> Tensor:
    """Return ``values`` [..., n] with a share ``rate`` of them set to 0, and the others divided by ``1 - rate``.

    ``keys`` int64 [...] and ``columns`` int32, which broadcasts to ``values``, decide which ones: a 32-bit hash of both
    (murmur3's finaliser) is compared with the rate.
    """
    low, high = keys.int().unsqueeze(-1), (keys >> 32).int().unsqueeze(-1)
    hashed = (low + columns * _GOLDEN_32) ^ high
    hashed = (hashed ^ _shifted(hashed, 16)) * (0x85EBCA6B - (1 << 32))
    hashed = (hashed ^ _shifted(hashed, 13)) * (0xC2B2AE35 - (1 << 32))
    hashed = hashed ^ _shifted(hashed, 16)
    return torch.where(hashed >= lowest_kept(rate), values / (1 - rate), 0)


def lowest_kept(rate: float) -> int:
    """Return the lowest hash, as a signed number of 32 bits, of a value that is not dropped."""
    return round(rate * (1 << 32)) - (1 << 31)


@overload
def branch(keys: Tensor, number: int | Tensor) -> Tensor: ...
@overload
def branch(keys: None, number: int | Tensor) -> None: ...
def branch(keys: Tensor | None, number: int | Tensor) -> Tensor | None:
    """Return the keys of a place below, by its number there, as ``keyed_random.keys`` does. None stays None."""
    if keys is None:
        return None
    mixed = (keys ^ number) + _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    mixed = (mixed ^ _shifted(mixed, 27)) * (0x94D049BB133111EB - (1 << 64))
    return mixed ^ _shifted(mixed, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros. torch fills with the sign."""
    return (bits >> by) & ((1 << (8 * bits.itemsize - by)) - 1)

"""Which tiles of attention share a segment, from the lowest and highest segment of each block of tokens.

Pairs lie in a row one after the other, so that the tiles of a block lie together. Other orders are right as well, but
fewer tiles are left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64  # queries or keys of a program
STEP = 32  # begins and ends of what a program visits are multiples of it
_NONE = torch.iinfo(torch.int32).max


class SegmentTiles(NamedTuple):
    """What each program of a kernel visits; all int32.

    ``of_queries`` [b, query blocks, 2] are the first key that a block of queries visits, and where its keys end;
    ``of_keys`` [b, key blocks, 2] the same of queries. ``near`` [offsets, b * query blocks] are, for each offset of
    blocks, the tiles (b, query block) that share a segment, as one number each; the first ``num_near`` [offsets] count.
    """

    of_queries: Tensor
    of_keys: Tensor
    near: Tensor
    num_near: Tensor


def segment_tiles(segments: Tensor, memory_segments: Tensor, offsets: range) -> SegmentTiles:
    """Return the tiles of queries of ``segments`` [b, nq] and keys of ``memory_segments`` [b, nk]; padding is 0."""
    blocks, memory_blocks = _bounds(segments, BLOCK), _bounds(memory_segments, BLOCK)
    of_queries = _spans(_share(blocks, _bounds(memory_segments, STEP)))
    of_keys = _spans(_share(memory_blocks, _bounds(segments, STEP)))
    return SegmentTiles(of_queries, of_keys, *_near(_share(blocks, memory_blocks), offsets))


def _bounds(segments: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest segment of each block, [b, blocks]. Those of padding alone share nothing."""
    blocks = functional.pad(segments, (0, -segments.shape[1] % size)).reshape(len(segments), -1, size)
    return torch.where(blocks == 0, _NONE, blocks).amin(-1), blocks.amax(-1)


def _share(of_blocks: tuple[Tensor, Tensor], of_others: tuple[Tensor, Tensor]) -> Tensor:
    """Return which [b, blocks, others] share a segment, from the bounds of both."""
    (low, high), (others_low, others_high) = of_blocks, of_others
    return (low[:, :, None] <= others_high[:, None]) & (others_low[:, None] <= high[:, :, None])


def _spans(shares: Tensor) -> Tensor:
    """Return the first token that [b, blocks, steps] visits, and where they end; 0 of them if there are none."""
    numbers = torch.arange(shares.shape[-1], device=shares.device)
    first, end = torch.where(shares, numbers, _NONE).amin(-1), torch.where(shares, numbers + 1, 0).amax(-1)
    return (torch.stack([first.minimum(end), end], -1) * STEP).int()


def _near(shares: Tensor, offsets: range) -> tuple[Tensor, Tensor]:
    """Return ``near`` and ``num_near`` of SegmentTiles."""
    query_blocks, key_blocks = shares.shape[1:]
    queries = torch.arange(query_blocks, device=shares.device)
    keys = queries + torch.arange(offsets.start, offsets.stop, device=shares.device)[:, None]
    is_tile = shares[:, queries, keys.clamp(0, key_blocks - 1)] & (keys >= 0) & (keys < key_blocks)
    of_offsets = is_tile.transpose(0, 1).flatten(1)
    return (~of_offsets).int().argsort(dim=-1, stable=True).int(), of_offsets.sum(-1, dtype=torch.int32)

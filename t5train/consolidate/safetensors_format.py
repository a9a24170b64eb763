"""The safetensors file format and Hugging Face's way of cutting a model into several files.

A file is the length of its header (8 bytes, little-endian), the header (JSON, here padded with spaces so that the first
tensor begins with a block of the disk) and the tensors' bytes in the header's order, without gaps.
"""

import json
import struct
from collections.abc import Mapping, Sequence

from t5train.consolidate.plan import ITEM_BYTES, TensorPlan

BLOCK_BYTES = 4096
_LENGTH = struct.Struct("<Q")


def index_name(stem: str) -> str:
    """Name of the index of a model that is cut into several files."""
    return f"{stem}.safetensors.index.json"


def header(tensors: Sequence[TensorPlan]) -> bytes:
    """What stands before the first tensor's bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(_LENGTH.size + len(text)) % BLOCK_BYTES)
    return _LENGTH.pack(len(text)) + text


def shards(tensors: Sequence[TensorPlan], stem: str, shard_bytes: int | None) -> dict[str, list[TensorPlan]]:
    """Tensors by file: one file, or as many as it takes for none to exceed ``shard_bytes`` by more than a tensor.

    A tensor is never cut, so that one larger than ``shard_bytes`` has a file to itself. In a file the wider types come
    first: behind a few single bytes an fp32 tensor would begin where none can be read.
    """
    cut: list[list[TensorPlan]] = [[]]
    filled = 0
    for tensor in tensors:
        if shard_bytes is not None and cut[-1] and filled + tensor.size > shard_bytes:
            cut.append([])
            filled = 0
        cut[-1].append(tensor)
        filled += tensor.size
    for part in cut:
        part.sort(key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    if len(cut) == 1:
        return {f"{stem}.safetensors": cut[0]}
    return {f"{stem}-{number:05d}-of-{len(cut):05d}.safetensors": part for number, part in enumerate(cut, start=1)}


def index(files: Mapping[str, Sequence[TensorPlan]]) -> dict[str, object]:
    """Which file holds which tensor, as the index says it."""
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.size for tensors in files.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}

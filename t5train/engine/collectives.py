"""Collectives for small values: integers and floats, bit-exact, and JSON values."""

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from t5train.spec import RunSpec

T = TypeVar("T")


def gather(values: Sequence[int]) -> list[list[int]]:
    """Return all ranks' 64-bit integers, by rank. Every rank must pass the same number of them.

    A rank alone does not ask its accelerator, which would first have to finish what it was given before.
    """
    if world_size() == 1:
        return [[int(value) for value in values]]
    device = get_accelerator().current_device_name()
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everybody = torch.empty(comm.get_world_size() * len(values), dtype=torch.int64, device=device)
    comm.all_gather_into_tensor(everybody, mine)
    rows: list[list[int]] = everybody.view(comm.get_world_size(), len(values)).tolist()
    return rows


def gather_objects(mine: T) -> list[T]:
    """Return all ranks' JSON values, by rank. Not pickled, so that a process that poses as a rank cannot run code."""
    content = json.dumps(mine).encode("ascii")
    sizes = [size for (size,) in gather([len(content)])]
    device = get_accelerator().current_device_name()
    padded = torch.tensor(list(content.ljust(max(sizes))), dtype=torch.uint8, device=device)
    everybody = torch.empty(world_size() * max(sizes), dtype=torch.uint8, device=device)
    comm.all_gather_into_tensor(everybody, padded)
    return [json.loads(bytes(row)) for row in everybody.view(world_size(), max(sizes)).tolist()]


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Return all ranks' fp64 numbers, by rank, bit for bit (also on accelerators without fp64)."""
    return [[float_of(bits) for bits in row] for row in gather([bits_of(value) for value in values])]


def bits_of(value: float) -> int:
    """Return the 64 bits of a float as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def float_of(bits: int) -> float:
    """Inverse of ``bits_of``."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def digest64(text: str | bytes) -> int:
    """Return the first 64 bits of a sha256, as a signed integer that ``gather`` can carry."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def rank() -> int:
    """The rank of this process."""
    return int(comm.get_rank())


def world_size() -> int:
    """The number of ranks."""
    return int(comm.get_world_size())


def data_rank(spec: RunSpec) -> int:
    """Return the index of this rank's share of the samples. The ranks of a pipeline stage are consecutive."""
    return rank() % spec.data_parallel_size


def expert_rank(expert_parallel_size: int) -> int:
    """Return the index of this rank's share of the experts. As in DeepSpeed, consecutive ranks hold different ones."""
    return rank() % expert_parallel_size


def ranks_of_node() -> list[int]:
    """Return the ranks on this rank's node, ascending. Every launcher numbers the ranks of a node consecutively."""
    first = rank() - int(comm.get_local_rank())
    return [other for other, (its_first,) in enumerate(gather([first])) if its_first == first]


def barrier() -> None:
    """Wait for every rank."""
    comm.barrier()


def sum_over_ranks(values: torch.Tensor, sharers: Any) -> None:
    """Sum in place, over a process group, or over all ranks if ``sharers`` is None.

    Values in host memory are copied to the accelerator, because its collectives cannot access host memory.
    """
    on_device = values.to(get_accelerator().current_device_name())
    comm.all_reduce(on_device, group=sharers)
    values.copy_(on_device)


def on_accelerator(array: Any) -> torch.Tensor:
    """Copy a NumPy array of ids to an int64 tensor on this rank's accelerator, without waiting for it."""
    accelerator = get_accelerator()
    pinned = accelerator.pin_memory(torch.from_numpy(array))
    return cast(torch.Tensor, pinned.to(accelerator.current_device_name(), non_blocking=True).long())

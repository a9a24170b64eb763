"""Copies in host memory of what DeepSpeed saves, from which its files are written while training goes on.

DeepSpeed's own engines for that do not copy: the decoupled one reads the tensors that are trained, so that the next
update must wait for it, and it writes other files. Here, torch.save writes for a copy the bytes that it would have
written for the original: tensors share storages as before, also parts that no tensor uses are copied, and each storage
is recorded with the device that it was copied from.
"""

import copy
import logging
import resource
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor, UntypedStorage, nn

from t5train.checkpoint.retention import bytes_written
from t5train.engine.collectives import gather, rank, ranks_of_node
from t5train.host_resources import available_host_memory_bytes, host_memory_bytes
from t5train.model.model_shape import T5Shape, count_parameters
from t5train.quantities import format_bytes
from t5train.spec import RunSpec

_log = logging.getLogger(__name__)
_SPARE_SHARE = 1 / 10
"""The share of a host's memory that copies leave free, because files take memory too until they are on disk."""
_STAGED_BYTES = 64 << 20
_COPIED_FROM = "_t5train_copied_from"


class SavedFiles(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """The files that ``engine.save_checkpoint`` saves on this rank: written at once, or copied and written later."""

    def __init__(self, writer: CheckpointEngine, *, is_deferred: bool) -> None:
        super().__init__()
        self._writer, self._is_deferred = writer, is_deferred
        self._deferred: list[tuple[Any, str]] = []
        self.names: list[str] = []

    def create(self, info: Any) -> None:
        """Begin a checkpoint, as DeepSpeed requires."""
        self._writer.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file, or copy what it will hold."""
        self.names.append(Path(path).name)
        if self._is_deferred:
            self._deferred.append((copied(state_dict), path))
        else:
            self._writer.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file, as DeepSpeed requires."""
        return self._writer.load(path, map_location)

    def commit(self, info: Any) -> Any:
        """End a checkpoint, as DeepSpeed requires."""
        return self._writer.commit(info)

    def write(self) -> None:
        """Write the files that were copied, and free each copy once it is written. No collective."""
        while self._deferred:
            self._writer.save(*self._deferred.pop(0))


def fit_in_memory(spec: RunSpec, shape: T5Shape, *, records_witness: bool) -> bool:
    """Whether every host has the memory for copies of what its ranks save, also at the peak of a step. A collective.

    If ``records_witness``, rank 0 needs memory for the whole model in fp32 meanwhile. So may a rank of every host, if
    text is generated to choose the best checkpoint.
    """
    ranks = ranks_of_node()
    spare = available_host_memory_bytes() - round(_SPARE_SHARE * host_memory_bytes())
    holders = ranks[:1] if spec.evaluate.generates else [0] if records_witness else []
    rows = gather([_growth_bytes() + 4 * count_parameters(shape) * (rank() in holders), spare])
    needed = bytes_written(spec, shape, range(ranks[0], ranks[-1] + 1)) + sum(rows[other][0] for other in ranks)
    spare = min(rows[other][1] for other in ranks)
    is_short = needed > spare
    if is_short and rank() == ranks[0]:
        _log.warning(
            "host memory is short, so that training waits for this checkpoint: to write it meanwhile, copies and a "
            "step need %s, and %s are free",
            format_bytes(needed),
            format_bytes(max(0, spare)),
        )
    return not any(row[0] for row in gather([is_short]))


@cache
def _growth_bytes() -> int:
    """How much more memory a step of this rank takes at its peak than between steps.

    This is measured once, as copies raise the peak.
    """
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return peak_bytes - int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def copied(state: Any) -> Any:
    """Return a deep copy of a state with its tensors in host memory. Once this returns, the originals may change."""
    storages = _Storages()
    return copy.deepcopy(state, {id(tensor): storages.copy_of(tensor) for tensor in _tensors(state)})


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


class _Storages:
    """Copies each storage once, however many tensors share it."""

    def __init__(self) -> None:
        self._copies: dict[int, UntypedStorage] = {}
        self._staged: Tensor | None = None

    def copy_of(self, tensor: Tensor) -> Tensor:
        original = tensor.untyped_storage()
        key = original._cdata
        if key not in self._copies:
            self._copies[key] = self._copy(original)
        found = torch.empty(0, dtype=tensor.dtype)
        found.set_(self._copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        found = nn.Parameter(found) if isinstance(tensor, nn.Parameter) else found
        vars(found).update(copy.deepcopy(vars(tensor)))  # torch.save also writes attributes, such as DeepSpeed's ids
        return found.requires_grad_(tensor.requires_grad)

    def _copy(self, original: UntypedStorage) -> UntypedStorage:
        source = torch.empty(0, dtype=torch.uint8, device=original.device).set_(original)
        target = torch.empty(source.shape, dtype=torch.uint8)
        if original.device.type == "cpu":
            target.copy_(source)
        else:
            self._copy_staged(source, target)
        found = target.untyped_storage()
        if (location := torch.serialization.location_tag(original)) != "cpu":
            setattr(found, _COPIED_FROM, location)
        return found

    def _copy_staged(self, source: Tensor, target: Tensor) -> None:
        """Copy from an accelerator through a small page-locked buffer, because copies to other memory are slow.

        Whole copies are not page-locked: torch rounds such memory up to powers of two, and does not return it.
        """
        if self._staged is None:
            self._staged = get_accelerator().pin_memory(torch.empty(_STAGED_BYTES, dtype=torch.uint8))
        for start in range(0, len(source), _STAGED_BYTES):
            part = source[start : start + _STAGED_BYTES]
            staged = self._staged[: len(part)]
            staged.copy_(part)
            target[start : start + len(part)].copy_(staged)


def _original_location(storage: Any) -> str | None:
    """The device that torch.save records for a storage copied from an accelerator; None for any other storage.

    Returns a new string each time, as torch does: of a string that it has written, pickle writes a reference only.
    """
    location = getattr(storage, _COPIED_FROM, None)
    return location and "".join(location)


torch.serialization.register_package(0, _original_location, lambda _storage, _location: None)

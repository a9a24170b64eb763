"""Tensors in safetensors files, found by name and read as fp32, whole or in part."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from t5train.errors import InputError
from t5train.files.os_errors import reason

if TYPE_CHECKING:
    from torch import Tensor

FLOATING = frozenset({"F32", "F16", "BF16"})


class StoredTensor(NamedTuple):
    """A tensor in a file. ``name`` is its name in ``file``, ``dtype`` is safetensors' name of its type."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """List all tensors by name without reading them. Raises InputError for a damaged file or a duplicate name."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _tensors_in(file):
            if tensor.name in found:
                raise InputError(
                    f"{file} and {found[tensor.name].file} both hold the tensor {tensor.name}, so it is unknown which "
                    "one counts. Copy the model again from where you got it"
                )
            found[tensor.name] = tensor
    return found


class StoredTensors:
    """Reads tensors as fp32 on the CPU, by the names in ``places``. Only the requested parts of files are read."""

    def __init__(self, places: Mapping[str, StoredTensor]) -> None:
        self._places = places
        files = {place.file for place in places.values()}
        self._open: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in files}

    def whole(self, name: str) -> "Tensor":
        """Return the tensor of that name. Raises InputError if a number in it is not finite."""
        place = self._place(name)
        tensor: Tensor = self._open[place.file].get_tensor(place.name)
        if not tensor.isfinite().all():
            raise InputError(
                f"{place.file}: {place.name} holds a number that is not finite (NaN or infinite). Choose another model"
            )
        return tensor.float()

    def stretch(self, name: str, start: int, stop: int) -> "Tensor":
        """Return elements ``start`` to ``stop`` of the tensor in row-major order, flat. Reads only the rows needed."""
        place = self._place(name)
        row = prod(place.shape[1:])
        first = start // row
        rows: Tensor = self._open[place.file].get_slice(place.name)[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row].float()

    def _place(self, name: str) -> StoredTensor:
        if name not in self._places:
            files = ", ".join(sorted({str(place.file) for place in self._places.values()}))
            raise InputError(
                f"no file holds the tensor {name} (searched: {files}), so the files belong to another model. Choose "
                "a complete model"
            )
        return self._places[name]


def _tensors_in(file: Path) -> list[StoredTensor]:
    try:
        # To safetensors, a file that it may not open does not exist.
        with open(file, "rb"), safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
            return [
                StoredTensor(file, name, tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
            ]
    except OSError as error:
        raise InputError(f"{file} cannot be read: {reason(error)}") from error
    except SafetensorError as error:
        raise InputError(f"{file} cannot be read as safetensors ({error}). Restore the file") from error

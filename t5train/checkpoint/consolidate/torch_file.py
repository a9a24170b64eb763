"""Find what a torch checkpoint file holds, and where, without reading tensor data or running any of its code.

``torch.load`` onto the meta device unpickles only the structure and records the byte offset of every storage. The
offsets are checked against the zip's directory. ``weights_only`` refuses everything that a hostile pickle could call.
Stubs replace the few classes that DeepSpeed puts into its files and that users commonly put into ``client_state``:
their content is not needed, and none of their code runs.
"""

import errno
import itertools
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from t5train.checkpoint.consolidate.plan import ITEM_BYTES, Extent, Source
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout
from t5train.files.presence import unreadable

TORCH_DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "F32": torch.float32, "I32": torch.int32,
    "U32": torch.uint32, "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""torch's types, by safetensors' names of them."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_LOCAL_HEADER = struct.Struct("<26x2H")
_MOST_RUNS = 1 << 16
_UNNAMED = "archive"  # torch's name for the folder inside an archive that was saved to a stream, not to a path


class _Opaque(tuple[object, ...]):
    """Stands in for an object whose content does not affect the weights; equal to others with the same arguments."""

    def __new__(cls, *arguments: object) -> "_Opaque":
        return super().__new__(cls, arguments)

    def __setstate__(self, _state: object) -> None: ...


_IN_CLIENT_STATES = (
    "argparse.Namespace", "datetime.date", "datetime.datetime", "datetime.timedelta", "pathlib.PosixPath",
    "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
)  # fmt: skip
_SAFE_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Opaque, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Opaque, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Opaque, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Opaque, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Opaque, "builtins.getattr"),  # how Python 3.11.0 to 3.11.3 pickle an enum; the stub looks nothing up
    *((_Opaque, name) for name in _IN_CLIENT_STATES),
]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. ``offset`` is the position of its first element in bytes; ``strides`` count elements."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    def source(self) -> Source:
        """The elements in row-major order. Raises UnknownLayout if they are scattered over too many byte ranges."""
        item = ITEM_BYTES[self.dtype]
        outer, run = self._runs()
        if math.prod(outer) > _MOST_RUNS:
            raise UnknownLayout(
                f"{self.file} holds a tensor of shape {self.shape} with strides {self.strides}, "
                "which is not contiguous: save the checkpoint again with .contiguous() weights"
            )
        extents = []
        for index in itertools.product(*map(range, outer)):
            start = sum(position * stride for position, stride in zip(index, self.strides, strict=False))
            extents.append(Extent(self.file, self.offset + start * item, run * item))
        return Source(self.dtype, tuple(extents) if run else ())

    def _runs(self) -> tuple[tuple[int, ...], int]:
        """The leading dimensions to iterate over, and the number of contiguous elements at each of their indices."""
        run, dimensions = 1, len(self.shape)
        while dimensions and (self.shape[dimensions - 1] in (0, 1) or self.strides[dimensions - 1] == run):
            dimensions -= 1
            run *= self.shape[dimensions]
        return self.shape[:dimensions], run


def read_metadata(file: Path) -> dict[str, Any]:
    """Read the dictionary in a ``.pt`` file, with a StoredTensor in place of every tensor.

    Raises IncompleteCheckpoint if the file is missing, truncated or not a torch checkpoint, ConsolidationError if
    loading it would run code, and UnknownLayout if it does not hold a dictionary of plain values.
    """
    records = _records(file)
    try:
        with torch.serialization.safe_globals(_SAFE_GLOBALS):
            content = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConsolidationError(
            f"{file} is not loaded: it contains objects other than tensors and plain values ({_cause(error)}), and "
            "loading them can run code. If you trust the file, load it with the program that wrote it, remove these "
            "objects from client_state, and save it under the same name"
        ) from error
    except Exception as error:  # a damaged pickle can make torch raise nearly anything
        _require_readable(file, error)
        raise IncompleteCheckpoint(
            f"{file} is not a complete torch checkpoint ({_cause(error)}). Copy the file again, or choose another tag"
        ) from error
    if not isinstance(content, dict):
        raise UnknownLayout(
            f"{file} is not a checkpoint file of DeepSpeed: it holds a {type(content).__name__}, not a dictionary. "
            "Choose another tag"
        )
    located: dict[str, Any] = _located(content, file, records)
    return located


def _require_readable(file: Path, error: Exception) -> None:
    """Raise Unreadable unless the content may have caused the error: a damaged archive may name impossible offsets."""
    if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL, errno.ENOENT}:
        raise unreadable(file, error) from error


def record_checksums(file: Path) -> dict[int, tuple[int, int]]:
    """Size in bytes and CRC-32 of each record of a ``.pt`` file, by the offset of its first byte."""
    with zipfile.ZipFile(file) as archive, open(file, "rb") as data:
        return {
            _data_offset(data.fileno(), entry): (entry.file_size, entry.CRC)
            for entry in archive.infolist()
            if entry.file_size
        }


def content_of(tensor: StoredTensor) -> tuple[Any, ...]:
    """A key that is the same for equal tensors: type, shape, and the record's size and CRC-32. Reads no tensor data.

    A tensor that begins in the middle of a record has no checksum of its own, so its key matches no other tensor.
    """
    record = record_checksums(tensor.file).get(tensor.offset)
    return tensor.dtype, tensor.shape, record or (tensor.file, tensor.offset)


def _records(file: Path) -> dict[int, int]:
    """Sizes of the archive's records by offset. Refuses a damaged, renamed, compressed or big-endian archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            tensors = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/data/\d+", name)]
            skipped = {*compressed, *tensors}
            structure = [entry for entry in archive.infolist() if entry.filename not in skipped]
            read = {entry.filename: archive.read(entry) for entry in structure}  # verifies CRC-32s, unlike torch
            little = all(content == b"little" for name, content in read.items() if name.endswith("/byteorder"))
            folders = {name.split("/", 1)[0] for name in archive.namelist()}
        records = {offset: size for offset, (size, _) in record_checksums(file).items()}
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{file} does not exist. Choose another tag") from None
    except Exception as error:  # damage can make zipfile raise nearly anything
        _require_readable(file, error)
        raise IncompleteCheckpoint(
            f"{file} is truncated or damaged, or not a torch checkpoint ({error}). Copy the file again, or choose "
            "another tag"
        ) from error
    if compressed or not little:
        raise UnknownLayout(
            f"{file} holds compressed or big-endian tensors, which are not supported. Save the checkpoint again with "
            "torch.save on a little-endian machine"
        )
    if not folders <= {file.stem, _UNNAMED}:
        raise IncompleteCheckpoint(
            f"{file} was written under the name {', '.join(sorted(folders))}.pt, so it belongs to another rank or "
            "step; choose another tag"
        )
    return records


def _data_offset(descriptor: int, entry: zipfile.ZipInfo) -> int:
    header = os.pread(descriptor, 30, entry.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return entry.header_offset + len(header) + int(name_bytes) + int(extra_bytes)


def _located(value: Any, file: Path, records: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        return _located_tensor(value, file, records)
    if isinstance(value, dict):
        return {key: _located(item, file, records) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_located(item, file, records) for item in value]
    return value


def _located_tensor(tensor: torch.Tensor, file: Path, records: dict[int, int]) -> StoredTensor:
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise UnknownLayout(
            f"{file} holds a tensor of type {tensor.dtype}, {tensor.layout}: only dense tensors of numbers can be read"
        )
    storage = tensor.untyped_storage()
    start, size = storage._checkpoint_offset, storage.nbytes()
    if size and (start is None or records.get(start) != size):
        raise IncompleteCheckpoint(
            f"{file} is damaged: there are no {size} bytes of tensor data at offset {start}, though a tensor refers to "
            "them. Copy the file again, or choose another tag"
        )
    offset = (start or 0) + int(tensor.storage_offset()) * tensor.element_size()
    return StoredTensor(file, offset, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride())


def _cause(error: Exception) -> str:
    """The first sentence of an error. torch adds advice to load the file unsafely, which is left out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (relevant or lines or [type(error).__name__])[0].split(". Please use ")[0]

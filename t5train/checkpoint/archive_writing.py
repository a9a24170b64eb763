"""What torch.save lacks: checksums at the disk's speed, and errors that name the file and the cause.

torch computes the CRC-32 of every record at 0.5 GB/s, and all ranks would wait for that at every checkpoint; isal is 20
times as fast. So torch writes archives without checksums, and they are filled in afterwards. The result is the same as
torch's: zip stores each checksum in the record's local data descriptor and in the central directory (PKWARE's APPNOTE
6.3.9, sections 4.3.9 and 4.3.12).
"""

import mmap
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from zipfile import BadZipFile, ZipFile, ZipInfo

import torch
from isal.isal_zlib import crc32

from t5train.errors import DiskFailed, StorageError
from t5train.files.atomic import try_writing
from t5train.files.os_errors import naming

_LENGTHS = Struct("<HH")  # of name and extra field
_LOCAL_BYTES, _LOCAL_LENGTHS_AT = 30, 26
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL = b"PK\x01\x02"
_CENTRAL_BYTES, _CENTRAL_CHECKSUM_AT, _CENTRAL_LENGTHS = 46, 16, Struct("<28xHHH")
_CHECKSUM = Struct("<I")


@contextmanager
def no_checksums() -> Iterator[None]:
    """Make torch.save leave every CRC-32 at 0 within the block."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def fill_in(path: Path) -> None:
    """Write the CRC-32 of each record into a torch archive. Raises StorageError if the file is not one."""
    try:
        with naming(path), open(path, "r+b") as file, ZipFile(file) as archive:
            _fill_in_all(path, file.fileno(), archive)
    except BadZipFile as error:
        raise StorageError(
            f"{path} was just written, but is not a zip archive as torch.save writes ({error}). Check `dmesg` for disk "
            "errors, then start again"
        ) from error


def _fill_in_all(path: Path, file: int, archive: ZipFile) -> None:
    """Fill in all records. Reads use a memory map, but writes use pwrite: a full disk raises OSError, not SIGBUS."""
    with mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as data:
        entry_offset = archive.start_dir
        for entry in archive.infolist():
            if entry.file_size:  # the CRC-32 of an empty record is 0, and torch writes no descriptor for it
                _fill_in(path, file, data, entry, entry_offset)
            entry_offset += _CENTRAL_BYTES + sum(_CENTRAL_LENGTHS.unpack_from(data, entry_offset))


def _fill_in(path: Path, file: int, data: mmap.mmap, entry: ZipInfo, entry_offset: int) -> None:
    """Fill in one record, whose central directory entry is at ``entry_offset``."""
    start = _start_of_data(data, entry)
    descriptor = start + entry.file_size
    if data[descriptor : descriptor + 4] != _DESCRIPTOR or data[entry_offset : entry_offset + 4] != _CENTRAL:
        raise StorageError(
            f"{path} cannot be given checksums, because it lacks the field for the checksum of {entry.filename}. "
            f"Probably torch {torch.__version__} is not supported: install a version in the range of pyproject.toml"
        )
    with memoryview(data)[start:descriptor] as record:
        checksum = _CHECKSUM.pack(crc32(record))
    os.pwrite(file, checksum, descriptor + len(_DESCRIPTOR))
    os.pwrite(file, checksum, entry_offset + _CENTRAL_CHECKSUM_AT)


def _start_of_data(data: mmap.mmap, entry: ZipInfo) -> int:
    name_bytes, extra_bytes = _LENGTHS.unpack_from(data, entry.header_offset + _LOCAL_LENGTHS_AT)
    return entry.header_offset + _LOCAL_BYTES + int(name_bytes) + int(extra_bytes)


_WRITER = "inline_container.cc"
_TORCH = f"torch{os.sep}serialization.py"
_PROBE_BYTES = 1 << 20


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """If torch fails to write to ``folder`` within the block, raise an OSError with the path and the reason.

    If torch's error hides the reason, a test file is written there to find it. Raises DiskFailed if that succeeds.
    """
    try:
        with naming(folder):
            yield
    except RuntimeError as error:
        if _WRITER not in str(error) and not _is_raised_by_serialization(error):
            raise
        try:
            try_writing(folder, _PROBE_BYTES)
        except OSError as reason:
            raise OSError(reason.errno, reason.strerror, str(folder)) from error
        said = str(error).splitlines()[0]
        raise DiskFailed(
            f"{folder}: torch could not write a checkpoint file ({said}), but the folder can be written now. "
            "Check `dmesg` for disk errors"
        ) from error


def _is_raised_by_serialization(error: RuntimeError) -> bool:
    """Whether torch's archive writer raised the error. Its C++ code has no frame in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith(_TORCH)

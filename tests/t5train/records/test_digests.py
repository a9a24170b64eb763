"""The digest made from the digests of a file's pieces covers every byte of the file."""

import hashlib
import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from t5train.records.digests import SafetensorsDigest, digest_safetensors, digest_safetensors_stream

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.int64), "none": np.zeros(0)}
FILE = save(TENSORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


def digest_of(content: bytes, folder: Path) -> SafetensorsDigest:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)  # to replace the content of a file takes longer: some file systems write it to disk
    path.write_bytes(content)
    return digest_safetensors(path)


def test_the_digest_is_the_sha256_of_the_sha256s_of_the_header_and_each_tensor(tmp_path: Path) -> None:
    content = save({"one": TENSORS["b"]})
    joined = b"".join(hashlib.sha256(piece).digest() for piece in (content[:-24], content[-24:]))
    expected = SafetensorsDigest(size=len(content), pieces_sha256=hashlib.sha256(joined).hexdigest())
    assert digest_of(content, tmp_path) == expected


def test_flipping_any_bit_changes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILE)
    whole = digest_safetensors(path)
    with open(path, "r+b") as file:
        for position, byte in enumerate(FILE):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                assert digest_safetensors(path) != whole, (position, bit)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert digest_safetensors(path) == whole


@given(size=st.integers(0, len(FILE) - 1), appended=st.binary(min_size=1, max_size=40))
def test_a_truncated_or_extended_file_has_another_digest(folder: Path, size: int, appended: bytes) -> None:
    whole = digest_of(FILE, folder)
    assert digest_of(FILE[:size], folder) != whole
    assert digest_of(FILE + appended, folder) != whole


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [6, 8]}},
        {"a": {"data_offsets": [0, 12]}, "b": {"data_offsets": [12, 8]}},
        {"a": {"data_offsets": [0, 8.0]}},
        {"a": {"data_offsets": ["0", "8"]}},
        {"a": 8},
        ["a"],
        8,
    ],
)
def test_a_file_whose_header_does_not_cover_every_byte_is_digested_as_one_piece(
    tmp_path: Path, entries: object
) -> None:
    head = json.dumps(entries).encode()
    content = struct.pack("<Q", len(head)) + head + bytes(8)
    assert digest_of(content, tmp_path) == SafetensorsDigest.joined(len(content), [hashlib.sha256(content).digest()])


def test_a_stream_has_the_digest_of_the_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "model.safetensors", list[int]()
    save_file({**TENSORS, "long": np.ones(3_000_000, np.uint8)}, path)
    assert digest_safetensors_stream(io.BytesIO(path.read_bytes()), seen.append) == digest_safetensors(path)
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size

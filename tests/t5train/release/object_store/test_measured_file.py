"""Parts of files as bodies of requests, and the CRCs that they must have."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.errors import DigestMismatch
from t5train.progress import silent
from t5train.records.digests import digest_file
from t5train.release.object_store.bucket import crc_of
from t5train.release.object_store.measured_file import BLOCK_BYTES, FileBody, measure

SIZE = 3 * BLOCK_BYTES + 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def sent(body: FileBody) -> bytes:
    """What botocore would send."""
    return b"".join(iter(lambda: bytes(body.read(16_384)), b""))


@pytest.mark.parametrize(
    ("start", "size"),
    [(0, SIZE), (0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, BLOCK_BYTES + 5), (0, 0)],
)
def test_a_part_is_sent_as_it_was_measured_and_again_after_an_error(path: Path, start: int, size: int) -> None:
    content = path.read_bytes()
    crc = measure(path.parent, {"file": digest_file(path)}, silent)["file"].crc_of(start, size)
    assert crc == crc_of(content[start : start + size])
    counted: list[int] = []
    with FileBody.opened(path, start, size, crc, counted.append) as body:
        body.read()
        body.seek(0)
        assert (body.tell(), len(body)) == (0, size)
        assert sent(body) == content[start : start + size]
        assert body.tell() == size
    assert sum(counted) == size, "what was sent again is counted once"


def send(path: Path, crc: int, request: Callable[[FileBody], None]) -> None:
    with FileBody.opened(path, 0, SIZE, crc, lambda _: None) as body:
        request(body)


def cut(path: Path) -> None:
    os.truncate(path, BLOCK_BYTES + 1)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"changed")


@pytest.mark.parametrize("alter", [cut, change])
def test_a_file_that_is_changed_while_it_is_sent_keeps_its_size_and_is_refused(
    path: Path, alter: Callable[[Path], None]
) -> None:
    crc = crc_of(path.read_bytes())

    def refuse(body: FileBody) -> None:
        alter(path)
        assert len(sent(body)) == SIZE
        raise OSError("what the server answers does not hide the cause")

    with pytest.raises(DigestMismatch, match="file was changed while it was sent"):
        send(path, crc, refuse)


def test_a_file_that_cannot_be_read_keeps_its_size_and_the_error_is_raised(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    def zeros(body: FileBody) -> None:
        assert sent(body) == bytes(SIZE)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        send(path, 0, zeros)
    assert caught.value.filename == str(path)

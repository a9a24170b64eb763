"""``fill_in`` writes the same CRC-32s as torch."""

import os
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t5train.checkpoint.archive_writing import fill_in, no_checksums
from t5train.errors import StorageError

SERIALIZATION_ID = "archive/.data/serialization_id"  # derived from the checksums; nothing reads it


def checksums(path: Path) -> dict[str, int]:
    with ZipFile(path) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if entry.filename != SERIALIZATION_ID}


@given(sizes=st.lists(st.integers(0, 3000), max_size=5), text=st.text(max_size=50))
def test_checksums_equal_those_that_torch_writes_and_match_the_content(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], text: str
) -> None:
    folder = tmp_path_factory.mktemp("archives")
    tensors = [torch.arange(size, dtype=torch.bfloat16) for size in sizes]
    state = {"tensors": tensors, "text": text}
    theirs, ours = folder / "theirs" / "archive.pt", folder / "ours" / "archive.pt"  # archives store their name
    for path in (theirs, ours):
        path.parent.mkdir()
    torch.save(state, theirs)
    with no_checksums():
        torch.save(state, ours)
    assert set(checksums(ours).values()) == {0}
    fill_in(ours)
    assert checksums(ours) == checksums(theirs)
    with ZipFile(ours) as archive:
        assert archive.testzip() is None
    assert ours.stat().st_size == theirs.stat().st_size
    loaded = torch.load(ours, weights_only=True)
    assert loaded["text"] == text
    assert all(torch.equal(one, other) for one, other in zip(loaded["tensors"], tensors, strict=True))


def test_torch_computes_checksums_again_after_a_failed_save() -> None:
    with pytest.raises(OSError, match="full"), no_checksums():
        raise OSError("the disk is full")
    assert torch.serialization.get_crc32_options()


def test_an_archive_not_written_by_torch_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("name", b"content")
    before = (tmp_path / "other.pt").read_bytes()
    with pytest.raises(StorageError, match=r"other\.pt cannot be given checksums, .* lacks .* checksum of name\."):
        fill_in(tmp_path / "other.pt")
    assert (tmp_path / "other.pt").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_a_file_that_is_not_an_archive_is_refused_by_name_and_left_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"state\.pt was just written, but is not .* \(File is not a zip file\)"):
        fill_in(path)
    assert path.read_bytes() == content


def test_a_full_disk_raises_an_error_instead_of_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("No space left on device")

    torch.save({"tensor": torch.ones(3)}, tmp_path / "state.pt")
    monkeypatch.setattr(os, "pwrite", full)  # writing through a memory map would raise SIGBUS
    with pytest.raises(OSError, match="No space left"):
        fill_in(tmp_path / "state.pt")

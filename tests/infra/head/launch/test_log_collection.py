import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from infra.head.launch import log_collection
from infra.head.launch.log_collection import unpack


def packed(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("rank-00007.log")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


def test_a_host_cannot_write_the_logs_of_other_hosts_ranks(tmp_path: Path) -> None:
    names = [f"rank-0000{rank}.log" for rank in (1, 2, 4)] + ["../rank-00003.log", "/rank-00003.log", "spec.json"]
    unpack(packed(**dict.fromkeys(names, "x")), tmp_path, range(2, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00002.log"]


def test_an_archive_that_unpacks_to_too_many_bytes_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_collection, "_MOST_BYTES_OF_A_RANK", 1 << 20)
    archive = packed(**{"rank-00000.log": "x" * (64 << 20)})
    tracemalloc.start()
    try:
        with pytest.raises(tarfile.TarError, match="more than 2 MiB"):
            unpack(archive, tmp_path, range(2))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert not list(tmp_path.iterdir())


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        unpack(packed(**{"rank-00000.log": "x" * 10_000})[:-20], tmp_path, range(1))

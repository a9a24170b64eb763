import io
import tarfile
from pathlib import Path

import pytest

from infra.cluster.gathering import unpack


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


def test_only_files_of_ranks_leave_an_archive(tmp_path: Path) -> None:
    files = {"rank-00000.log": "x", "../rank-00001.log": "x", "/rank-00001.log": "x", "spec.json": "x"}
    unpack(packed(**files), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.log"]


def test_an_archive_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        unpack(packed(**{"rank-00000.log": "x" * 10_000})[:-20], tmp_path)

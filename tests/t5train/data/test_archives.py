"""Texts are read out of archives: whole, each once, and never from one that is damaged."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.sources import require_source
from t5train.errors import InputError
from t5train.spec import CorpusSpec

pytestmark = pytest.mark.usefixtures("quick_workers")


def tar_of(texts: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def test_an_archive_is_read_by_one_thread(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = {f"{name}.txt": rng.randbytes(2_000_000).hex().encode() for name in "xyz"}
    (tmp_path / "a.tar").write_bytes(tar_of(texts))
    root = tmp_path / "root"
    build_corpus(CorpusSpec(source=f"tar://*.txt::{tmp_path}/a.tar", workers=1), root)
    for name, content in texts.items():
        (downloaded,) = (root / "cache").rglob(name)
        assert downloaded.read_bytes() == content


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        *(("tar", bytes), ("tar.gz", gzip.compress), ("tar.xz", lzma.compress)),
        *(("tgz", gzip.compress), ("tbz2", bz2.compress), ("txz", lzma.compress)),
    ],
)
def test_an_archive_is_read_to_its_end_or_refused(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    whole, place = tar_of({f"{name}.txt": b"a text\n" * 100 for name in "xyz"}), tmp_path / f"a.{suffix}"
    header = 2 * (512 + 1024)
    damaged = whole[:header] + b"?" + whole[header + 1 :]
    refused = [(compress(each), r"\.tar archive cannot be read to its end: byte \d") for each in (damaged, whole * 2)]
    refused.append((compress(whole[: header + 100]), r"\.tar archive cannot be read to its end: byte \d"))
    refused.append((compress(whole[:header]), r"archive ends at byte 3,072, without the block of zeros"))
    if compress is not bytes:
        refused.append((compress(whole)[:-9], r"cannot be decompressed: .*\. If the file is damaged, fetch"))
    for content, said in refused:
        place.write_bytes(content)
        with pytest.raises(InputError, match=said):
            require_source(f"tar://*.txt::{place}")
    place.write_bytes(compress(whole))
    assert require_source(f"tar://*.txt::{place}").sizes == {f"{name}.txt": 700 for name in "xyz"}


@pytest.mark.parametrize("wanted", ["", "**/*.txt"])
def test_links_in_an_archive_are_no_further_texts(tmp_path: Path, wanted: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        (tmp_path / "b.txt").write_text("one\n")
        archive.add(tmp_path / "b.txt", "./deep/b.txt")
        for name, kind, target in (
            ("a.txt", tarfile.SYMTYPE, "deep/b.txt"),
            ("c.txt", tarfile.LNKTYPE, "deep/b.txt"),
            ("deep/d.txt", tarfile.SYMTYPE, "../a.txt"),
            ("e.txt", tarfile.SYMTYPE, "deep/notes.md"),
            ("f.txt", tarfile.SYMTYPE, "deep/notes.md"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        archive.add(tmp_path / "b.txt", "deep/notes.md")
    found = require_source(f"tar://{wanted}::{tmp_path}/a.tar")
    assert [*found.sizes] == ["deep/b.txt", "e.txt"]
    assert found.left_out.copies == ["a.txt", "c.txt", "deep/d.txt", "f.txt"]

"""Pairs are read from every catalogue that can be read; the others are named and left out."""

import struct
from pathlib import Path

import pytest

from benchmarks.technical_pairs import Pair, catalogue_pairs

_HEADER = b"Content-Type: text/plain; charset=%s\n"


def _catalogue(charset: bytes) -> bytes:
    """Return a catalogue in GNU's format: a header, and one message."""
    texts = (b"", b"two words", _HEADER % charset, b"zwei W\xc3\xb6rter")  # messages, then their translations
    first, tables, texts_at = struct.pack("<7I", 0x950412DE, 0, 2, 28, 44, 0, 0), b"", 60
    for text in texts:
        tables += struct.pack("<2I", len(text), texts_at)
        texts_at += len(text) + 1
    return first + tables + b"".join(text + b"\0" for text in texts)


@pytest.mark.parametrize("damaged", [_catalogue(b"CHARSET"), _catalogue(b"ascii"), _catalogue(b"utf-8")[:30], b""])
def test_a_catalogue_that_cannot_be_read_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bytes
) -> None:
    for package, content in (("first", damaged), ("second", _catalogue(b"utf-8"))):
        folder = tmp_path / package / "usr/share/locale/de/LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / f"{package}.mo").write_bytes(content)

    assert list(catalogue_pairs(tmp_path, "de")) == [Pair("two words", "zwei Wörter", "second")]
    assert "first.mo is left out" in capsys.readouterr().err

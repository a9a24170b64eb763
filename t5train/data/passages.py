"""What text is made of here: files, their rows, and the passages in them."""

from pathlib import Path
from typing import NamedTuple


class SourceFile(NamedTuple):
    """A file of passages; ``name`` stands for it in ids and fingerprints, wherever it lies."""

    path: Path
    name: str


class Passage(NamedTuple):
    """A document: what is split, tokenised and closed with EOS as one."""

    id: str
    title: str
    text: str


class Row(NamedTuple):
    """A passage (its text may be empty) and where it lies: row number and byte offset (0 in .parquet)."""

    number: int
    offset: int
    passage: Passage

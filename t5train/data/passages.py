"""Source files, rows and passages of text. A document's id decides its split (train, validation or test)."""

from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

READ_COLUMNS = ("id", "text", "title")
"""The columns of .tsv and .parquet files that are read."""


class SourceFile(NamedTuple):
    """A file of passages; ``name`` identifies it in ids and fingerprints, independently of its path."""

    path: Path
    name: str


class Passage(NamedTuple):
    """A document. It belongs to one split and is tokenised as a whole; its ids end with EOS."""

    id: str
    title: str
    text: str


class Row(NamedTuple):
    """A passage (its text may be empty) and its position: row number and byte offset (0 in .parquet)."""

    number: int
    offset: int
    passage: Passage


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SplitRule(Protocol):
    """The settings that decide the split of a document. CorpusSpec has them."""

    @property
    def split(self) -> tuple[int, int, int]:
        """Thousandths of the documents for train, validation and test."""

    @property
    def split_seed(self) -> int:
        """Seed of the hash that assigns documents to splits."""


def split_of(rule: SplitRule, document_id: str) -> Split:
    """Return the split of a document. A hash of (split_seed, id) is compared with the thousandths of ``rule.split``."""
    digest = blake2b(f"{rule.split_seed}\n{document_id}".encode(), digest_size=8).digest()
    thousandth = int.from_bytes(digest, "little") % 1000
    train, validation, _ = rule.split
    if thousandth < train:
        return "train"
    return "validation" if thousandth < train + validation else "test"

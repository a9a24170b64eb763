"""Text as files, rows and passages, and the split of each document (train, validation or test), decided by its id."""

from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class SourceFile(NamedTuple):
    """A file of passages; ``name`` identifies it in ids and fingerprints, independently of its path."""

    path: Path
    name: str


class Passage(NamedTuple):
    """A document: it belongs to one split, is tokenised as a whole, and ends with EOS."""

    id: str
    title: str
    text: str


class Row(NamedTuple):
    """A passage (its text may be empty) and where it lies: row number and byte offset (0 in .parquet)."""

    number: int
    offset: int
    passage: Passage


Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SplitRule(Protocol):
    """What decides the split of a document; a CorpusSpec is one."""

    @property
    def split(self) -> tuple[int, int, int]:
        """Thousandths of the documents for train, validation and test."""

    @property
    def split_seed(self) -> int:
        """Another seed gives other documents to each split."""


def split_of(rule: SplitRule, document_id: str) -> Split:
    """The split of a document: a hash of (split_seed, id) against the thousandths of ``rule.split``."""
    digest = blake2b(f"{rule.split_seed}\n{document_id}".encode(), digest_size=8).digest()
    thousandth = int.from_bytes(digest, "little") % 1000
    train, validation, _ = rule.split
    if thousandth < train:
        return "train"
    return "validation" if thousandth < train + validation else "test"

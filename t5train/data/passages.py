"""Source files, rows and passages of text. A document's id decides its split (train, validation or test)."""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np

ODDITIES = {
    "control_characters": "control characters other than tab and line ends",
    "replacement_characters": "U+FFFD, which replaced what could not be decoded",
    "special_pieces": "</s>, <pad>, <unk> or <extra_id_N> as plain text, which tokenising keeps as plain text",
}
"""What may be wrong with a text, with an explanation."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SPECIAL = re.compile("</s>|<pad>|<unk>|<extra_id_[0-9]+>")
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


class SplitSettings(NamedTuple):
    """The rule in a form that a worker can make of its job, without pydantic, which is slow to import."""

    split: tuple[int, int, int]
    split_seed: int


def in_batches(passages: Iterable[Passage], characters: int = 256 << 10) -> Iterator[list[Passage]]:
    """Yield the passages in order, in lists that have about as many characters of text."""
    batch: list[Passage] = []
    filled = 0
    for passage in passages:
        batch.append(passage)
        filled += len(passage.text)
        if filled >= characters:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


class TextCounts:
    """Counts of what may be wrong with texts, and of their lengths."""

    def __init__(self) -> None:
        self.odd = Counter[str](dict.fromkeys(ODDITIES, 0))
        """How many texts have each of ``ODDITIES``."""
        self.lengths = Counter[int]()
        """How many texts have a size in UTF-8 of n bits: 2**(n-1) to before 2**n bytes."""

    def add(self, text: str, size_bytes: int) -> None:
        """Count a text."""
        self.lengths[size_bytes.bit_length()] += 1
        if not text.isprintable() and _CONTROL.search(text):  # the first is much faster
            self.odd["control_characters"] += 1
        if "\ufffd" in text:
            self.odd["replacement_characters"] += 1
        if "<" in text and _SPECIAL.search(text):
            self.odd["special_pieces"] += 1


class TextDigests:
    """The 64-bit digests of texts, to count those that occur more than once.

    Of more than ``MOST`` texts, only those are kept whose digest is a multiple of a power of two: the same ones
    wherever a text occurs. The count is an estimate then.
    """

    MOST = 4 << 20

    def __init__(self, digests: Iterable[int] = (), step: int = 1) -> None:
        self._digests, self._step = array("Q", digests), step

    def add(self, text: str) -> None:
        """Add a text. White space at its ends does not count."""
        digest = int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest(), "little")
        if digest % self._step == 0:
            self._digests.append(digest)
            self._thin()

    def write(self, path: Path) -> int:
        """Write the digests to a file, and return the power of two that they are multiples of."""
        path.write_bytes(self._digests.tobytes())
        return self._step

    @classmethod
    def joined(cls, parts: Iterable[tuple[Path, int]]) -> Self:
        """Read what ``write`` wrote to several files."""
        found = cls()
        for path, step in parts:
            found._digests.frombytes(path.read_bytes())
            found._keep_multiples_of(max(found._step, step))
            found._thin()
        return found

    def repeated(self) -> int:
        """Return about how many texts are not the first of their kind; exactly if no digest was left out."""
        digests = np.frombuffer(self._digests, dtype=np.uint64)
        return int(len(digests) - len(np.unique(digests))) * self._step

    def _thin(self) -> None:
        while len(self._digests) > self.MOST:
            self._keep_multiples_of(2 * self._step)

    def _keep_multiples_of(self, step: int) -> None:
        digests = np.frombuffer(self._digests, dtype=np.uint64)
        self._step, self._digests = step, array("Q", digests[digests % np.uint64(step) == 0].tobytes())

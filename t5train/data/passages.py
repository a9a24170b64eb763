"""Source files, rows and passages of text. A document's id decides its split (train, validation or test)."""

import logging
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from math import isfinite, isnan
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from t5train.errors import InputError, printable
from t5train.quantities import quantity


class Oddity(NamedTuple):
    """What may be wrong with a text."""

    pattern: re.Pattern[bytes]
    """Of it in UTF-8."""
    explanation: str


ODDITIES = {
    "control_characters": Oddity(
        re.compile(b"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x84\x86-\x9f]"),
        "control characters other than tab and line ends",
    ),
    "replacement_characters": Oddity(re.compile("\ufffd".encode()), "U+FFFD, which replaced what could not be decoded"),
    "special_pieces": Oddity(
        re.compile(b"</s>|<pad>|<unk>|<extra_id_[0-9]+>"),
        "</s>, <pad>, <unk> or <extra_id_N> as plain text, which tokenising keeps as plain text",
    ),
}
_MANY_PASSAGES, _FEW_HELD_OUT = 10, 3
"""If an id has so many passages on average, and fewer ids than this are expected in validation, a warning says so."""
_log = logging.getLogger(__name__)
READ_COLUMNS = ("id", "text", "title")
"""The columns of .tsv, .csv and .parquet files that are read."""


class SourceFile(NamedTuple):
    """A file of passages; ``name`` identifies it in ids and fingerprints, independently of its path."""

    path: Path
    name: str
    part: int = 0
    """Which of the texts of a mixture the file belongs to; 0 is ``corpus.source``."""

    @property
    def shown(self) -> str:
        """The path as errors show it."""
        return printable(str(self.path))


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


class SkippedRow(Row):
    """The row of a page of a dump that cannot be parsed. Its text is empty."""

    reason: str
    """Which page it is, and why."""

    @classmethod
    def of(cls, number: int, passage: Passage, reason: str) -> Self:
        """Return the row of a passage without text."""
        row = cls(number, 0, passage)
        row.reason = reason
        return row


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def nonblank_bytes(text: str) -> int:
    """Return the size of a text in UTF-8, 0 if it is only white space."""
    return text_bytes(text) if text.strip() else 0


class IdSequence:
    """Compares ids with 1, 2, 3 ... or another stretch of whole numbers."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The id of the first row."""
        self.broken: tuple[int, str] | None = None
        """Number and id of the first row whose id does not follow that of the row before it."""
        self._next: int | None = None

    def add(self, row: Row) -> None:
        """Add the next row."""
        if self.broken is not None:
            return
        if self._next is None and re.fullmatch("[0-9]{1,18}", row.passage.id):
            self._next = self.first = int(row.passage.id)
        if row.passage.id != str(self._next):
            self.broken = (row.number, row.passage.id)
        elif self._next is not None:
            self._next += 1


ID_RULE = 2
"""Incremented when ``id_at`` or a reader spells ids differently: they decide the splits. 1 kept 1.0 as it is."""


def id_at(found: object, source: SourceFile, row: int) -> str:
    """Return the id of a row: its place if it has none, because one id would put every such row into one split.

    A whole number has one spelling, whatever its type: 1.0 is "1", as 1 is. Text stays as it is: "01" is not "1".
    """
    name = _spelled(found)
    return name if name.strip() else f"{source.name}:{row}"


def title_of(found: object) -> str:
    """Return a title as text; empty for null and for NaN."""
    return str(found) if found and not _is_nan(found) else ""


def _is_nan(found: object) -> bool:
    return isinstance(found, float | np.floating | Decimal) and isnan(found)


def _spelled(found: object) -> str:
    """Return an id as text; empty for null and for NaN, which usually stands for a missing id in a column of floats."""
    if found is None or _is_nan(found):
        return ""
    if isinstance(found, bytes):  # a column of text that the program that wrote it did not mark as text
        return found.decode(errors="backslashreplace")
    if isinstance(found, float | np.floating | Decimal) and isfinite(found) and found == int(found):
        return str(int(found))
    return str(found)


class IdRows(NamedTuple):
    """The passages of a file that have the same id: how many there are, and the first and last row."""

    passages: int
    first: int
    last: int


class FewIds:
    """The ids of a file, as long as they are few."""

    MOST = 1000

    def __init__(self) -> None:
        self.found: dict[str, IdRows] | None = {}
        """None if there are more than ``MOST``."""

    def add(self, row: Row) -> None:
        """Add the next passage."""
        if self.found is None:
            return
        before = self.found.get(row.passage.id, IdRows(0, row.number, row.number))
        self.found[row.passage.id] = IdRows(before.passages + 1, before.first, row.number)
        if len(self.found) > self.MOST:
            self.found = None


class Skipped:
    """The pages of a text that cannot be parsed."""

    NAMED = 20

    def __init__(self) -> None:
        self.pages = 0
        self.first = list[str]()
        """The first ``NAMED`` of them, and why."""

    def add(self, row: Row) -> None:
        """Add the next row."""
        if isinstance(row, SkippedRow):
            self.pages += 1
            if len(self.first) < self.NAMED:
                self.first.append(row.reason)


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


class IdsOfFile(NamedTuple):
    """The ids of a file that has few different ones."""

    file: SourceFile
    ids: Mapping[str, IdRows] | None
    """None if there are many."""


def require_documents(rule: SplitRule, files: Iterable[IdsOfFile]) -> None:
    """Raise InputError if ids repeat so much that no passage falls into the train or validation split."""
    passages = Counter[str]()
    most = (0, "")
    for file, ids in files:
        if ids is None:
            return
        for name, rows in ids.items():
            passages[name] += rows.passages
            where = f"{file.path}, rows {rows.first} to {rows.last}: {rows.passages:,} passages have the id {name!r}"
            most = max(most, (rows.passages, where))
    if not passages or passages.total() < _MANY_PASSAGES * len(passages):
        return  # it is not for its ids that a split is empty
    splits = Counter[Split]()
    for name, number in passages.items():
        splits[split_of(rule, name)] += number
    few = (
        f"All {quantity(passages.total(), 'passage')} of the text have {quantity(len(passages), 'different id')}, and "
        "the id decides the split, so that passages of a document stay together"
    )
    for split in SPLITS[:2]:
        if not splits[split]:
            raise InputError(
                f"{most[1]}. {few}: none falls into the {split} split (corpus.split). Give each document an id of its "
                "own, or leave ids out: then each passage is a document"
            )
    expected = len(passages) * rule.split[1] / 1000
    if expected < _FEW_HELD_OUT:
        shares = ", ".join(f"{split} {splits[split] / passages.total():.1%}" for split in SPLITS)
        _log.warning("%s. %s: so the shares of passages are %s", most[1], few, shares)


class SplitSettings(NamedTuple):
    """The rule in a form that a worker can make of its job, without pydantic, which is slow to import."""

    split: tuple[int, int, int]
    split_seed: int


def in_batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    """Yield the passages in order, in lists that have about 256 Ki characters of text."""
    batch: list[Passage] = []
    filled = 0
    for passage in passages:
        batch.append(passage)
        filled += len(passage.text)
        if filled >= 256 << 10:
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
        """How many texts have a size of n bits: 2**(n-1) to before 2**n bytes."""

    def add(self, texts: Sequence[bytes]) -> None:
        """Count texts in UTF-8. They are looked at one by one only if all of them together may have something odd."""
        joined = b" ".join(texts)
        for name, may_have in _MAY_HAVE.items():
            if may_have(joined):
                self.odd[name] += sum(ODDITIES[name].pattern.search(text) is not None for text in texts)
        self.lengths.update(map(int.bit_length, map(len, texts)))


_HIGH_CONTROL = re.compile(b"\xc2[\x80-\x84\x86-\x9f]")


def _may_have_control_characters(text: bytes) -> bool:
    """Whether a text has control characters, in less time than the pattern takes."""
    below_space = int(np.count_nonzero(np.frombuffer(text, np.uint8) < ord(" ")))
    has_low = below_space and below_space != sum(map(text.count, (b"\n", b"\t", b"\r")))
    return bool(has_low) or b"\x7f" in text or (b"\xc2" in text and _HIGH_CONTROL.search(text) is not None)


_MAY_HAVE: dict[str, Callable[[bytes], bool]] = {
    "control_characters": _may_have_control_characters,
    "replacement_characters": lambda text: b"\xef" in text and "\ufffd".encode() in text,
    "special_pieces": lambda text: b"<" in text and ODDITIES["special_pieces"].pattern.search(text) is not None,
}


_DIGEST_BYTES = 8
_DIGESTS_AT_ONCE = 1 << 17


def _multiples(digests: np.ndarray, power_of_two: int) -> np.ndarray:
    kept: np.ndarray = digests[digests & np.uint64(power_of_two - 1) == 0]
    return kept


class TextDigests:
    """The 64-bit digests of texts, to count those that occur more than once.

    Of more than ``MOST`` texts, only those are kept whose digest is a multiple of a power of two: the same ones
    wherever a text occurs. The count is an estimate then.
    """

    MOST = 4 << 20

    def __init__(self, digests: Iterable[int] = (), step: int = 1) -> None:
        self._digests, self._step = array("Q", digests), step

    def add(self, texts: Iterable[bytes]) -> None:
        """Add texts in UTF-8, without white space at their ends."""
        digests = map(xxh3_64_intdigest, texts)
        self._digests.extend(digests if self._step == 1 else (each for each in digests if each % self._step == 0))
        self._thin()

    def write(self, path: Path) -> int:
        """Write the digests to a file, and return the power of two that they are multiples of."""
        path.write_bytes(self._digests.tobytes())
        return self._step

    @classmethod
    def joined(cls, written: Iterable[tuple[Path, int]]) -> Self:
        """Read what ``write`` wrote to several files."""
        found = cls()
        for path, step in written:
            if step > found._step:
                found._keep_multiples_of(step)
            with path.open("rb") as file:
                while some := file.read(_DIGEST_BYTES * _DIGESTS_AT_ONCE):
                    found._digests.frombytes(_multiples(np.frombuffer(some, np.uint64), found._step).tobytes())
                    found._thin()
        return found

    def repeated(self) -> int:
        """Return about how many texts are not the first of their kind; exactly if no digest was left out."""
        digests = np.frombuffer(self._digests, dtype=np.uint64)
        digests.sort()  # in place: a copy of the most that are kept would be 32 MiB
        return int(np.count_nonzero(digests[1:] == digests[:-1])) * self._step

    def _thin(self) -> None:
        while len(self._digests) > self.MOST:
            self._keep_multiples_of(2 * self._step)

    def _keep_multiples_of(self, step: int) -> None:
        kept = _multiples(np.frombuffer(self._digests, dtype=np.uint64), step)
        np.frombuffer(self._digests, dtype=np.uint64)[: len(kept)] = kept
        del self._digests[len(kept) :]
        self._step = step

"""Which documents train, which validate, which test: decided by each document's id alone."""

from hashlib import blake2b
from typing import Literal, Protocol

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SplitRule(Protocol):
    """What decides; a CorpusSpec is one."""

    @property
    def split(self) -> tuple[int, int, int]:
        """Thousandths that train, validate and test."""

    @property
    def split_seed(self) -> int:
        """Another one gives other documents to each split."""


def split_of(rule: SplitRule, document_id: str) -> Split:
    """The split of a document: a hash of (split_seed, id) against the thousandths of ``rule.split``."""
    digest = blake2b(f"{rule.split_seed}\n{document_id}".encode(), digest_size=8).digest()
    thousandth = int.from_bytes(digest, "little") % 1000
    train, validation, _ = rule.split
    if thousandth < train:
        return "train"
    return "validation" if thousandth < train + validation else "test"

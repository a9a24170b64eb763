"""Which documents train, which validate, which test: decided by each document's id alone."""

from hashlib import blake2b
from typing import Literal

from t5train.spec import CorpusSpec

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def split_of(spec: CorpusSpec, document_id: str) -> Split:
    """The split of a document: a hash of (split_seed, id) against the thousandths of ``spec.split``."""
    digest = blake2b(f"{spec.split_seed}\n{document_id}".encode(), digest_size=8).digest()
    thousandth = int.from_bytes(digest, "little") % 1000
    train, validation, _ = spec.split
    if thousandth < train:
        return "train"
    return "validation" if thousandth < train + validation else "test"

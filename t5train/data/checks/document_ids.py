"""Whether a text has enough different ids to be split: the id of a passage decides its split."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from t5train.data.passages import SPLITS, IdRows, SourceFile, Split, SplitRule, split_of
from t5train.errors import InputError
from t5train.quantities import quantity

_MANY_PASSAGES, _FEW_HELD_OUT = 10, 3
"""If an id has so many passages on average, and fewer ids than this are expected in validation, a warning says so."""
_log = logging.getLogger(__name__)


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

"""Tied modules of a pipeline of which not all is tied.

``TiedLayerSpec(..., tied_weight_attr=["word.weight"])`` ties one parameter of a module and gives each of its stages the
others too, say position embeddings. The stage that does not use them never moves them, so that they stay what they were
in the beginning; there the second moments, which sum squares of gradients, are all zero.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from t5train.consolidate.masters import Master, ParameterGroup
from t5train.consolidate.plan import Source
from t5train.consolidate.reading import repeated_element
from t5train.errors import UnknownLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Moved:
    """A parameter group without the parameters ``left_out``."""

    group: ParameterGroup
    left_out: frozenset[str]

    def masters(self) -> Mapping[str, Master]:
        return {name: master for name, master in self.group.masters().items() if name not in self.left_out}

    def moments(self, key: str) -> Mapping[str, Master]:
        return {name: moment for name, moment in self.group.moments(key).items() if name not in self.left_out}


def without_unmoved(groups: Sequence[ParameterGroup], tied: frozenset[str]) -> Sequence[ParameterGroup]:
    """The groups without those copies of ``tied`` parameters that never moved while another copy did.

    Optimizers without Adam's second moments say nothing; there all copies stay, and must be equal.
    """
    squares = [_squares(group, tied) for group in groups]
    moved = {name for held in squares for name, source in held.items() if not _is_zero(source)}
    unmoved = [
        frozenset(name for name, source in held.items() if name in moved and _is_zero(source)) for held in squares
    ]
    for name in sorted(frozenset().union(*unmoved)):
        _log.warning("%s was moved in one stage of the pipeline and never in another: the former is taken", name)
    return [_Moved(group, names) if names else group for group, names in zip(groups, unmoved, strict=True)]


def _squares(group: ParameterGroup, tied: frozenset[str]) -> dict[str, Source]:
    if not tied & group.masters().keys():
        return {}
    try:
        moments = group.moments("exp_avg_sq")
    except UnknownLayout:
        return {}
    return {name: moment.source for name, moment in moments.items() if name in tied}


def _is_zero(source: Source) -> bool:
    element = repeated_element(source)
    return element is not None and not any(element)

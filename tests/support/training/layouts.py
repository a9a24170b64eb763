"""Which layouts a test of many layouts takes: by default a few with all pairs of factors, on request all of them."""

import os
from collections.abc import Collection
from itertools import combinations

ALL = bool(os.environ.get("TEST_MATRIX"))
"""Whether tests take all layouts, as ``make test-matrix`` asks them to."""


def covering(layouts: Collection[str], always: Collection[str] = ()) -> list[str]:
    """Layouts in which every pair of factors that occurs in ``layouts`` occurs at least once, and those in ``always``.

    Each choice is the layout with the most pairs that are missing, the first of several, so that the result is always
    the same; it keeps the order of ``layouts``. With ``TEST_MATRIX`` in the environment, it is all of them.
    """
    return list(layouts) if ALL else _covering(layouts, always)


def _covering(layouts: Collection[str], always: Collection[str]) -> list[str]:
    pairs = {layout: pairs_of(layout) for layout in layouts}
    chosen = {layout for layout in layouts if layout in always}
    missing = set().union(*pairs.values()).difference(*(pairs[layout] for layout in chosen))
    while missing:
        best = max(layouts, key=lambda layout: len(pairs[layout] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [layout for layout in layouts if layout in chosen]


def pairs_of(layout: str) -> set[tuple[str, str]]:
    """The pairs of factors that a layout such as ``zero2-bf16-ep2-offload`` has, in a fixed order.

    The factors are the ZeRO stage, the precision, offload, expert or pipeline parallelism, and any other options in the
    name.
    """
    stage, precision, *options = layout.split("-")
    known = [option for option in options if option == "offload" or option[:2] in ("ep", "pp")]
    others = "-".join(option for option in options if option not in known)
    return set(combinations([stage, precision, *sorted(known), *([others] if others else [])], 2))

"""Finds text whose sentences are broken over lines of a fixed width, although each line of .txt is a passage."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from t5train.data.passages import SourceFile
from t5train.data.readers import OpenFile, format_of, raw_lines

_MOST_FILES, _BYTES_OF_FILE = 32, 128 << 10
"""How many files are looked at, and how much of the beginning of each."""
_FEWEST_LINES, _MANY_BROKEN = 20, 0.3
_NARROWEST, _WIDEST = 40, 200
"""Widths in characters that text is wrapped at. Narrower lines may be words, and wider ones paragraphs."""
_ENDS, _CLOSERS = (".", "!", "?", "\u2026", ":", ";", "\u0589"), "\"')]*_\u00bb\u201d\u2019"


def wrapping_warning(files: Sequence[SourceFile]) -> str | None:
    """Return a warning if many lines at the beginning of .txt files are broken sentences; else None.

    Of languages without lower case, none are found.
    """
    texts = [each for each in files if format_of(each.name) == ".txt"]
    some = texts[:: max(1, -(-len(texts) // _MOST_FILES))]
    found = [is_broken for each in some for is_broken in broken_lines(_beginning(each))]
    share = sum(found) / max(1, len(found))
    if len(found) < _FEWEST_LINES or share < _MANY_BROKEN:
        return None
    return (
        f"{share:.0%} of the first lines of {some[0].shown} and other .txt files look like sentences that were broken "
        "to a fixed width, but each line is a passage of its own. Join the lines of paragraphs, for example with "
        "awk -v RS= '{gsub(/\\n/, \" \"); print}' FILE"
    ).replace(" and other .txt files" if len(some) == 1 else "", "")


def broken_lines(lines: Iterable[str]) -> Iterator[bool]:
    """Yield of each line that is followed by another one whether it is a part of a sentence that goes on there.

    It is if it does not end a sentence, the next line begins in lower case, and its first word would not have fitted.
    """
    stripped = [each.strip() for each in lines]
    widths = sorted(len(each) for each in stripped if each)
    width = widths[len(widths) * 99 // 100] if widths else 0
    for line, following in itertools.pairwise(stripped):
        if line and following:
            goes_on = following[0].islower() and not line.rstrip(_CLOSERS).endswith(_ENDS)
            is_full = len(line) + 1 + len(following.split(maxsplit=1)[0]) > width
            yield goes_on and is_full and _NARROWEST <= width <= _WIDEST


def _beginning(file: SourceFile) -> Iterator[str]:
    with OpenFile() as opened:
        for _, start, line in raw_lines(file, 0, 0, opened):
            if start > _BYTES_OF_FILE:
                return
            yield line.decode(errors="replace")

"""Bounds what a page of a dump may ask of the parser, so that one page cannot end or stall a corpus.

mwparserfromhell builds nested markup by recursion. For markup that is never closed, it reads on to the end of the page
each time, and begins again after it. Both limits count what is in the page, not time, so that every machine leaves out
the same pages.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST_CHARACTERS = 2 << 20
"""MediaWiki stores no page of more than 2 MiB."""
MOST_NESTED = 100
"""The largest wikis nest markup up to about 40 deep."""
MOST_WORK = 500_000_000
"""Characters that are read again for markup that is not closed, times ``_weight``. They take up to ten seconds."""
_WORK_OF_ITEM = 1000
"""Each of the characters that begin the item of a list is a node of its own."""
_MARKUP = re.compile(
    r"(?P<open><!--|\{\{|\[\[|^[ \t:*#;]*\{\||\[(?=[a-z+]{2,}:|//))"
    r"|(?P<close>-->|\}\}|\]\]|\|\}(?!\})|\])"
    r"|<(?P<end>/?)(?P<tag>[^\s<>/!{}\[\]|']+)(?:(?P<attributes>[^<>]*)>)?"
    r"|(?P<quotes>'{2,5})"
    r"|(?P<items>^[*#:;]+)"
    r"|(?P<line>\n)",
    re.MULTILINE | re.IGNORECASE,
)
_CLOSED_BY = {"<!--": "-->", "{{": "}}", "[[": "]]", "{|": "|}", "[": "]"}
_NOT_CLOSED = {"br", "hr", "wbr", "meta", "link", "img", "li", "dt", "dd", "tr", "td", "th"}
_OPENED = {"TemplateOpen", "ArgumentOpen", "WikilinkOpen", "ExternalLinkOpen", "HeadingStart", "TagOpenOpen"}
_CLOSED = {"TemplateClose", "ArgumentClose", "WikilinkClose", "ExternalLinkClose", "HeadingEnd", "TagCloseSelfclose"}
_CLOSED |= {"TagCloseClose"}


class TooComplexError(Exception):
    """A page is not parsed; the message says why."""


def require_parsable(wikitext: str) -> None:
    """Raise TooComplexError if a page is too long, or has too much markup that is not closed."""
    if len(wikitext) > MOST_CHARACTERS:
        raise TooComplexError(f"it has more than {MOST_CHARACTERS:,} characters")
    if _work(wikitext) > MOST_WORK:
        raise TooComplexError("it has too much markup that is not closed")


def require_shallow(tokens: Iterable[Any]) -> None:
    """Raise TooComplexError if the markup of a page, as tokens of mwparserfromhell, is nested too deeply."""
    depth = 0
    for token in tokens:
        name = type(token).__name__
        if name in _OPENED:
            depth += 1
            if depth > MOST_NESTED:
                raise TooComplexError(f"its markup is nested more than {MOST_NESTED} deep")
        elif name in _CLOSED:
            depth -= 1


def _work(wikitext: str) -> int:
    """Return how many weighted characters are between markup that is not closed and where that shows, in all."""
    unclosed = _Unclosed()
    for found in _MARKUP.finditer(wikitext):
        place = found.start()
        if (mark := found["open"]) is not None:
            unclosed.add(_CLOSED_BY[mark.lstrip(" \t:*#;")], place)
        elif (mark := found["close"]) is not None:
            unclosed.close(mark, place)
        elif (tag := found["tag"]) is not None:
            _add_tag(unclosed, found, tag.lower(), place)
        elif (mark := found["quotes"]) is not None:
            if not unclosed.close(mark, place):
                unclosed.add(mark, place)
        elif (items := found["items"]) is not None:
            unclosed.add_work(_WORK_OF_ITEM * len(items))
        else:
            unclosed.end_line(place)
    return unclosed.work_at_end(len(wikitext))


def _add_tag(unclosed: "_Unclosed", found: re.Match[str], tag: str, place: int) -> None:
    attributes = found["attributes"]
    if found["end"]:
        unclosed.close(f"<{tag}", place)
        return
    if attributes is None:  # not even its beginning is complete
        unclosed.add("<", place)
        return
    for _ in range(attributes.count("{{") - attributes.count("}}")):
        unclosed.add("}}", place)
    if not attributes.endswith("/") and tag not in _NOT_CLOSED:
        unclosed.add(f"<{tag}", place)


def _weight(closed_by: str) -> int:
    """Return about how long a character is read again for, compared with others.

    Attributes without an end are the slowest, and tags without an end tag the fastest.
    """
    if closed_by == "<":
        return 20
    return 1 if closed_by.startswith("<") else 10


class _Unclosed:
    """Markup that was opened, and not closed yet."""

    def __init__(self) -> None:
        self._open = list[tuple[str, int]]()
        """What closes it (of a tag, ``<`` and its name; only ``<`` without its end), and where it begins."""
        self._counts = Counter[str]()
        self._work = 0

    def add(self, closed_by: str, place: int) -> None:
        self._open.append((closed_by, place))
        self._counts[closed_by] += 1

    def add_work(self, work: int) -> None:
        self._work += work

    def close(self, mark: str, place: int) -> bool:
        """Close the last markup that ``mark`` closes, if there is any, and drop what is open in it."""
        if not self._counts[mark]:
            return False
        while self._drop(place) != mark:
            pass
        self._work -= _weight(mark) * (place - self._last_place)
        return True

    def end_line(self, place: int) -> None:
        """End bold or italic text, or an external link, that a line does not close."""
        while self._open and (self._open[-1][0] == "]" or self._open[-1][0].startswith("'")):
            self._drop(place)

    def work_at_end(self, place: int) -> int:
        while self._open:
            self._drop(place)
        return self._work

    def _drop(self, place: int) -> str:
        closed_by, self._last_place = self._open.pop()
        self._counts[closed_by] -= 1
        self._work += _weight(closed_by) * (place - self._last_place)
        return closed_by

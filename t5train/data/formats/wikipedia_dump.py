"""Reads the articles of a MediaWiki XML dump, such as Wikipedia's, without their markup.

Left out are pages that are not articles, redirects, templates, tables, references, galleries, formulas, files and
categories. Links and formatting leave their text. Parsing takes about two seconds per MB, so the passages are stored
once more; dumps that come in several files are read by several processes.

What a page may ask of the parser is bounded, so that one page cannot end or stall a corpus. mwparserfromhell builds
nested markup by recursion. For markup that is never closed, it reads on to the end of the page each time, and begins
again after it. Both limits count what is in the page, not time, so that every machine leaves out the same pages.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from t5train.data.passages import Passage, Row, SkippedRow, SourceFile, id_at
from t5train.errors import InputError, printable

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Node, Wikilink
    from mwparserfromhell.wikicode import Wikicode

_ARTICLES = "0"
_LEFT_OUT_NAMESPACES = {"6", "14"}
"""Numbers of the namespaces of files and of categories. A dump names them in its language."""
_ENGLISH_NAMES = {"file", "image", "category"}
"""Names of these namespaces that every language has."""
_LEFT_OUT_TAGS = {"chem", "gallery", "graph", "imagemap", "maplink", "mapframe", "math", "ref", "references", "score"}
_LEFT_OUT_TAGS |= {"source", "syntaxhighlight", "table", "templatestyles", "timeline"}
_LINES = {"blockquote", "br", "center", "dd", "div", "dt", "li", "p", "td", "th", "tr"}
"""Tags at which a line begins and ends."""
_SWITCHES: tuple[str, ...] = (
    "NOTOC",
    "FORCETOC",
    "TOC",
    "NOEDITSECTION",
    "NEWSECTIONLINK",
    "NONEWSECTIONLINK",
    "NOGALLERY",
    "HIDDENCAT",
)
_SWITCHES += ("INDEX", "NOINDEX", "NOCONTENTCONVERT", "NOCC", "NOTITLECONVERT", "NOTC", "STATICREDIRECT", "DISAMBIG")
_SWITCH = re.compile(f"__({'|'.join(_SWITCHES)})__")
_MEDIA = re.compile(r"\.(jpe?g|png|gif|svg|tiff?|webp|pdf|djvu|og[agv]|mp[34]|wav|webm)\s*$", re.IGNORECASE)
_OTHER_LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
_FORM = re.compile(r"^(?P<wiki>.*)-pages-(?P<form>[a-z-]+?)[0-9]*\.xml(?P<part>-p[0-9]+p[0-9]+)?(\.[a-z0-9]+)?$")
_SHOWN_CHARACTERS = 80
_SPACES = re.compile(r"[^\S\n]+")
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


def dump_rows(source: SourceFile, file: IO[bytes], number: int) -> Iterator[Row]:
    """Yield the articles of a decompressed dump from ``number`` on. Their ids are those of the pages.

    Raises InputError if the file is not a well-formed dump, or if mwparserfromhell is not installed.
    """
    if find_spec("mwparserfromhell") is None:
        raise InputError(
            f"{source.shown} is a dump of Wikipedia, which needs the package mwparserfromhell. Install it: "
            "pip install mwparserfromhell"
        )
    try:
        for row, article in enumerate(islice(_articles(source, file), number, None), start=number):
            yield article._replace(id=id_at(article.id, source, row)).row(row)
    except ElementTree.ParseError as error:
        raise InputError(
            f"{source.shown} is not well-formed XML ({error}). If the file is damaged, fetch it again"
        ) from error


class _Article(NamedTuple):
    """An article whose markup is removed only where it is needed."""

    id: str
    title: str
    wikitext: str
    left_out: Collection[str]

    def row(self, number: int) -> Row:
        """Return the article as a row. One that cannot be parsed has no text, and the reason."""
        try:
            return Row(number, 0, Passage(self.id, self.title, plain_text(self.wikitext, self.left_out)))
        except TooComplexError as error:
            reason = (
                f"{printable(self.title[:_SHOWN_CHARACTERS])} (id {printable(self.id[:_SHOWN_CHARACTERS])}): {error}"
            )
            return SkippedRow.of(number, Passage(self.id, self.title, ""), reason)


def _articles(source: SourceFile, file: IO[bytes]) -> Iterator[_Article]:
    """Yield all articles of a dump."""
    left_out = set(_ENGLISH_NAMES)
    events = ElementTree.iterparse(file, ("start", "end"))  # noqa: S314  Expat limits entities, and fetches none
    _, root = next(events)
    space = root.tag.removesuffix("mediawiki")
    if root.tag == space:
        raise InputError(
            f"{source.shown} begins with <{root.tag}>, but a dump of Wikipedia begins with <mediawiki>. Choose other "
            "files (corpus.source)"
        )
    for event, element in events:
        if event == "start":
            continue
        if element.tag == f"{space}namespace" and element.get("key") in _LEFT_OUT_NAMESPACES:
            left_out.add((element.text or "").lower())
        elif element.tag == f"{space}page":
            model = element.findtext(f"{space}revision/{space}model", "wikitext")
            is_article = element.findtext(f"{space}ns") == _ARTICLES and model == "wikitext"
            if is_article and element.find(f"{space}redirect") is None:
                yield _article(element, space, left_out)
            root.clear()  # what was read would stay in memory


def _article(page: ElementTree.Element, space: str, left_out: Collection[str]) -> _Article:
    name, title = page.findtext(f"{space}id") or "", page.findtext(f"{space}title") or ""
    return _Article(name, title, page.findtext(f"{space}revision/{space}text") or "", left_out)


def plain_text(wikitext: str, left_out: Collection[str] = frozenset(_ENGLISH_NAMES)) -> str:
    """Return the text of a page without its markup, one paragraph, heading or item a line.

    ``left_out`` are the names, in lower case, of namespaces whose links are no text. Raises TooComplexError if the page
    is too long, or has too much markup that is nested or not closed.
    """
    text = _SWITCH.sub("", "".join(_texts(_parsed(wikitext), left_out)))
    lines = (_SPACES.sub(" ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _parsed(wikitext: str) -> "Wikicode":
    """Return the markup of a page, as mwparserfromhell.parse does. What it would take too long for is refused."""
    from mwparserfromhell import parser  # an extra, which only this format needs
    from mwparserfromhell.parser.builder import Builder
    from mwparserfromhell.parser.tokenizer import Tokenizer

    require_parsable(wikitext)
    try:
        tokens = (parser.CTokenizer if parser.use_c else Tokenizer)().tokenize(wikitext)
        require_shallow(tokens)
        return Builder().build(tokens)
    except parser.ParserError as error:
        raise TooComplexError(f"its markup cannot be parsed ({error})") from error


def _texts(code: "Wikicode | None", left_out: Collection[str]) -> Iterator[str]:
    for node in code.nodes if code is not None else ():
        yield from _texts_of(node, left_out)


def _texts_of(node: "Node", left_out: Collection[str]) -> Iterator[str]:
    from mwparserfromhell import nodes  # as above

    if isinstance(node, nodes.Text):
        yield node.value
    elif isinstance(node, nodes.HTMLEntity):
        yield node.normalize()
    elif isinstance(node, nodes.Wikilink):
        if not _is_left_out(node, left_out):
            shown = node.text if node.text is not None else node.title
            yield from (text.removeprefix(":") for text in _texts(shown, left_out))
    elif isinstance(node, nodes.ExternalLink | nodes.Heading):
        yield from _texts(node.title, left_out)
    elif isinstance(node, nodes.Tag) and (name := str(node.tag).strip().lower()) not in _LEFT_OUT_TAGS:
        line_end = "\n" if name in _LINES else ""
        yield line_end
        yield from _texts(node.contents, left_out)
        yield line_end


def _is_left_out(link: "Wikilink", left_out: Collection[str]) -> bool:
    """Whether a link is that of a file or category, or of the same article in another language."""
    space = str(link.title).partition(":")[0].strip() if ":" in link.title else ""
    # A wiki has more names for files than its dump says, but their names end alike.
    is_file = space != "" and _MEDIA.search(str(link.title)) is not None
    is_other_language = link.text is None and _OTHER_LANGUAGE.fullmatch(space) is not None
    return space.lower() in left_out or is_file or is_other_language


def require_one_form(names: Iterable[str]) -> None:
    """Raise InputError if files hold the same articles: a whole dump and its parts, or the multistream form of it."""
    forms: dict[str, dict[tuple[str, bool], str]] = {}
    for path in names:
        if (found := _FORM.match(PurePosixPath(path).name)) is not None:
            form = (found["form"], found["part"] is not None)
            forms.setdefault(found["wiki"], {}).setdefault(form, path)
    for alike in forms.values():
        if len(alike) > 1:
            raise InputError(
                f"{' and '.join(alike.values())} hold the same articles, so each would be read more than once. Set "
                "corpus.source to one of these forms, for example with a pattern"
            )


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

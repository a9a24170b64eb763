"""Reads the articles of a MediaWiki XML dump, such as Wikipedia's, without their markup.

Left out are pages that are not articles, redirects, templates, tables, references, galleries, formulas, files and
categories. Links and formatting leave their text. Parsing takes about two seconds per MB, so the passages are stored
once more; dumps that come in several files are read by several processes.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree

from t5train.data.formats.wikitext_limits import TooComplexError, require_parsable, require_shallow
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

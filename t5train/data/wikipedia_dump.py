"""Reads the articles of a MediaWiki XML dump, such as Wikipedia's, without their markup.

Left out are pages that are not articles, redirects, templates, tables, references, galleries, formulas, files and
categories. Links and formatting leave their text. Parsing takes about two seconds per MB, so the passages are stored
once more; dumps that come in several files are read by several processes.
"""

import re
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING
from xml.etree import ElementTree

from t5train.data.passages import Passage, Row, SourceFile
from t5train.errors import InputError

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Node
    from mwparserfromhell.wikicode import Wikicode

_ARTICLES = "0"
_LEFT_OUT_NAMESPACES = {"6", "14"}
"""Numbers of the namespaces of files and of categories. A dump names them in its language."""
_ENGLISH_NAMES = {"file", "image", "category"}
"""Names of these namespaces that every language has."""
_LEFT_OUT_TAGS = {"chem", "gallery", "graph", "imagemap", "maplink", "mapframe", "math", "ref", "references", "score"}
_LEFT_OUT_TAGS |= {"source", "syntaxhighlight", "table", "templatestyles", "timeline"}
_SWITCH = re.compile(r"__[A-Z]+__")
_SPACES = re.compile(r"[^\S\n]+")


def dump_rows(source: SourceFile, file: IO[bytes], number: int) -> Iterator[Row]:
    """Yield the articles of a decompressed dump from ``number`` on. Their ids are those of the pages.

    Raises InputError if the file is not a well-formed dump, or if mwparserfromhell is not installed.
    """
    try:
        import mwparserfromhell  # noqa: F401  fails here rather than after the download of more files
    except ImportError:
        raise InputError(
            f"{source.path} is a dump of Wikipedia, which needs the package mwparserfromhell. Install it: "
            "pip install mwparserfromhell"
        ) from None
    try:
        for row, article in enumerate(islice(_articles(source, file), number, None), start=number):
            yield Row(row, 0, article())
    except ElementTree.ParseError as error:
        raise InputError(
            f"{source.path} is not well-formed XML ({error}). If the file is damaged, fetch it again"
        ) from error


def _articles(source: SourceFile, file: IO[bytes]) -> Iterator[Callable[[], Passage]]:
    """Yield a function for each article that returns its passage, so that markup is removed only where it is needed."""
    left_out = set(_ENGLISH_NAMES)
    # Expat, since 2.4, ends the parsing if entities expand to too much, and external ones are not fetched.
    events = ElementTree.iterparse(file, ("start", "end"))  # noqa: S314
    _, root = next(events)
    space = root.tag.removesuffix("mediawiki")
    if root.tag == space:
        raise InputError(
            f"{source.path} begins with <{root.tag}>, but a dump of Wikipedia begins with <mediawiki>. Choose other "
            "files (corpus.source)"
        )
    for event, element in events:
        if event == "start":
            continue
        if element.tag == f"{space}namespace" and element.get("key") in _LEFT_OUT_NAMESPACES:
            left_out.add((element.text or "").lower())
        elif element.tag == f"{space}page":
            if element.findtext(f"{space}ns") == _ARTICLES and element.find(f"{space}redirect") is None:
                yield _article(element, space, left_out)
            root.clear()  # what was read would stay in memory


def _article(page: ElementTree.Element, space: str, left_out: Collection[str]) -> Callable[[], Passage]:
    name, title = page.findtext(f"{space}id") or "", page.findtext(f"{space}title") or ""
    wikitext = page.findtext(f"{space}revision/{space}text") or ""
    return lambda: Passage(name, title, plain_text(wikitext, left_out))


def plain_text(wikitext: str, left_out: Collection[str] = frozenset(_ENGLISH_NAMES)) -> str:
    """Return the text of a page without its markup, one paragraph, heading or item a line.

    ``left_out`` are the names, in lower case, of namespaces whose links are no text.
    """
    import mwparserfromhell  # an extra, which only this format needs

    text = _SWITCH.sub("", "".join(_texts(mwparserfromhell.parse(wikitext), left_out)))
    lines = (_SPACES.sub(" ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


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
        if node.title.partition(":")[0].strip().lower() not in left_out:
            shown = node.text if node.text is not None else node.title
            yield from (text.removeprefix(":") for text in _texts(shown, left_out))
    elif isinstance(node, nodes.ExternalLink | nodes.Heading):
        yield from _texts(node.title, left_out)
    elif isinstance(node, nodes.Tag) and str(node.tag).strip().lower() not in _LEFT_OUT_TAGS:
        yield "\n" if str(node.tag) == "br" else ""
        yield from _texts(node.contents, left_out)

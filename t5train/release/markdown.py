r"""The parts of Markdown that the model card and the reports use.

Everything is on one line, except the blocks of ``code_block``. Bytes that are not UTF-8, which names of files can have,
are shown as escapes such as ``\udce9``.
"""

import re
from collections.abc import Iterable, Sequence

from t5train.errors import encodable

_SPECIAL = re.compile(
    r"""[\\`*<\[\]~&]             # code, emphasis, HTML, links, strikethrough, entities
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis: an underscore that is not inside a word
    | ^> | ^[-+](?=\ |$)          # quotations and lists
    | ^\#(?=\#{0,5}(?:\ |$))      # headings
    | ^[-=](?=[-=\ ]*$)           # rules, and underlines of headings
    """,
    re.VERBOSE,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_URL = re.compile(r"""((?:https?|ftp)://[^\s<]*[\\`*\[\]~&_][^\s<]*)""")
_ITEM_NUMBER = re.compile(r"^([0-9]{1,9})([.)])(?= |$)")


def escaped(text: object) -> str:
    """Return Markdown that is shown as exactly this text, in one line. What is not special is not changed.

    URLs with special characters are code: some renderers make links of them, in which they show every backslash.
    """
    parts = _URL.split(" ".join(str(text).split()))
    return "".join(code(part) if number % 2 else _escaped(part, number == 0) for number, part in enumerate(parts))


def _escaped(text: str, begins_line: bool) -> str:
    special = _SPECIAL.sub(r"\\\g<0>", text)
    return _ITEM_NUMBER.sub(r"\1\\\2", special) if begins_line else special


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of cells that are Markdown; a vertical bar in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def page(*parts: str) -> str:
    """Return the parts as paragraphs of one text; empty parts are left out. Control characters become U+FFFD."""
    return _CONTROLS.sub("\ufffd", encodable("\n\n".join(filter(None, parts)) + "\n"))


def code(text: object) -> str:
    """Return the text as inline code, between more backticks than it has in a row."""
    shown = " ".join(str(text).splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    padding = " " if {shown[:1], shown[-1:]} & {"`", " "} else ""  # of which Markdown removes one on each side
    return f"{fence}{padding}{shown}{padding}{fence}"


def code_block(text: str, language: str = "") -> str:
    """Return the text as a block of code, with a fence that does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())

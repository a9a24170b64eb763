"""The parts of Markdown that the reports use."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; a vertical bar in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def page(*parts: str) -> str:
    """Return the parts as paragraphs of one text; empty parts are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"


def code(text: object) -> str:
    """Return the text as inline code. A backtick would end it, and is shown as an apostrophe."""
    shown = str(text).replace("`", "'")
    return f"`{shown}`"


def code_block(text: str, language: str = "") -> str:
    """Return the text as a block of code, with a fence that does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())

"""Lines of a log, fit to be shown: without escape sequences, control characters and what progress bars overwrote."""

import re

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE_CHARACTERS = 400


def printable(text: str) -> str:
    """The same text without what a terminal would obey: it may come from another machine, or from a store."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def shown_lines(output: bytes) -> list[str]:
    """The lines of ``output`` that have text, each cut after 400 characters."""
    text = _ESCAPES.sub("", output.decode("utf-8", errors="replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [printable(line).rstrip()[:_LINE_CHARACTERS] for line in lines if line.strip()]

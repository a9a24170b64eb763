"""Well-known texts that ``corpus.source`` names by one word: where they are, what they hold, and their licence.

They are data, in ``known_texts.json`` beside this module.
"""

from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

BUILT_IN = "pydocs"
"""Python's documentation, which is made on this machine."""


class KnownFile(BaseModel):
    """Size in bytes and sha256 of a file as stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class KnownText(BaseModel):
    """A text that has a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: str
    location: str
    """Path, pattern or fsspec URL."""
    files: dict[str, KnownFile]
    """By name below the location. Others cannot be compared with anything on their first download."""
    rows: int
    """Passages, empty ones included."""
    license: str
    languages: tuple[str, ...]


@cache
def known_texts() -> dict[str, KnownText]:
    """Return all texts by name."""
    content = files(__package__).joinpath("known_texts.json").read_bytes()
    return TypeAdapter(dict[str, KnownText]).validate_json(content)


def is_named_text(source: str) -> bool:
    """Whether a source is the name of a text, and neither a path nor a URL."""
    return source == BUILT_IN or source in known_texts()


def location_of(source: str) -> str:
    """Return the path or URL of a source."""
    known = known_texts().get(source)
    return source if known is None else known.location


def licence_of(source: str, stated: str | None) -> str | None:
    """Return the licence of a text: what its user states, otherwise what is known."""
    known = known_texts().get(source)
    return stated or (known.license if known is not None else None)


def languages_of(source: str, stated: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes of a text's languages, likewise."""
    known = known_texts().get(source)
    return stated or (known.languages if known is not None else ())

"""Messages between machines: frozen dataclasses, each sent as a line of JSON, ``{"NameOfTheClass": {field: value}}``.

The type hints of a class define its form. A field can be a bool, int, float, str, bytes, Path, StrEnum, another
dataclass or NamedTuple, a list or tuple of these, a dict or Mapping from str to these, or any of these or None. Every
field is sent and every field is required, so that versions of this project whose messages differ detect it. A
request and its answer are defined in the package of the action. Messages that can arrive at the same point share a
base class. Standard library only, as nodes import it.
"""

import json
import math
import types
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from t5train.errors import BadMessage

T = TypeVar("T")
A = TypeVar("A")
_SHOWN_CHARACTERS = 80
_SCALARS = {bool: "true or false", int: "an integer", str: "a text"}


class Request:
    """Starts an action on a node. A request that is not a ``Query`` starts a conversation."""

    action: ClassVar[str]
    """The name of the action in infra.node.__main__."""


class Query(Request, Generic[A]):
    """A request with one answer, which has the type ``A``."""

    @classmethod
    def answer(cls) -> type[A]:
        """The type of the answer."""
        bases: tuple[Any, ...] = getattr(cls, "__orig_bases__", ())
        return cast(type[A], get_args(bases[0])[0])


@dataclass(frozen=True)
class Done:
    """The answer of an action that has nothing to report."""


@dataclass(frozen=True)
class Failure:
    """Why an action failed: the last line on its stderr. ``kind`` is the class of the error in t5train.errors."""

    kind: str
    message: str


class NotAMessage(BadMessage):
    """The line is not a JSON object, so it was not written as a message."""


def encode(message: object) -> bytes:
    """Encode a message as a line."""
    return json.dumps({type(message).__name__: _plain(message)}, allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes, kind: type[T]) -> T:
    """Decode a message of class ``kind`` or a direct subclass. Raises BadMessage, which names the wrong field."""
    try:
        document = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise NotAMessage(f"got {_beginning(line)} instead of a message")
    if len(document) != 1:
        raise BadMessage(f"{_beginning(line)} is not a valid message")
    ((name, value),) = document.items()
    known = {each.__name__: each for each in (kind, *kind.__subclasses__()) if is_dataclass(each)}
    if name not in known:
        raise BadMessage(f"got the message {_shown(name)} instead of {' or '.join(known)}")
    return cast(T, _checked(name, known[name], value))


def _plain(value: object) -> object:
    """Convert a value to one that json can write."""
    kind: Any = type(value)
    if _has_fields(kind):
        return {name: _plain(getattr(value, name)) for name in _hints(kind)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    return str(value) if isinstance(value, Path) else value  # a StrEnum is a str already


def _checked(where: str, kind: Any, value: object) -> object:
    """Convert ``value``, as json has read it, to the type ``kind``; ``where`` names it in errors."""
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        return _optional(where, kind, value)
    if origin in {list, tuple}:
        return _sequence(where, origin, get_args(kind), value)
    if origin in {dict, Mapping}:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        return {key: _checked(f"{where}[{_shown(key)}]", get_args(kind)[1], each) for key, each in value.items()}
    if _has_fields(kind):
        return _object(where, kind, value)
    return _scalar(where, kind, value)


def _optional(where: str, kind: Any, value: object) -> object:
    members = [member for member in get_args(kind) if member is not types.NoneType]
    if len(members) != 1:
        raise TypeError(f"{where} is declared as {kind}: messages allow unions with None only")
    return None if value is None else _checked(where, members[0], value)


def _sequence(where: str, origin: type, members: tuple[Any, ...], value: object) -> object:
    if not isinstance(value, list):
        _refuse(where, value, "a list")
    if origin is list or members[-1] is Ellipsis:
        members = members[:1] * len(value)
    if len(members) != len(value):
        _refuse(where, value, f"a list of {len(members)} values")
    parts = zip(members, value, strict=True)
    return origin(_checked(f"{where}[{number}]", member, each) for number, (member, each) in enumerate(parts))


def _object(where: str, kind: type, value: object) -> object:
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    hints = _hints(kind)
    if missing := [name for name in hints if name not in value]:
        raise BadMessage(f"{where} has no field {missing[0]!r}")
    if unknown := [name for name in value if name not in hints]:
        raise BadMessage(f"{where} has the unknown field {_shown(unknown[0])}")
    return kind(**{name: _checked(f"{where}.{name}", hint, value[name]) for name, hint in hints.items()})


def _scalar(where: str, kind: Any, value: object) -> object:
    if kind in _SCALARS:
        return value if type(value) is kind else _refuse(where, value, _SCALARS[kind])  # a bool is not an int here
    if kind in _PARSERS or (isinstance(kind, type) and issubclass(kind, Enum)):
        parse, constraint = _PARSERS.get(kind) or (kind, f"one of {', '.join(repr(one.value) for one in kind)}")
        try:
            return parse(value)
        except (ValueError, TypeError, OverflowError):
            _refuse(where, value, constraint)
    raise TypeError(f"{where} is declared as {kind}, which messages do not allow")


def _number(value: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("no number of JSON")
    return float(value)


def _path(value: str) -> Path:
    if "\0" in value:
        raise ValueError("no path contains NUL")
    return Path(value)


_PARSERS: Mapping[type, tuple[Callable[[Any], object], str]] = {
    float: (_number, "a finite number"),
    Path: (_path, "a path"),
    bytes: (partial(b64decode, validate=True), "text in base64"),
}


def _has_fields(kind: Any) -> bool:
    """Whether a type is a dataclass or a NamedTuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The types of the fields of a class."""
    names = [one.name for one in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}


def _refuse(where: str, value: object, constraint: str) -> NoReturn:
    raise BadMessage(f"{where} is {_shown(value)}, not {constraint}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _beginning(line: bytes) -> str:
    return _shown(line[: 2 * _SHOWN_CHARACTERS].decode("utf-8", "replace"))


def _shown(value: object) -> str:
    """The beginning of a value, with control characters escaped, because it may come from an untrusted source."""
    shown = ascii(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."

"""What is known about each setting without a run: what it means, which values it takes, and whether it is identity."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeGuard

from pydantic import BaseModel

_PATTERN = re.compile(r"\^\[([^\]]+)\]\[([^\]]+)\]\{0,(\d+)\}\$")
_NUMBERS = {"integer": "whole number", "number": "number"}
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


class Setting(NamedTuple):
    """One setting of a spec."""

    name: str
    """``part.key``."""
    description: str
    annotation: Any
    """Its type."""
    schema: Mapping[str, Any]
    """Its JSON schema."""
    is_identity: bool
    """Whether it decides the result of a run, and not only how the run is executed."""

    @property
    def key(self) -> str:
        """The name without its part."""
        return self.name.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """The values it takes, as in "it must be ...": ``a whole number of at least 1, or null``."""
        return allowed_values(self.schema)

    @property
    def choices(self) -> list[str]:
        """The values, if it takes one of a few; empty for others."""
        if self.schema.get("type") == "boolean":
            return ["true", "false"]
        return [str(each) for option in self.schema.get("anyOf", [self.schema]) for each in option.get("enum", [])]

    @property
    def explained(self) -> str:
        """The description and the allowed values, in sentences. That a value is any text is not worth a sentence."""
        allowed = self.allowed.removesuffix(" or null")
        sentence = "" if allowed in {"text", "a path"} else f" {self.allowed[0].upper()}{self.allowed[1:]}."
        return f"{self.description}.{sentence}"


class Part(NamedTuple):
    """A part of a spec: its settings, and the parts inside it."""

    name: str
    description: str
    is_identity: bool
    """Whether any of its settings decides the result of a run."""
    members: "tuple[Setting | Part, ...]"

    @property
    def key(self) -> str:
        """The name without the part that it is inside."""
        return self.name.rpartition(".")[2]


@cache
def parts_of(spec: type[BaseModel], name: str = "", is_identity: bool = True) -> Part:
    """Return a spec's class as a part, with everything inside it in the order of its fields."""
    members = tuple(_members(spec, f"{name}." if name else "", is_identity))
    first = (spec.__doc__ or "").partition("\n\n")[0]
    return Part(name, " ".join(first.split()), any(each.is_identity for each in members), members)


@cache
def settings_of(spec: type[BaseModel]) -> Mapping[str, Setting]:
    """Return every setting of a spec's class, by its name ``part.key``."""
    return {setting.name: setting for setting in _flat(parts_of(spec))}


def _flat(part: Part) -> Iterator[Setting]:
    for member in part.members:
        if isinstance(member, Part):
            yield from _flat(member)
        else:
            yield member


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Return which values a setting with this JSON schema takes, as the end of a sentence "it must be ..."."""
    if "anyOf" in schema:
        taken = [each for each in schema["anyOf"] if each.get("type") != "null"]
        allowed = allowed_values(taken[0])
        return f"{allowed}{',' if ' ' in allowed.removeprefix('a ') else ''} or null"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in _NUMBERS:
        return f"a {_NUMBERS[kind]}{_bounds(schema)}"
    if kind == "array":
        return _list(schema)
    return "true or false" if kind == "boolean" else _text(schema)


def _is_part(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _members(spec: type[BaseModel], prefix: str, is_identity: bool) -> Iterator[Setting | Part]:
    properties = spec.model_json_schema()["properties"]
    execution: frozenset[str] = getattr(spec, "execution", frozenset())
    for key, field in spec.model_fields.items():
        decides = is_identity and key not in execution
        if _is_part(field.annotation):
            yield parts_of(field.annotation, f"{prefix}{key}", decides)
        else:
            yield Setting(f"{prefix}{key}", field.description or "", field.annotation, properties[key], decides)


def _bounds(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:,} to {schema['maximum']:,}"
    bounds = [f"{words} {schema[bound]:,}" for bound, words in _BOUNDS.items() if bound in schema]
    return f" {' and '.join(bounds)}" if bounds else ""


def _list(schema: Mapping[str, Any]) -> str:
    if items := schema.get("prefixItems"):
        return f"a list of {len(items)} {_NUMBERS[items[0]['type']]}s"
    items = schema.get("items", {})
    return f"a list of {', '.join(items['enum']) if 'enum' in items else items.get('description', 'text')}"


def _text(schema: Mapping[str, Any]) -> str:
    if schema.get("format") == "path":
        return "a path"
    if match := _PATTERN.fullmatch(schema.get("pattern", "")):
        first, others = (" ".join(re.findall("[^-]-[^-]|.", characters)) for characters in match.group(1, 2))
        return f"text of at most {int(match[3]) + 1} of the characters {others}, the first one of {first}"
    return "text"

"""Every message arrives as it was sent. A message with a wrong field is rejected with the name of that field."""

import json
import string
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.node.__main__ import ACTIONS, function_of, request_type
from infra.node.attempts.agent_messages import Instruction, Report
from infra.node.code_receiver import Delivery, Held
from infra.node.messages import Failure, NotAMessage, Query, decode, encode
from infra.node.storage.chain_copy import Listening, Upstream
from infra.node.storage.file_channel import FromReceiver, FromSender
from infra.node.storage.peer_connection import Greeting, Introduction, Welcome
from t5train.errors import BadMessage

TEXT = st.text(max_size=8)


def all_messages() -> Iterator[type[Any]]:
    for name in ACTIONS:
        request = request_type(function_of(name))
        yield request
        if issubclass(request, Query):
            yield request.answer()
    for base in (Report, Instruction, FromReceiver, FromSender):
        yield from base.__subclasses__()
    yield from (Listening, Upstream, Greeting, Introduction, Welcome, Failure, Delivery, Held)


MESSAGES = sorted(set(all_messages()), key=lambda kind: kind.__name__)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for values of the type of a field."""
    simple = {
        bool: st.booleans(), int: st.integers(), str: TEXT, bytes: st.binary(max_size=8), type(None): st.none(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        Path: st.text(string.printable, min_size=1, max_size=8).map(Path),
    }  # fmt: skip
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in simple:
        return simple[kind]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values, arguments))
    if origin in {list, tuple}:
        return st.lists(values(arguments[0]), max_size=3).map(origin)
    if origin in {dict, Mapping}:
        return st.dictionaries(TEXT, values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    return st.sampled_from(kind) if issubclass(kind, StrEnum) else instances(kind)


@cache
def instances(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)] if is_dataclass(kind) else kind._fields
    return st.builds(kind, **{name: values(hints[name]) for name in names})


def test_the_names_of_messages_are_distinct() -> None:
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    line = encode(message)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert decode(line, kind) == message


@pytest.mark.parametrize("kind", MESSAGES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_message_with_a_wrong_field_is_rejected_with_its_name(kind: type[Any], data: st.DataObject) -> None:
    document = json.loads(encode(data.draw(instances(kind))))
    where, inner, names = data.draw(st.sampled_from(list(objects(kind.__name__, kind, document[kind.__name__]))))
    before = deepcopy(document)
    inner["novelty"] = 1
    assert_rejected(document, kind, where, "'novelty'")
    del inner["novelty"]
    if names:
        name = data.draw(st.sampled_from(names))
        value = inner.pop(name)
        assert_rejected(document, kind, where, repr(name))
        inner[name] = [{"no": "field", "has": "this form"}]
        assert_rejected(document, kind, f"{where}.{name}")
        inner[name] = value
    assert document == before


def assert_rejected(document: dict[str, Any], kind: type[Any], *words: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(json.dumps(document).encode(), kind)
    assert all(word in str(caught.value) for word in words), (words, caught.value)


def objects(where: str, kind: Any, value: Any) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield the message and each message inside it: its name in errors, its JSON, and the names of its fields."""
    hints = get_type_hints(kind)
    yield where, value, list(value)
    for name, inner in value.items():
        member = next((each for each in (hints[name], *get_args(hints[name])) if is_dataclass(each)), None)
        if member is not None and isinstance(inner, dict) and get_origin(hints[name]) not in {dict, Mapping}:
            yield from objects(f"{where}.{name}", member, inner)


class Point(NamedTuple):
    x: float
    y: int = 0


@dataclass(frozen=True)
class Sample:
    point: Point
    named: dict[str, list[int]]
    pair: tuple[str, bool]
    maybe: Path | None


GOOD: dict[str, Any] = {"point": {"x": 1, "y": 2}, "named": {"a": [1]}, "pair": ["b", True], "maybe": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"point": {"x": 1, "y": True}}, "Sample.point.y is True, not an integer"),
        ({"point": {"x": "1", "y": 2}}, "Sample.point.x is '1', not a finite number"),
        ({"point": {"x": 10**400, "y": 2}}, "not a finite number"),
        ({"point": {"x": 1}}, "Sample.point has no field 'y'"),
        ({"point": [1, 2]}, "Sample.point is [1, 2], not an object"),
        ({"named": {"a": ["\x1b[2J"]}}, r"Sample.named['a'][0] is '\x1b[2J', not an integer"),
        ({"pair": ["b"]}, "Sample.pair is ['b'], not a list of 2 values"),
        ({"maybe": 1}, "Sample.maybe is 1, not a path"),
        ({"maybe": "a\0b"}, r"Sample.maybe is 'a\x00b', not a path"),
        ({"x" * 999: 1}, "has the unknown field"),
    ],
)
def test_an_error_names_the_field_the_value_and_the_expected_type(change: dict[str, Any], words: str) -> None:
    good = Sample(Point(1.0, 2), {"a": [1]}, ("b", True), None)  # an integer is accepted for a float
    assert decode(json.dumps({"Sample": GOOD}).encode(), Sample) == good
    with pytest.raises(BadMessage) as caught:
        decode(json.dumps({"Sample": GOOD | change}).encode(), Sample)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("line", [b"", b"Welcome!", b"\xff", b"[1]", b"NaN", b"[" * 100_000, b'{"Sample": NaN}'])
def test_a_line_that_is_not_a_message_is_reported_as_such(line: bytes) -> None:
    with pytest.raises(NotAMessage, match="instead of a message"):
        decode(line, Sample)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{}", "is not a valid message"),
        (b'{"a": 1, "b": 2}', "is not a valid message"),
        (encode(Failure("SpecError", "x")), "got the message 'Failure' instead of Sample"),
    ],
)
def test_an_object_that_is_not_the_expected_message_is_rejected(line: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        decode(line, Sample)


def test_a_message_class_with_an_unsupported_field_type_raises_type_error() -> None:
    @dataclass(frozen=True)
    class Wrong:
        value: int | str

    with pytest.raises(TypeError, match=r"Wrong\.value is declared as"):
        decode(b'{"Wrong": {"value": 1}}', Wrong)

"""JSON lines: reading them in C++ gives the rows and the errors of reading them in Python, whatever the lines."""

import json
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from t5train.data import readers
from t5train.data.native import segmenter_build
from t5train.data.passages import Passage, Row, SourceFile
from t5train.errors import InputError

NATIVE = segmenter_build.load(segmenter_build.build())
TEXTS = st.text(st.sampled_from('ab"\\/\n\t\r\x01 \u00e9\u2028\U0001f468') | st.characters(exclude_categories=["Cs"]))
IDS = TEXTS | st.integers(-(10**20), 10**20) | st.sampled_from([None, True, 1.5, "", " ", [], {"id": 1}])
OBJECTS = st.fixed_dictionaries({"text": TEXTS}, optional={"id": IDS, "title": IDS, "url": IDS, 'q"uote': TEXTS})
SPELLINGS = st.tuples(OBJECTS, st.booleans(), st.sampled_from([(", ", ": "), (",", ":"), (" ,\t", " : ")])).map(
    lambda drawn: json.dumps(drawn[0], ensure_ascii=drawn[1], separators=drawn[2]).encode()
)
ODD = [
    b"",
    b" ",
    b'{"text": "a", "text": "b"}',
    b'{"text": "a", "url": "b", "url": "c"}',
    b'{"te\\u0078t": "a"}',
    b' {"text": "a"} \r',
    b'{"text": "\\ud83d\\ude00 \\u00e9\\u2581\\u0000\\/\\b\\f"}',
    b'{"id": 0, "text": "a"}',
    b'{"id": 123456789012345678, "text": "a"}',
    b'{"id": 1234567890123456789, "text": "a"}',
    b'{"id": 1e3, "text": "a"}',
    b'{"id": "\\u00e9", "text": "a"}',
    b'{"id": "\\u0085", "text": "a"}',
]
WRONG = [
    *(
        b"{}",
        b"[]",
        b'"text"',
        b'{"text": 1}',
        b'{"text": null}',
        b'{"title": "a"}',
        b'{"text": "a"',
        b'{"text": "a",}',
    ),
    *(b'{"text": "a"}}', b'{"text": "a"} b', b'{"text": "a\tb"}', b'{"text": "\\x"}', b'{"text": "\\u12g4"}'),
    *(b'{"text": "\\ud83d"}', b'{"text": "\\ude00"}', b'{"text": "\\ud83dx"}', b'{"text": "\\ud83d\\u0041"}'),
    *(b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "\xc0\x80"}', b'{"text": "a\\', b'{"text": "\\u12'),
    *(b'{"id": 012, "text": "a"}', b'{"id": 1.0.0, "text": "a"}', b'{"id": -, "text": "a"}', b'{"text": "a" "b": "c"}'),
]


def read(source: SourceFile, native: ModuleType | None) -> list[Row | str]:
    """Return the rows of a file, and the error that ends reading."""
    found: list[Row | str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segmenter_build, "load", lambda _: native)
        patch.setattr(readers, "_BLOCK_BYTES", 64)
        try:
            found.extend(readers.rows(source))
        except InputError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceFile:
    return SourceFile(tmp_path_factory.mktemp("lines") / "some.jsonl", "some.jsonl")


@given(st.lists(SPELLINGS | st.sampled_from(ODD), max_size=8), st.booleans())
@example([b'{"text": "' + b"long " * 100 + b'"}', b'{"text": "a"}'], False)
def test_any_lines_have_the_same_rows(source: SourceFile, lines: list[bytes], is_ended: bool) -> None:
    source.path.write_bytes(b"\n".join(lines) + b"\n" * is_ended)
    assert read(source, NATIVE) == read(source, None)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_has_the_same_error_after_the_rows_before_it(source: SourceFile, line: bytes) -> None:
    source.path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    first, error = read(source, NATIVE)
    assert [first, error] == read(source, None)
    assert isinstance(first, Row)
    assert isinstance(error, str)


def test_usual_lines_are_read_in_cpp(source: SourceFile) -> None:
    lines = [
        b'{"id": "1", "text": "a\\n\\u00e9 \xc3\xa9", "title": "b"}',
        b'{"url": "c", "text": "d"}',
        b'{"id": 7, "text": ""}',
    ]
    assert NATIVE is not None
    rows, end = NATIVE.json_rows(b"\n".join(lines) + b"\n{}\n", 0, "f", 5, 100, Row, Passage)
    assert [row.passage for row in rows] == [("1", "b", "a\n\u00e9 \u00e9"), ("f:6", "", "d"), ("7", "", "")]
    assert [row.number for row in rows] == [5, 6, 7]
    assert [row.offset for row in rows] == [100, 101 + len(lines[0]), 102 + len(lines[0]) + len(lines[1])]
    assert end == sum(len(line) + 1 for line in lines)
    assert {type(row) for row in rows} == {Row}
    assert {type(row.passage) for row in rows} == {Passage}


def test_a_file_can_be_read_on_from_any_row(source: SourceFile) -> None:
    source.path.write_bytes(b"".join(b'{"text": "%d"}\n{"text":"x", "n": 1}\n' % number for number in range(50)))
    rows = list(readers.rows(source))
    for row in rows[::7]:
        assert list(readers.rows(source, row.number, row.offset)) == rows[row.number :]


def test_a_line_above_the_limit_is_refused(source: SourceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 64)
    source.path.write_bytes(b'{"text": "a"}\n{"text": "' + b"b" * 1000)
    with pytest.raises(InputError, match="line 2 has more than"):
        list(readers.rows(source))

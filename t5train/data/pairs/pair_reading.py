"""Reads pairs from files: one per line of .jsonl or .tsv, record of .csv or row of .parquet, by the names of columns.

A column of .jsonl and .parquet may be nested: ``translation.en`` is ``en`` in ``translation``. null is an
empty text.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from t5train.data.passages import SourceFile
from t5train.data.readers import (
    OpenFile,
    csv_records,
    format_of,
    json_value,
    raw_lines,
    read_to_end,
    require_fields,
    require_short_text,
    text_lines,
    unquoted,
)
from t5train.errors import InputError, printable
from t5train.quantities import quantity
from t5train.spec import nearest
from t5train.spec.pairs_spec import PairSource

_SHOWN = 20
_MISSING = object()


class PairRow(NamedTuple):
    """A pair as a file has it, without a prefix."""

    where: str
    """Its place in the file, for errors, such as ``line 3``."""
    source: str
    target: str


def pair_rows(file: SourceFile, columns: PairSource, opened: OpenFile) -> Iterator[PairRow]:
    """Yield the pairs of a file, whose columns ``columns`` names. Blank lines are left out.

    Raises InputError if a column is missing or holds no text, if a row is malformed, too long or not valid UTF-8, or if
    the file is truncated, damaged or of a format without columns.
    """
    reader = _READERS.get(format_of(file.name) or "")
    if reader is None:
        raise InputError(
            f"{file.shown} has a format without columns, but a pair has a source and a target. Name {PAIR_FORMATS} "
            f"files (pairs.train), which may be compressed"
        )
    with read_to_end(file, opened):
        yield from reader(file, columns, opened)


def _jsonl(file: SourceFile, columns: PairSource, opened: OpenFile) -> Iterator[PairRow]:
    for row, start, line in raw_lines(file, 0, 0, opened):
        if not line.strip():
            continue
        where, is_array = f"line {row + 1}", line.lstrip(b"\xef\xbb\xbf \t").startswith(b"[")
        value = None if is_array else json_value(file, row, start, line)
        if not isinstance(value, dict):
            remedy = "To write an array as lines of objects, use jq -c '.[]'" if is_array else "Correct this line"
            raise InputError(
                f'{file.shown} {where} is not an object such as {{"source": "...", "target": "..."}}. {remedy}'
            )
        source, target = (_text_of(file, where, value, name) for name in (columns.source, columns.target))
        yield PairRow(where, source, target)


def _tsv(file: SourceFile, columns: PairSource, opened: OpenFile) -> Iterator[PairRow]:
    lines = text_lines(file, 0, 0, opened)
    header = [unquoted(each) for _, _, line in [next(lines, (0, 0, ""))] for each in line.split("\t")]
    source, target = _places(file, header, columns, "tabs")
    for row, _, line in lines:
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            raise InputError(
                f"{file.shown} line {row + 1} has {quantity(len(fields), 'field')} separated by tabs, but the header "
                f"has {len(header)}. Correct this line: only fields of .csv and .jsonl may have tabs and line ends"
            )
        yield PairRow(f"line {row + 1}", unquoted(fields[source]), unquoted(fields[target]))


def _csv(file: SourceFile, columns: PairSource, opened: OpenFile) -> Iterator[PairRow]:
    records = csv_records(file, 0, 0, opened)
    _, _, header = next(records, (0, 0, []))
    source, target = _places(file, header, columns, "commas")
    for row, _, fields in records:
        require_fields(file, row, fields, header)
        if fields:
            yield PairRow(f"record {row + 1}", fields[source], fields[target])


def _parquet(file: SourceFile, columns: PairSource, _: OpenFile) -> Iterator[PairRow]:
    from t5train.data.formats.parquet import BATCH_ROWS, batches, decoded_rows, open_parquet  # slow to import

    names, number = (columns.source, columns.target), 0
    with open_parquet(file.path) as opened:
        for name in names:
            _require_text_column(file, opened.schema_arrow, name)
        for batch in batches(file.path, opened, BATCH_ROWS, range(opened.num_row_groups), names):
            for values in decoded_rows(file, batch, number):
                where = f"row {number}"
                source, target = (_text_of(file, where, values, name) for name in names)
                for text in (source, target):
                    require_short_text(file.shown, number, text)
                yield PairRow(where, source, target)
                number += 1


_READERS: dict[str, Callable[[SourceFile, PairSource, OpenFile], Iterator[PairRow]]] = {
    ".jsonl": _jsonl,
    ".tsv": _tsv,
    ".csv": _csv,
    ".parquet": _parquet,
}
PAIR_FORMATS = ", ".join(_READERS)


def _text_of(file: SourceFile, where: str, values: dict[str, Any], name: str) -> str:
    found = _value_at(values, name)
    if found is _MISSING:
        raise _missing(file, where, name, list(_leaves(values)))
    if found is not None and not isinstance(found, str):
        raise InputError(
            f"{file.shown} {where}: {name!r} holds {type(found).__name__} and not text. Choose a column of text "
            "(#source=, #target=), or write this value as text"
        )
    return found or ""


def _value_at(values: Any, name: str) -> Any:
    """Return the value of a column, which may be nested; ``_MISSING`` if there is none. None inside stays None."""
    if isinstance(values, dict) and name in values:
        return values[name]
    first, is_nested, rest = name.partition(".")
    if not is_nested or not isinstance(values, dict) or first not in values:
        return _MISSING
    return None if values[first] is None else _value_at(values[first], rest)


def _leaves(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _places(file: SourceFile, header: Sequence[str], columns: PairSource, separator: str) -> tuple[int, int]:
    """Return which columns of a table are those of the source and of the target."""
    for name in (columns.source, columns.target):
        if name not in header:
            where = f"line 1, the header, split at {separator}," if len(header) == 1 else "line 1, the header,"
            raise _missing(file, where, name, header)
        if header.count(name) > 1:
            raise InputError(
                f"{file.shown} line 1, the header, has more than one column {name!r}. Rename one of them, or choose "
                "another column (#source=, #target=)"
            )
    return header.index(columns.source), header.index(columns.target)


def _require_text_column(file: SourceFile, schema: Any, name: str) -> None:
    """Raise InputError unless a .parquet file has one column of this name, which may be nested, and it is text."""
    from t5train.data.formats.parquet import column_kinds, is_text

    kinds = column_kinds(schema)
    names = [each for each, _ in kinds]
    if name not in names:
        raise _missing(file, "(all rows)", name, names)
    if names.count(name) > 1:
        raise InputError(f"{file.shown} has more than one column {name!r}. Write the file again with one")
    if not is_text(dict(kinds)[name]):
        raise InputError(
            f"{file.shown}: column {name!r} holds {dict(kinds)[name]} and not text. Choose a column of type string "
            "(#source=, #target=)"
        )


def _missing(file: SourceFile, where: str, name: str, names: Sequence[str]) -> InputError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = ", ".join(map(printable, names[:_SHOWN])) + more
    there = f"only {listed}" if any(names) else "no columns at all"
    return InputError(
        f"{file.shown} {where} has no column {name!r}, {there}{nearest(name, list(names))}. Choose columns with "
        "#source=NAME&target=NAME after the name of the files"
    )

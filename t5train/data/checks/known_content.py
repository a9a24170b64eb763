"""Whether a text with a name, such as psgs_w100, has the columns, rows and ids that it should have."""

from collections.abc import Sequence

from t5train.data.checks.whole_reading import Ids
from t5train.data.passages import SourceFile
from t5train.data.segments import FileSegments
from t5train.errors import InputError
from t5train.spec.known_texts import KnownText


def require_known_columns(known: KnownText, sources: Sequence[SourceFile]) -> None:
    """Raise InputError if a file of a text with a name lacks columns that it should have."""
    from t5train.data.formats.parquet import require_columns  # pyarrow is slow to import

    for source in sources:
        require_columns(source, known.columns)


def require_known_rows(source: str, known: KnownText, text: Sequence[tuple[FileSegments, Ids]]) -> None:
    """Raise InputError if a text with a name has another number of rows, or other ids, than it should have."""
    rows = sum(file.passages + file.empty_passages for file, _ in text)
    if rows != known.rows:
        raise InputError(
            f"corpus.source {source!r} has {rows:,} rows, but should have {known.rows:,}. Its files are not those "
            "that the name stands for: name the text by its URL, if it is the one that you want"
        )
    expected = 1
    for file, ids in text:
        number, found = ids.broken or (0, ids.first)
        rows = file.passages + file.empty_passages
        if known.has_sequential_ids and rows and (ids.broken or found != expected):
            raise InputError(
                f"{file.source.name}, row {number}: the id is {found!r}, but should be {expected + number}, because "
                f"the ids of {source} are numbered from 1. Rows are missing, or the file is another one: remove "
                "it, and download it again"
            )
        expected += rows

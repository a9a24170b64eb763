"""The texts of some rows of a source, stored in one file for access in any order."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import orjson

from t5train.data.readers import rows
from t5train.data.vectors.embeddings import EmbeddingFile
from t5train.progress import Progress, silent

_REPORT_ROWS = 4096


class RowText(NamedTuple):
    """A row of a source, its id and its text."""

    file: str
    """Name of the file below the source."""
    row: int
    """Number of the row in the file, from 0."""
    id: str
    text: str


class RowTexts:
    """Texts by the number of their row in the whole source; a context manager that keeps their file open."""

    def __init__(self, path: Path, stored_rows: np.ndarray, offsets: np.ndarray) -> None:
        self._rows, self._offsets = stored_rows, offsets
        self._file = open(path, "rb")  # noqa: SIM115 - __exit__ closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __getitem__(self, row: int) -> RowText:
        """Return a text that was stored."""
        place = int(np.searchsorted(self._rows, row))
        self._file.seek(int(self._offsets[place]))
        return RowText(*orjson.loads(self._file.read(int(self._offsets[place + 1] - self._offsets[place]))))


def store_texts(
    files: Sequence[EmbeddingFile], wanted: np.ndarray, path: Path, progress: Progress = silent
) -> RowTexts:
    """Write the texts of rows, which are sorted, to a new file. Reads the text of the source once."""
    offsets = np.zeros(len(wanted) + 1, np.int64)
    with open(path, "xb") as out:
        for number, text in enumerate(_texts(files, wanted, progress)):
            out.write(orjson.dumps([*text]))
            offsets[number + 1] = out.tell()
    return RowTexts(path, wanted, offsets)


def _texts(files: Sequence[EmbeddingFile], wanted: np.ndarray, progress: Progress) -> Iterator[RowText]:
    total = sum(each.rows for each in files)
    for each in files:
        inside = wanted[(wanted >= each.first_row) & (wanted < each.first_row + each.rows)] - each.first_row
        remaining = iter(inside.tolist())
        following = next(remaining, None)
        if following is None:
            continue
        for row in rows(each.source, following):
            if row.number == following:
                yield RowText(each.source.name, row.number, row.passage.id, row.passage.text)
                following = next(remaining, None)
                if following is None:
                    break
            if row.number % _REPORT_ROWS == 0:
                progress("passages whose text was read", each.first_row + row.number, total)

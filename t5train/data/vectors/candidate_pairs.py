"""Pairs of rows whose embeddings are similar, kept on disk, because there may be many times as many as rows."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from t5train.data.vectors.directions import Directions
from t5train.data.vectors.embeddings import CHUNK_ROWS, Embeddings, chunks
from t5train.data.vectors.neighbours import NeighbourSearch
from t5train.progress import Progress, silent

BUCKET_ROWS = 1 << 20
"""Pairs are sorted in memory by buckets: those whose smaller row is in the same range of so many rows."""
PAIR = np.dtype([("first", "<i8"), ("second", "<i8"), ("cosine", "<f4")])
_COMPARED = "passages compared by their embeddings"


class CandidatePairs:
    """Pairs of rows in a folder, by buckets. The smaller row comes first."""

    def __init__(self, folder: Path, rows: int, bucket_rows: int = BUCKET_ROWS) -> None:
        self.folder, self.bucket_rows = folder, bucket_rows
        self._buckets = -(-rows // bucket_rows)
        self._involved = np.zeros(rows, bool)

    def add(self, pairs: np.ndarray) -> None:
        """Append pairs, an array of dtype PAIR."""
        self._involved[pairs["first"]] = self._involved[pairs["second"]] = True
        bucket = pairs["first"] // self.bucket_rows
        for number in np.unique(bucket):
            with open(self._file(int(number)), "ab") as file:
                file.write(pairs[bucket == number].tobytes())

    def involved_rows(self) -> np.ndarray:
        """Return the rows that are in a pair, sorted: int64."""
        return np.flatnonzero(self._involved)

    def in_order(self) -> Iterator[np.ndarray]:
        """Yield the pairs, each once, in the order of their rows, in arrays of dtype PAIR."""
        for number in range(self._buckets):
            if self._file(number).exists():
                yield _each_once(np.fromfile(self._file(number), PAIR))

    def _file(self, bucket: int) -> Path:
        return self.folder / f"candidates-{bucket:05d}.bin"


def find_candidates(
    search: NeighbourSearch,
    embeddings: Embeddings,
    neighbours: int,
    least_cosine: float,
    found: CandidatePairs,
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> None:
    """Add each row's nearest neighbours, itself excluded, whose cosine with it is at least ``least_cosine``.

    If the search does not return cosines, cosines come from a copy of all embeddings in the folder of ``found``.
    """
    if search.has_cosines:
        for first_row, vectors in chunks(embeddings, chunk_rows, progress, _COMPARED):
            pairs = _pairs(search, first_row, vectors, neighbours, embeddings.rows)
            found.add(pairs[pairs["cosine"] >= least_cosine])
        return
    with tempfile.TemporaryDirectory(dir=found.folder) as name, open(Path(name) / "directions", "w+b") as file:
        directions = Directions(file, embeddings.dimension)
        proposed = CandidatePairs(Path(name), embeddings.rows, found.bucket_rows)
        for first_row, vectors in chunks(embeddings, chunk_rows, progress, _COMPARED):
            directions.append(vectors)
            proposed.add(_pairs(search, first_row, vectors, neighbours, embeddings.rows))
        for pairs in proposed.in_order():
            pairs["cosine"] = directions.cosines(pairs["first"], pairs["second"])
            found.add(pairs[pairs["cosine"] >= least_cosine])
            progress("cosines of neighbours computed, up to passage", int(pairs["first"][-1]) + 1, embeddings.rows)


def _pairs(search: NeighbourSearch, first_row: int, vectors: np.ndarray, neighbours: int, rows: int) -> np.ndarray:
    """Return rows and their nearest neighbours, themselves excluded, with what the search says of them as cosine."""
    scores, found = search(vectors, min(neighbours + 1, rows))
    own = np.arange(first_row, first_row + len(vectors))[:, np.newaxis]
    is_other = (found >= 0) & (found != own)
    is_other &= np.cumsum(is_other, axis=1) <= neighbours
    query, place = np.nonzero(is_other)
    others = found[query, place]
    pairs = np.empty(len(query), PAIR)
    pairs["first"] = np.minimum(own[query, 0], others)
    pairs["second"] = np.maximum(own[query, 0], others)
    pairs["cosine"] = scores[query, place]
    return pairs


def _each_once(pairs: np.ndarray) -> np.ndarray:
    """Sort pairs. Of one that was found from both of its rows, keep the larger cosine."""
    ordered = pairs[np.lexsort((-pairs["cosine"], pairs["second"], pairs["first"]))]
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = (np.diff(ordered["first"]) != 0) | (np.diff(ordered["second"]) != 0)
    return np.asarray(ordered[is_new])

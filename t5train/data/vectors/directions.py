"""Embeddings on disk, scaled to length 1, for the cosines of pairs: those from the codes of an index are rough.

They take 2 bytes a number. A file of its own is needed because rows of .parquet files cannot be read one by one.
"""

from pathlib import Path
from typing import IO

import numpy as np

PAIRS_AT_ONCE = 4096


class Directions:
    """A growing file of normalised vectors, in the order of their rows."""

    def __init__(self, file: IO[bytes], dimension: int) -> None:
        self._file, self._dimension = file, dimension

    def append(self, vectors: np.ndarray) -> None:
        """Add the vectors of the next rows."""
        self._file.write(normalised(vectors).astype(np.float16).tobytes())

    def cosines(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the cosine of each pair of rows, float32: within 0.001, and 0 for vectors of zeros."""
        self._file.flush()
        stored = np.memmap(Path(self._file.name), np.float16, "r").reshape(-1, self._dimension)
        found = np.empty(len(first), np.float32)
        for start in range(0, len(first), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            one, other = (normalised(stored[rows[part]].astype(np.float32)) for rows in (first, second))
            found[part] = (one * other).sum(axis=1)
        return found


def lengths_of(vectors: np.ndarray) -> np.ndarray:
    """Return the length of each vector."""
    return np.asarray(np.sqrt(np.square(vectors).sum(axis=1)))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1; those of length 0 stay as they are."""
    lengths = lengths_of(vectors)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1)[:, np.newaxis], np.float32)

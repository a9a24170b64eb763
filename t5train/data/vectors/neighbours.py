"""Finds the nearest neighbours of passages by the cosine of their embeddings, with a given index or one built here."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from t5train.data.vectors.embeddings import CHUNK_ROWS, Embeddings, chunks, rows_at, spread_rows
from t5train.data.vectors.faiss_indexes import facts_of, faiss_module, open_index, searched
from t5train.errors import InputError
from t5train.host_resources import format_bytes, host_memory_bytes
from t5train.progress import Progress, silent

EXACT_ROWS = 1 << 16
"""Up to so many vectors, the index that is built here is exact. A larger one stores 8 bits a number."""
_TRAINING_VECTORS_A_LIST = 40
_LISTS_SEARCHED = 32
_MEMORY_SHARE = 0.5


class NeighbourSearch(Protocol):
    """Finds neighbours."""

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines float32 [n, count] and row numbers int64 [n, count], -1 for none; about the nearest ones."""
        ...


class BuiltIndex(NamedTuple):
    """An index of normalised vectors, which was built here."""

    index: Any

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search it."""
        return searched(self.index, _normalised(vectors), count)


class GivenIndex(NamedTuple):
    """An index of the embeddings as they are. The lengths of all vectors turn its scores into cosines."""

    index: Any
    lengths: np.ndarray
    """float32 [rows]."""
    metric: str

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search it."""
        scores, rows = searched(self.index, vectors, count)
        own, others = _lengths(vectors)[:, np.newaxis], self.lengths[np.maximum(rows, 0)]
        products = (np.square(own) + np.square(others) - scores) / 2 if self.metric == "L2" else scores
        return products / np.maximum(own * others, np.finfo(np.float32).tiny), rows


def given_index(
    path: Path, embeddings: Embeddings, *, chunk_rows: int = CHUNK_ROWS, progress: Progress = silent
) -> GivenIndex:
    """Open an index. Reads all embeddings once, for their lengths. Raises InputError if it is not one of them."""
    index = open_index(path)
    facts = facts_of(index)
    if (facts.vectors, facts.dimension) != (embeddings.rows, embeddings.dimension):
        raise InputError(
            f"{path} has {facts.vectors:,} vectors of {facts.dimension} numbers, but the source has "
            f"{embeddings.rows:,} of {embeddings.dimension}. Give the index of this source, or leave --index out to "
            "have one built"
        )
    if facts.metric.startswith("number"):
        raise InputError(
            f"{path} has the FAISS metric {facts.metric}, but cosines can be computed only from inner product and L2. "
            "Give another index, or leave --index out to have one built"
        )
    lengths = np.empty(embeddings.rows, np.float32)
    for first_row, vectors in chunks(embeddings, chunk_rows, progress, "lengths of embeddings computed"):
        lengths[first_row : first_row + len(vectors)] = _lengths(vectors)
    return GivenIndex(index, lengths, facts.metric)


def built_index(
    embeddings: Embeddings,
    seed: int,
    *,
    exact_rows: int = EXACT_ROWS,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> BuiltIndex:
    """Build an index of all embeddings in memory. Raises InputError if the memory of this machine is too small."""
    faiss = faiss_module()
    if embeddings.rows <= exact_rows:
        _require_memory(embeddings.rows * embeddings.dimension * 4)
        index = faiss.IndexFlatIP(embeddings.dimension)
    else:
        lists = 1 << int(np.log2(4 * np.sqrt(embeddings.rows)))
        index = faiss.index_factory(embeddings.dimension, f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.nprobe = min(_LISTS_SEARCHED, lists)
        training = min(_TRAINING_VECTORS_A_LIST * lists, embeddings.rows)
        # The sample as it is and normalised, and for each vector a byte a number and its id.
        _require_memory((training * 8 + embeddings.rows) * embeddings.dimension + embeddings.rows * 8)
        progress("vectors to train the index", 0, None)
        index.train(_normalised(rows_at(embeddings, spread_rows(embeddings.rows, training, seed))))
    for _, vectors in chunks(embeddings, chunk_rows, progress, "embeddings added to the index"):
        index.add(_normalised(vectors))
    return BuiltIndex(index)


def _require_memory(needed_bytes: int) -> None:
    """Raise InputError if building an index would take more than half of the memory."""
    allowed = int(host_memory_bytes() * _MEMORY_SHARE)
    if needed_bytes > allowed:
        raise InputError(
            f"an index of these embeddings needs {format_bytes(needed_bytes)} of memory, but may take at most half of "
            f"this machine's, {format_bytes(allowed)}. Give an index that is on disk (--index), or use a larger machine"
        )


def _lengths(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.square(vectors).sum(axis=1)))


def _normalised(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1; those of length 0 stay as they are."""
    lengths = _lengths(vectors)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1)[:, np.newaxis], np.float32)

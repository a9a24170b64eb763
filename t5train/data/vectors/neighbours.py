"""Finds the nearest neighbours of passages through their embeddings, with a given index or one built here."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from t5train.data.vectors.directions import normalised
from t5train.data.vectors.embeddings import CHUNK_ROWS, Embeddings, chunks, rows_at, spread_rows
from t5train.data.vectors.faiss_indexes import facts_of, faiss_module, open_index, search_lists, searched
from t5train.data.vectors.own_rows import CHECKED_ROWS, LEAST_OWN, share_of_own_rows
from t5train.errors import InputError
from t5train.host_resources import host_memory_bytes
from t5train.progress import Progress, silent
from t5train.quantities import format_bytes

EXACT_ROWS = 1 << 16
"""Up to so many vectors, the index that is built here is exact. A larger one stores 8 bits a number."""
_TRAINING_VECTORS_A_LIST = 40
LISTS_SEARCHED = 32
"""Of an index with lists (IVF). A given one may name more."""
_MEMORY_SHARE = 0.5
_OR_BUILD = "or leave --index out to have one built"


class NeighbourSearch(Protocol):
    """Finds neighbours."""

    @property
    def has_cosines(self) -> bool:
        """Whether what it returns besides row numbers are cosines."""
        ...

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [n, count] and row numbers int64 [n, count], -1 for none; about the nearest ones."""
        ...


class BuiltIndex(NamedTuple):
    """An index of normalised vectors, which was built here."""

    index: Any
    has_cosines: bool = True

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search it."""
        return searched(self.index, normalised(vectors), count)


class GivenIndex(NamedTuple):
    """An index of the embeddings as they are.

    Its scores come from encoded vectors. With product quantisation, those of twins give cosines far below 1.
    """

    index: Any
    path: Path
    rows: int
    has_cosines: bool = False

    def __call__(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Search it. Raises InputError if it finds a row that the source does not have."""
        scores, rows = searched(self.index, vectors, count)
        if (bad := rows[(rows < -1) | (rows >= self.rows)]).size:  # FAISS returns -1 for none
            raise InputError(
                f"{self.path} returns the row {bad[0]:,}, but the source has the rows 0 to {self.rows - 1:,}. Give an "
                f"index whose ids are the rows of this source, {_OR_BUILD}"
            )
        return scores, rows


def given_index(path: Path, embeddings: Embeddings, seed: int = 0) -> GivenIndex:
    """Open an index. Reads a sample of the embeddings. Raises InputError if it is not an index of them."""
    index = open_index(path)
    facts = facts_of(index)
    if (facts.vectors, facts.dimension) != (embeddings.rows, embeddings.dimension):
        raise InputError(
            f"{path} has {facts.vectors:,} vectors of {facts.dimension} numbers, but the source has "
            f"{embeddings.rows:,} of {embeddings.dimension}. Give the index of this source, {_OR_BUILD}"
        )
    if facts.metric.startswith("number"):
        raise InputError(
            f"{path} has the FAISS metric {facts.metric}, but must have inner product or L2. Give another index, "
            f"{_OR_BUILD}"
        )
    rows = spread_rows(embeddings.rows, CHECKED_ROWS, seed)
    share = share_of_own_rows(index, rows, rows_at(embeddings, rows))
    if share is not None and share < LEAST_OWN:
        raise InputError(
            f"{path} stores the vector of the row's own embedding in {share:.2%} of {len(rows):,} rows, but must do so "
            f"in at least {LEAST_OWN:.0%}. Give the index of this source, {_OR_BUILD}"
        )
    search_lists(index, LISTS_SEARCHED)
    return GivenIndex(index, path, embeddings.rows)


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
        index.nprobe = min(LISTS_SEARCHED, lists)
        training = min(_TRAINING_VECTORS_A_LIST * lists, embeddings.rows)
        # The sample as it is and normalised, and for each vector a byte a number and its id.
        _require_memory((training * 8 + embeddings.rows) * embeddings.dimension + embeddings.rows * 8)
        progress("vectors to train the index", 0, None)
        index.train(normalised(rows_at(embeddings, spread_rows(embeddings.rows, training, seed))))
    for _, vectors in chunks(embeddings, chunk_rows, progress, "embeddings added to the index"):
        index.add(normalised(vectors))
    return BuiltIndex(index)


def _require_memory(needed_bytes: int) -> None:
    """Raise InputError if building an index would take more than half of the memory."""
    allowed = int(host_memory_bytes() * _MEMORY_SHARE)
    if needed_bytes > allowed:
        raise InputError(
            f"an index of these embeddings needs {format_bytes(needed_bytes)} of memory, but may take at most half of "
            f"this machine's, {format_bytes(allowed)}. Give an index that is on disk (--index), or use a larger machine"
        )

"""Opens FAISS indexes, memory-mapped: the largest one of wiki_dpr has 38 GB."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t5train.errors import InputError

_METRICS = {0: "inner product", 1: "L2"}


class IndexFacts(NamedTuple):
    """What an index says of itself."""

    kind: str
    vectors: int
    dimension: int
    metric: str


def faiss_module() -> Any:
    """Import faiss. Raises InputError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InputError(
            f"this command needs faiss, which cannot be imported ({error}): pip install 'faiss-cpu>=1.12,<2'"
        ) from None
    return faiss


def open_index(path: Path) -> Any:
    """Open an index. Its vectors stay on disk, for all usual kinds of indexes.

    Raises InputError if the file is no index, or is truncated.
    """
    faiss = faiss_module()
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
    except (RuntimeError, MemoryError) as error:  # MemoryError, because a damaged header may name any size
        raise InputError(
            f"{path} cannot be opened as a FAISS index ({_said(error)}). If it is truncated or damaged, remove it, and "
            "fetch or build it again"
        ) from None


def facts_of(index: Any) -> IndexFacts:
    """Return what an index says of itself."""
    metric = int(index.metric_type)
    return IndexFacts(type(index).__name__, int(index.ntotal), int(index.d), _METRICS.get(metric, f"number {metric}"))


def searched(index: Any, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what an index finds for each vector: scores float32 [n, count] and row numbers int64 [n, count].

    A row number is -1 if fewer vectors were found. Raises InputError if the index turns out to be damaged.
    """
    try:
        scores, rows = index.search(np.ascontiguousarray(vectors), count)
    except RuntimeError as error:
        raise InputError(f"the index cannot be searched ({_said(error)}). Fetch or build it again") from None
    return scores, rows


def search_lists(index: Any, least: int) -> None:
    """Let each search read at least so many lists, if the index has lists (IVF)."""
    if (inverted := faiss_module().try_extract_index_ivf(index)) is not None:
        inverted.nprobe = max(int(inverted.nprobe), min(least, int(inverted.nlist)))


def reconstructed(index: Any, rows: np.ndarray) -> np.ndarray | None:
    """Return the vectors that an index stores for rows, as far as it keeps them; None if it cannot return any.

    A row that the index does not have is NaN.
    """
    faiss = faiss_module()
    vectors = np.full((len(rows), index.d), np.nan, np.float32)
    try:
        if (inverted := faiss.try_extract_index_ivf(index)) is not None:
            inverted.make_direct_map()
    except RuntimeError:
        return None
    for number, row in enumerate(rows):
        with contextlib.suppress(RuntimeError):
            vectors[number] = index.reconstruct(int(row))
    return None if np.isnan(vectors).all() else vectors


def recoded(index: Any, vectors: np.ndarray) -> np.ndarray | None:
    """Return what an index would store for vectors, as it returns it; None if it cannot encode."""
    faiss = faiss_module()
    storage = faiss.downcast_index(index.storage) if hasattr(index, "storage") else index
    try:
        return np.asarray(storage.sa_decode(storage.sa_encode(np.ascontiguousarray(vectors))))
    except RuntimeError:
        return None


def _said(error: BaseException) -> str:
    """Return what faiss says, without the C++ function that says it."""
    said = " ".join(str(error).split())
    return said.rpartition("Error: ")[2] or "it names more memory than there is"

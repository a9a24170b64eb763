"""The share of the exact nearest neighbours that an index finds (recall).

The exact ones are found by comparing each query with all embeddings, which are read once, in chunks. A neighbour counts
as found if its exact score is as good as that of the last one that should be found: of equal vectors, any will do.
"""

import numpy as np

from t5train.data.vectors.embeddings import CHUNK_ROWS, Embeddings, chunks
from t5train.progress import Progress, silent

_ROUNDING = 1e-5
"""Scores that differ by less, relative to the square of a query, count as equal: sums depend on their order."""
NOT_FOUND = -np.inf


def recall_by_rank(
    embeddings: Embeddings,
    queries: np.ndarray,
    found: np.ndarray,
    metric: str,
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> list[float]:
    """Return recall@1, recall@2 ... for the row numbers that an index found: int64 [queries, k], -1 for none."""
    found = _without_repetition(found)
    best, scores = exact_scores(embeddings, queries, found, metric, chunk_rows=chunk_rows, progress=progress)
    sizes = np.square(queries).sum(axis=1)
    recalls: list[float] = []
    for rank in range(1, found.shape[1] + 1):
        last = best[:, rank - 1]
        enough = last - _ROUNDING * np.maximum(np.abs(last), sizes)
        recalls.append(float((scores[:, :rank] >= enough[:, np.newaxis]).sum() / (rank * len(queries))))
    return recalls


def exact_scores(
    embeddings: Embeddings,
    queries: np.ndarray,
    found: np.ndarray,
    metric: str,
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best scores of each query, best first, and the scores of the rows that were found for it.

    The score is the inner product, or for L2 the squared distance with its sign changed.
    """
    count = found.shape[1]
    best = np.full(found.shape, NOT_FOUND, np.float32)
    of_found = np.full(found.shape, NOT_FOUND, np.float32)
    for first_row, vectors in chunks(embeddings, chunk_rows, progress, "embeddings compared exactly"):
        scores = _scores(queries, vectors, metric)
        query, place = np.nonzero((found >= first_row) & (found < first_row + len(vectors)))
        of_found[query, place] = scores[query, found[query, place] - first_row]
        both = np.concatenate([best, scores], axis=1)
        best = np.partition(both, both.shape[1] - count, axis=1)[:, -count:]
    return -np.sort(-best, axis=1), of_found


def _without_repetition(found: np.ndarray) -> np.ndarray:
    """Replace row numbers that a query has found before by -1: an index whose ids are wrong may repeat some."""
    is_repeated = np.tril(found[:, :, np.newaxis] == found[:, np.newaxis, :], k=-1).any(axis=2)
    return np.where(is_repeated, -1, found)


def _scores(queries: np.ndarray, vectors: np.ndarray, metric: str) -> np.ndarray:
    products: np.ndarray = queries @ vectors.T
    if metric == "L2":
        squares = np.square(queries).sum(axis=1)[:, np.newaxis] + np.square(vectors).sum(axis=1)
        return np.asarray(2 * products - squares)
    return products

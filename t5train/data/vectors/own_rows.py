"""Checks that an index stores, for each row, the vector of that row's embedding, as far as it can return vectors."""

from typing import Any

import numpy as np

from t5train.data.vectors.faiss_indexes import recoded, reconstructed

CHECKED_ROWS = 1024
"""At least so many rows are checked, if there are as many."""
LEAST_OWN = 0.99
"""Share of the checked rows. If 5% of all rows are wrong, 1024 rows show it: at most 10 of about 51 could be missed."""
_ROUNDING = 1e-5
"""Of the square of an embedding: the files may have fewer digits than the index (float16, bfloat16)."""
_LOSS = 1.25
"""How much larger the squared error of a stored vector may be than that of encoding its embedding again.

Encoding is usually deterministic, and the two errors are equal. They differ a little if an approximate search assigned
the vector to another list. Another passage's vector has an error that is several times as large, unless it is in the
same cluster and the codes are too coarse to distinguish the two.
"""
_LEAST_NEARER = 0.75
"""Share of comparisons of all checked rows in which a stored vector is nearer to its embedding than to another.

The error of encoding means nothing if the index was trained with other vectors, or with zeros: then all errors are
equally large. But such an index meets half of the comparisons, and even coarse codes of the right vectors nearly all.

The stored vector need not be the nearest of all, because a coarse code may stand for a whole cluster. Nor would that be
enough: consecutive passages are similar, so in an index that is one row off, most vectors are nearest to the right
row of a sample.
"""
_MEDIANS = 4.0
"""How much larger than the median an error may be, if an index cannot encode."""


def share_of_own_rows(index: Any, rows: np.ndarray, embeddings: np.ndarray) -> float | None:
    """Return the share of rows whose stored vector is that of their embedding; None if the index returns no vectors."""
    stored = reconstructed(index, rows)
    if stored is None:
        return None
    sizes = np.square(embeddings).sum(axis=1)
    errors = np.square(stored - embeddings).sum(axis=1)
    encoded = recoded(index, embeddings)
    if encoded is None:
        allowed = np.full(len(rows), _MEDIANS * np.nanmedian(errors))
    else:
        allowed = _LOSS * np.square(encoded - embeddings).sum(axis=1)
    distances = np.square(stored).sum(axis=1)[:, np.newaxis] - 2 * stored @ embeddings.T + sizes
    own = np.diagonal(distances) - _ROUNDING * sizes
    # A row that is missing in the index has NaN, which is in no order to any number.
    if (own[:, np.newaxis] <= distances).mean() < _LEAST_NEARER and len(rows) > 1:
        return 0.0
    return float((errors <= allowed + _ROUNDING * sizes).mean())

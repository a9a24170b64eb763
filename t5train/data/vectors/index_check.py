"""Checks a FAISS index against the embeddings that it should hold, and against what is known of it.

The recall of an index is known from the catalogue or from the first check, which records it under the root.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t5train.data.vectors.embeddings import CHUNK_ROWS, Embeddings, chunks, rows_at, spread_rows
from t5train.data.vectors.faiss_indexes import (
    CHECKED_ROWS,
    LEAST_OWN,
    IndexFacts,
    facts_of,
    open_index,
    search_lists,
    searched,
    share_of_own_rows,
)
from t5train.errors import InputError
from t5train.files.atomic import write_json
from t5train.progress import Progress, silent
from t5train.records.identity import fingerprint
from t5train.spec.known_texts import KnownIndex

LEAST_RECALL = 0.1
"""Of an index whose recall is not known: coarse ones find more, and an index of other vectors finds next to none."""
_LEAST_RECALL_OF = {
    **dict.fromkeys(("IndexFlat", "IndexFlatIP", "IndexFlatL2"), 0.95),
    **dict.fromkeys(("IndexScalarQuantizer", "IndexHNSWFlat", "IndexHNSWSQ"), 0.5),
}
"""By FAISS's name. Flat indexes are exact, but their vectors may have more digits than the files. The recall
of the others depends on the bits per number, the links and efSearch. IVF has no floor here: many search only one list.
"""
_MARGIN = 0.01
"""By which the recall on the same sample may be lower: searches with several threads may differ in the last digits."""
_STANDARD_ERRORS = 3.0
"""By which the recall on another sample may be lower."""
_SEARCHED_AT_ONCE = 16
_ROUNDING = 1e-5
"""Scores that differ by less, relative to the square of a query, count as equal: sums depend on their order."""
_REMEDY = ". Fetch or build the index again; if you changed it on purpose, remove this file"


class Sample(NamedTuple):
    """How recall is measured: the queries are embeddings of the text itself, spread over it."""

    queries: int = 256
    neighbours: int = 10
    seed: int = 0


class Check(NamedTuple):
    """One thing that was checked."""

    what: str
    expected: str
    found: str
    passed: bool


class IndexReport(NamedTuple):
    """What was found about an index."""

    facts: IndexFacts | None
    size_bytes: int
    checks: list[Check]
    recall: list[float]
    """Recall@1, recall@2 ...; empty if the index cannot be compared with the embeddings."""
    recorded: Path | None
    """The file that the recall was recorded in for later checks, if it was not known before."""

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(each.passed for each in self.checks)


class RecallRecord(NamedTuple):
    """The file under a root that has the recall of the first check, for an index, a source and a sample."""

    folder: Path
    identity: dict[str, Any]

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{fingerprint(self.identity)[:16]}.json"

    def with_contents(self, facts: IndexFacts, size_bytes: int, embeddings: Embeddings) -> "RecallRecord":
        """Return the record of what the path or URL has now, because another index may have been put there."""
        contents = {**facts._asdict(), "size_bytes": size_bytes, "embeddings": embeddings.rows}
        return self._replace(identity={**self.identity, "contents": contents})

    def read(self) -> float | None:
        """Return the recorded recall; None if there is none. Raises InputError if the file is damaged."""
        try:
            return float(json.loads(self.path.read_bytes())["recall"][-1])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{self.path} is damaged ({error}). Remove it; the next check records it again") from None

    def write(self, facts: IndexFacts, recall: Sequence[float]) -> None:
        """Record the recall."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(
            self.path, {"schema_version": 1, "of": self.identity, "index": facts._asdict(), "recall": list(recall)}
        )


def recall_record(root: Path, source: str, revision: str, index: str, sample: Sample) -> RecallRecord:
    """Return the record of an index, given by its path or URL. The check adds what is found there."""
    identity = {"source": source, "revision": revision, "index": index, **sample._asdict()}
    return RecallRecord(root / "index-checks", identity)


def check_index(
    path: Path,
    known: KnownIndex | None,
    embeddings: Embeddings,
    sample: Sample,
    record: RecallRecord,
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> IndexReport:
    """Compare an index with the embeddings and with what is known of it, and measure its recall.

    Reads all embeddings once, and a sample of them before. Raises InputError if an embedding is malformed.
    """
    size_bytes = path.stat().st_size
    checks = _size_checks(size_bytes, known)
    try:
        index = open_index(path)
    except InputError as error:
        return IndexReport(None, size_bytes, [*checks, Check("opened by faiss", "yes", str(error), False)], [], None)
    facts = facts_of(index)
    checks += _fact_checks(facts, known, embeddings)
    if facts.dimension != embeddings.dimension or facts.vectors != embeddings.rows:
        return IndexReport(facts, size_bytes, checks, [], None)
    rows = spread_rows(embeddings.rows, max(sample.queries, CHECKED_ROWS), sample.seed)
    vectors = rows_at(embeddings, rows)
    checks += _own_row_checks(share_of_own_rows(index, rows, vectors))
    queries = vectors[spread_rows(len(vectors), sample.queries, sample.seed)]
    found = _found(index, queries, min(sample.neighbours, embeddings.rows), progress)
    metric = known.metric if known is not None else facts.metric
    recall = recall_by_rank(embeddings, queries, found, metric, chunk_rows=chunk_rows, progress=progress)
    record = record.with_contents(facts, size_bytes, embeddings)
    expected = _expected(known, record, facts, len(recall), len(queries))
    checks.append(_recall_check(recall, expected))
    report = IndexReport(facts, size_bytes, checks, recall, None)
    if expected.is_known or not report.passed:
        return report
    record.write(facts, recall)
    return report._replace(recorded=record.path)


def given_index(path: Path, embeddings: Embeddings, seed: int = 0) -> Any:
    """Open an index for a search of near-duplicates. Reads a sample of the embeddings.

    Raises InputError unless it is an index of them.
    """
    index = open_index(path)
    _require_passed(path, _fact_checks(facts_of(index), None, embeddings))
    rows = spread_rows(embeddings.rows, CHECKED_ROWS, seed)
    _require_passed(path, _own_row_checks(share_of_own_rows(index, rows, rows_at(embeddings, rows))))
    search_lists(index)
    return index


def _require_passed(path: Path, checks: Sequence[Check]) -> None:
    for each in checks:
        if not each.passed:
            raise InputError(
                f"{path} is not an index of this source. Its {each.what}: {each.found}; expected: {each.expected}. "
                "Give the index of this source, or leave --index out to have one built"
            )


class _Expected(NamedTuple):
    least: float
    because: str
    is_known: bool
    remedy: str = ""


def _expected(
    known: KnownIndex | None, record: RecallRecord, facts: IndexFacts, neighbours: int, queries: int
) -> _Expected:
    """Return the recall that an index must reach."""
    catalogued = None if known is None else known.recall.get(neighbours)
    if catalogued is not None:
        error = math.sqrt(catalogued * (1 - catalogued) / queries)
        return _Expected(catalogued - _STANDARD_ERRORS * error - _MARGIN, f"catalogue: {catalogued:.4f}", True)
    recorded = record.read()
    if recorded is not None:
        return _Expected(recorded - _MARGIN, f"{recorded:.4f} in {record.path}", True, _REMEDY)
    return _Expected(_LEAST_RECALL_OF.get(facts.kind, LEAST_RECALL), f"not known yet, of {facts.kind}", False)


def _size_checks(size_bytes: int, known: KnownIndex | None) -> list[Check]:
    if known is None:
        return []
    expected = known.size_bytes
    return [Check("size in bytes", f"{expected:,}", f"{size_bytes:,}", size_bytes == expected)]


def _fact_checks(facts: IndexFacts, known: KnownIndex | None, embeddings: Embeddings) -> list[Check]:
    vectors = Check("vectors", f"{embeddings.rows:,}", f"{facts.vectors:,}", facts.vectors == embeddings.rows)
    dimension = Check(
        "dimension", str(embeddings.dimension), str(facts.dimension), facts.dimension == embeddings.dimension
    )
    if known is None:
        is_supported = not facts.metric.startswith("number")
        return [vectors, dimension, Check("metric", "inner product or L2", facts.metric, is_supported)]
    of_catalogue = Check(
        "embeddings, by the catalogue",
        f"{known.vectors:,} of {known.dimension}",
        f"{embeddings.rows:,} of {embeddings.dimension}",
        (known.vectors, known.dimension) == (embeddings.rows, embeddings.dimension),
    )
    return [of_catalogue, vectors, dimension, Check("metric", known.metric, facts.metric, facts.metric == known.metric)]


def _own_row_checks(share: float | None) -> list[Check]:
    if share is None:
        return []
    return [
        Check("vectors of their own rows", f"in at least {LEAST_OWN:.0%} of rows", f"{share:.2%}", share >= LEAST_OWN)
    ]


def _recall_check(recall: Sequence[float], expected: _Expected) -> Check:
    passed = recall[-1] >= expected.least
    because = expected.because if passed else expected.because + expected.remedy
    return Check(f"recall@{len(recall)}", f"at least {expected.least:.4f} ({because})", f"{recall[-1]:.4f}", passed)


def _found(index: Any, queries: np.ndarray, neighbours: int, progress: Callable[..., None]) -> np.ndarray:
    """Return what the index finds. A few queries at a time, because each reads many places of a large file."""
    found: list[np.ndarray] = []
    for first in range(0, len(queries), _SEARCHED_AT_ONCE):
        found.append(searched(index, queries[first : first + _SEARCHED_AT_ONCE], neighbours)[1])
        progress("queries searched with the index", min(first + _SEARCHED_AT_ONCE, len(queries)), len(queries))
    return np.concatenate(found)


def recall_by_rank(
    embeddings: Embeddings,
    queries: np.ndarray,
    found: np.ndarray,
    metric: str,
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> list[float]:
    """Return recall@1, recall@2 ... for the row numbers that an index found: int64 [queries, k], -1 for none.

    The exact neighbours are found by comparing each query with all embeddings, which are read once, in chunks. A row
    counts as a neighbour if its score is as good as that of the last exact one: of equal vectors, any will do.
    """
    found = _without_repetition(found)
    best = np.full(found.shape, -np.inf, np.float32)
    of_found = best.copy()
    for first_row, vectors in chunks(embeddings, chunk_rows, progress, "embeddings compared exactly"):
        scores = _scores(queries, vectors, metric)
        query, place = np.nonzero((found >= first_row) & (found < first_row + len(vectors)))
        of_found[query, place] = scores[query, found[query, place] - first_row]
        both = np.concatenate([best, scores], axis=1)
        best = np.partition(both, -found.shape[1], axis=1)[:, -found.shape[1] :]
    best = -np.sort(-best, axis=1)
    enough = best - _ROUNDING * np.maximum(np.abs(best), np.square(queries).sum(axis=1, keepdims=True))
    ranks = range(1, found.shape[1] + 1)
    return [float((of_found[:, :rank] >= enough[:, rank - 1 : rank]).mean()) for rank in ranks]


def _without_repetition(found: np.ndarray) -> np.ndarray:
    """Replace row numbers that a query has found before by -1: an index whose ids are wrong may repeat some."""
    is_repeated = np.tril(found[:, :, np.newaxis] == found[:, np.newaxis, :], k=-1).any(axis=2)
    return np.where(is_repeated, -1, found)


def _scores(queries: np.ndarray, vectors: np.ndarray, metric: str) -> np.ndarray:
    """Return the inner products, or for L2 the squared distances with their sign changed."""
    products: np.ndarray = queries @ vectors.T
    if metric == "L2":
        squares = np.square(queries).sum(axis=1)[:, np.newaxis] + np.square(vectors).sum(axis=1)
        return np.asarray(2 * products - squares)
    return products

"""Near-duplicates: pairs of passages that their embeddings propose and their texts confirm, written as JSON lines."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from t5train.data.checks.listed_pairs import PAIRS_KIND, PAIRS_VERSION
from t5train.data.vectors.candidate_pairs import BUCKET_ROWS, CandidatePairs, find_candidates
from t5train.data.vectors.embeddings import Embeddings
from t5train.data.vectors.neighbours import NeighbourSearch
from t5train.data.vectors.row_texts import RowTexts, store_texts
from t5train.data.vectors.text_similarity import NEAR_DUPLICATE, similarity, word_grams
from t5train.files.atomic import replacing
from t5train.progress import Progress, silent

BINS = 20
"""Of the histogram of text similarities, from 0 to 1."""
_REPORT_PAIRS = 1000


class Thresholds(NamedTuple):
    """What makes two passages candidates, and what makes candidates near-duplicates."""

    neighbours: int = 10
    """So many nearest neighbours of each passage are candidates."""
    cosine: float = 0.9
    """Of the embeddings, at least."""
    text: float = NEAR_DUPLICATE
    """Of the texts, at least."""


class NearDuplicates(NamedTuple):
    """What was found."""

    passages: int
    candidates: int
    """Pairs that the embeddings proposed."""
    pairs: int
    """Pairs that the texts confirmed."""
    groups: int
    """Sets of passages that are connected by such pairs."""
    copies: int
    """Passages that are not the first of their group."""
    histogram: list[int]
    """Candidates by the similarity of their texts, in bins of equal width from 0 to 1."""


class Sizes(NamedTuple):
    """How much is in memory at a time. The result does not depend on it.

    So many passages are compared with the index before progress is reported, because a large index takes its time.
    """

    chunk_rows: int = 1024
    bucket_rows: int = BUCKET_ROWS


_USUAL = Sizes()


class _Groups:
    """Connected passages, as a forest in which each passage points to another one of its group."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def join(self, row: int, other: int) -> None:
        first, second = sorted((self._root(row), self._root(other)))
        self._parents[second] = first

    def counts(self) -> tuple[int, int]:
        """Return the number of groups, and of passages that are not the first of one."""
        groups = sum(row == parent for row, parent in self._parents.items())
        return groups, len(self._parents) - groups

    def _root(self, row: int) -> int:
        parents = self._parents
        parents.setdefault(row, row)
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row


def find_near_duplicates(
    embeddings: Embeddings,
    search: NeighbourSearch,
    thresholds: Thresholds,
    out: Path,
    *,
    about: dict[str, Any],
    sizes: Sizes = _USUAL,
    progress: Progress = silent,
) -> NearDuplicates:
    """Write the near-duplicates to ``out``, in the order of their rows, and return the counts.

    The first line has the counts, the thresholds and what ``about`` says; each other line is a pair. Candidates and
    their texts are in a temporary folder beside ``out`` meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch)
        candidates = CandidatePairs(folder, embeddings.rows, sizes.bucket_rows)
        find_candidates(
            search,
            embeddings,
            thresholds.neighbours,
            thresholds.cosine,
            candidates,
            chunk_rows=sizes.chunk_rows,
            progress=progress,
        )
        with (
            store_texts(embeddings.files, candidates.involved_rows(), folder / "texts", progress) as texts,
            open(folder / "pairs", "w+b") as pairs,
        ):
            found = _decide(embeddings.rows, candidates.in_order(), texts, thresholds.text, pairs, progress)
            pairs.seek(0)
            _write(out, {**about, **thresholds._asdict(), **found._asdict()}, pairs)
    return found


def _decide(
    passages: int,
    candidates: Iterable[np.ndarray],
    texts: RowTexts,
    least: float,
    out: IO[bytes],
    progress: Progress,
) -> NearDuplicates:
    """Write the candidates whose texts are similar enough, and count."""
    histogram, groups = np.zeros(BINS, np.int64), _Groups()
    compared = pairs = 0
    for pair, value in _with_similarity(candidates, texts):
        histogram[min(int(value * BINS), BINS - 1)] += 1
        compared += 1
        if value >= least:
            pairs += 1
            groups.join(int(pair["first"]), int(pair["second"]))
            out.write(_line(pair, value, texts))
        if compared % _REPORT_PAIRS == 0:
            progress("candidate pairs compared by their texts", compared, None)
    num_groups, copies = groups.counts()
    return NearDuplicates(passages, compared, pairs, num_groups, copies, histogram.tolist())


def _with_similarity(candidates: Iterable[np.ndarray], texts: RowTexts) -> Iterator[tuple[np.void, float]]:
    row, grams = -1, word_grams("")
    for bucket in candidates:
        for pair in bucket:
            if int(pair["first"]) != row:
                row = int(pair["first"])
                grams = word_grams(texts[row].text)
            yield pair, similarity(grams, word_grams(texts[int(pair["second"])].text))


def _line(pair: np.void, value: float, texts: RowTexts) -> bytes:
    both = {
        name: {"file": text.file, "row": text.row, "id": text.id}
        for name in ("first", "second")
        for text in [texts[int(pair[name])]]
    }
    shown = {"text_similarity": round(value, 6), "cosine": round(float(pair["cosine"]), 3)}
    return orjson.dumps(both | shown) + b"\n"


def _write(out: Path, header: dict[str, Any], pairs: IO[bytes]) -> None:
    with replacing(out) as file:
        file.write(orjson.dumps({"kind": PAIRS_KIND, "schema_version": PAIRS_VERSION, **header}) + b"\n")
        shutil.copyfileobj(pairs, file)

"""Near-duplicates: pairs of passages that their embeddings propose and their texts confirm, written as JSON lines.

The similarity of two texts is the Jaccard index of their sets of 5-grams: the number of different runs of five
consecutive words (those of ``t5train.data.checks.word_grams``) that both have, divided by the number that at least one
has. A text of one to four words has one run, all its words. A text without words has none, and is similar to nothing.

The default threshold is 0.8. In a passage of 100 words, a changed word that is not near an end changes five of 96 runs:
with one changed word the similarity is 91/101 = 0.90, with two 86/106 = 0.81, and with three 81/111 = 0.73. So 0.8
admits two changed words in a passage of wiki_dpr, or a shift by ten words (86/106), but no text that merely has the
same subject.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from t5train.data.checks.equal_groups import join_groups
from t5train.data.checks.listed_pairs import PAIRS_KIND, PAIRS_VERSION
from t5train.data.checks.word_grams import NEAR_DUPLICATE_WORDS, words_of
from t5train.data.readers import rows
from t5train.data.vectors.embeddings import EmbeddingFile, Embeddings, chunks, normalised
from t5train.data.vectors.faiss_indexes import searched
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.files.os_errors import naming
from t5train.host_resources import host_memory_bytes, require_free_space
from t5train.progress import Progress, silent
from t5train.quantities import format_bytes

NEAR_DUPLICATE = 0.8
BINS = 20
"""Of the histogram of text similarities, from 0 to 1."""
CHUNK_ROWS = 1024
"""So many passages are searched for before progress is reported, because a large index takes its time."""
_PAIRS_AT_ONCE = 1000
_REPORT_ROWS = 4096
_MEMORY_SHARE = 0.5
_BYTES_A_PAIR = 40
"""Of memory: its number twice when all are sorted, and the two rows and a copy of them afterwards."""


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


def find_near_duplicates(
    embeddings: Embeddings,
    index: Any,
    thresholds: Thresholds,
    out: Path,
    *,
    about: dict[str, Any],
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress = silent,
) -> NearDuplicates:
    """Write the near-duplicates to ``out``, in the order of their rows, and return the counts.

    The first line has the counts, the thresholds and what ``about`` says, whose ``index`` is named in errors; each
    other line is a pair. Meanwhile, the embeddings (2 bytes a number) and the texts of candidates are in a temporary
    folder beside ``out``; the row numbers of all candidates are in memory. Raises InputError if they need too much of
    it, or if the index returns rows that the source does not have, and StorageError if the disk is too small for the
    embeddings.
    """
    require_free_space(out.parent, 2 * embeddings.rows * embeddings.dimension, "the embeddings")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        directions = _stored_directions(embeddings, Path(folder) / "directions", chunk_rows, progress)
        name = about.get("index") or "the index"
        candidates = _candidates(embeddings, index, name, directions, thresholds, chunk_rows, progress)
        with open(Path(folder) / "texts", "w+b") as stored, open(Path(folder) / "pairs", "w+b") as pairs:
            texts = _StoredTexts(stored, np.unique(candidates), embeddings.files, progress)
            found = _decide(candidates, directions, texts, thresholds.text, pairs, progress)
            pairs.seek(0)
            header = {**about, **thresholds._asdict(), **found._asdict()}
            with replacing(out) as file:
                file.write(orjson.dumps({"kind": PAIRS_KIND, "schema_version": PAIRS_VERSION, **header}) + b"\n")
                shutil.copyfileobj(pairs, file)
    return found


def word_grams(text: str) -> frozenset[tuple[str, ...]]:
    """Return the different runs of five consecutive words of a text."""
    words = words_of(text)
    if len(words) < NEAR_DUPLICATE_WORDS:
        return frozenset([tuple(words)]) if words else frozenset()
    return frozenset(zip(*(islice(words, start, None) for start in range(NEAR_DUPLICATE_WORDS)), strict=False))


def similarity(grams: frozenset[tuple[str, ...]], others: frozenset[tuple[str, ...]]) -> float:
    """Return the Jaccard index of two sets of runs: from 0 to 1."""
    shared = len(grams & others)
    return shared / (len(grams) + len(others) - shared) if shared else 0.0


def _stored_directions(embeddings: Embeddings, path: Path, chunk_rows: int, progress: Progress) -> np.ndarray:
    """Return all embeddings, scaled to length 1, as an array on disk: float16 [rows, dimension].

    Cosines come from it, because those from the codes of an index are rough, and rows of .parquet files cannot be read
    one by one.
    """
    shape = (embeddings.rows, embeddings.dimension)
    with naming(path), open(path, "wb") as file:  # a full disk would kill a process that writes to mapped memory
        for _, vectors in chunks(embeddings, chunk_rows, progress, "embeddings stored"):
            file.write(normalised(vectors).astype(np.float16).tobytes())
    return np.memmap(path, np.float16, "r", shape=shape)


def _cosines(directions: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows, float32: within 0.001, and 0 for vectors of zeros."""
    first, second = (normalised(directions[pairs[:, side]].astype(np.float32)) for side in (0, 1))
    return np.asarray((first * second).sum(axis=1))


def _candidates(
    embeddings: Embeddings,
    index: Any,
    name: str,
    directions: np.ndarray,
    thresholds: Thresholds,
    chunk_rows: int,
    progress: Progress,
) -> np.ndarray:
    """Return the pairs of rows of which one is among the nearest neighbours of the other: int64 [pairs, 2], sorted.

    Their cosine is at least that of ``thresholds``. The smaller row of a pair comes first.
    """
    found, most_bytes = [np.empty(0, np.int64)], int(host_memory_bytes() * _MEMORY_SHARE)
    for first_row, vectors in chunks(embeddings, chunk_rows, progress, "passages compared by their embeddings"):
        pairs = _pairs(index, name, first_row, vectors, thresholds.neighbours, embeddings.rows)
        is_near = [
            _cosines(directions, pairs[start : start + _PAIRS_AT_ONCE]) >= thresholds.cosine
            for start in range(0, len(pairs), _PAIRS_AT_ONCE)
        ]
        near = pairs[np.concatenate(is_near)] if is_near else pairs
        found.append(np.unique(near[:, 0] * embeddings.rows + near[:, 1]))  # half the memory of two numbers
        if (needed_bytes := _BYTES_A_PAIR * sum(map(len, found))) > most_bytes:
            raise InputError(
                f"the candidates of {first_row + len(vectors):,} of {embeddings.rows:,} passages need "
                f"{format_bytes(needed_bytes)} of memory, but all may take at most half of this machine's, "
                f"{format_bytes(most_bytes)}. Compare fewer (--neighbours, or a higher --cosine), or use a larger "
                "machine"
            )
    return np.stack(np.divmod(np.unique(np.concatenate(found)), embeddings.rows), axis=1)


def _pairs(index: Any, name: str, first_row: int, vectors: np.ndarray, neighbours: int, rows: int) -> np.ndarray:
    """Return consecutive rows with their nearest neighbours, themselves excluded: int64 [pairs, 2].

    ``name`` is that of the index, for errors.
    """
    _, found = searched(index, vectors, min(neighbours + 1, rows))
    if (bad := found[(found < -1) | (found >= rows)]).size:  # FAISS returns -1 for none
        raise InputError(
            f"{name} returns the row {bad[0]:,}, but the source has the rows 0 to {rows - 1:,}. Give an index whose "
            "ids are the rows of this source, or leave --index out to have one built"
        )
    own = np.arange(first_row, first_row + len(vectors))[:, np.newaxis]
    is_other = (found >= 0) & (found != own)
    is_other &= np.cumsum(is_other, axis=1) <= neighbours
    pairs = np.stack([np.broadcast_to(own, found.shape)[is_other], found[is_other]], axis=1)
    return np.sort(pairs, axis=1)


class _StoredTexts:
    """The texts of some rows of a source in a file, for access in any order."""

    def __init__(
        self, file: IO[bytes], wanted: np.ndarray, sources: Sequence[EmbeddingFile], progress: Progress
    ) -> None:
        """Write the texts of the rows ``wanted``, which are sorted. Reads the text of the source once."""
        self._file, self._rows, self._offsets = file, wanted, np.zeros(len(wanted) + 1, np.int64)
        for number, text in enumerate(_texts(sources, wanted, progress)):
            file.write(orjson.dumps(text))
            self._offsets[number + 1] = file.tell()

    def __getitem__(self, row: int) -> tuple[dict[str, Any], str]:
        """Return how the result names a row, and its text."""
        place = int(np.searchsorted(self._rows, row))
        self._file.seek(int(self._offsets[place]))
        named, text = orjson.loads(self._file.read(int(self._offsets[place + 1] - self._offsets[place])))
        return named, text


def _texts(
    sources: Sequence[EmbeddingFile], wanted: np.ndarray, progress: Progress
) -> Iterator[tuple[dict[str, Any], str]]:
    total = sum(each.rows for each in sources)
    for each in sources:
        inside = wanted[(wanted >= each.first_row) & (wanted < each.first_row + each.rows)] - each.first_row
        if not len(inside):
            continue
        first, last, numbers = int(inside[0]), int(inside[-1]), {*inside.tolist()}
        for row in islice(rows(each.source, first), last + 1 - first):
            if row.number in numbers:
                yield {"file": each.source.name, "row": row.number, "id": row.passage.id}, row.passage.text
            if row.number % _REPORT_ROWS == 0:
                progress("passages whose text was read", each.first_row + row.number, total)


def _decide(
    candidates: np.ndarray,
    directions: np.ndarray,
    texts: _StoredTexts,
    least: float,
    out: IO[bytes],
    progress: Progress,
) -> NearDuplicates:
    """Write the candidates whose texts are similar enough, and count."""
    histogram, confirmed = np.zeros(BINS, np.int64), list[np.ndarray]()
    row, first, grams = -1, dict[str, Any](), word_grams("")
    for start in range(0, len(candidates), _PAIRS_AT_ONCE):
        some = candidates[start : start + _PAIRS_AT_ONCE]
        for pair, cosine in zip(some, _cosines(directions, some), strict=True):
            if pair[0] != row:
                row = int(pair[0])
                first, text = texts[row]
                grams = word_grams(text)
            second, text = texts[int(pair[1])]
            value = similarity(grams, word_grams(text))
            histogram[min(int(value * BINS), BINS - 1)] += 1
            if value >= least:
                confirmed.append(pair)
                shown = {"text_similarity": round(value, 6), "cosine": round(float(cosine), 3)}
                out.write(orjson.dumps({"first": first, "second": second, **shown}) + b"\n")
        progress("candidate pairs compared by their texts", start + len(some), len(candidates))
    groups, copies = _counted_groups(np.array(confirmed, np.int64).reshape(-1, 2))
    return NearDuplicates(len(directions), len(candidates), len(confirmed), groups, copies, histogram.tolist())


def _counted_groups(pairs: np.ndarray) -> tuple[int, int]:
    """Return the number of groups that pairs connect, and of passages that are not the first of one."""
    passages, places = np.unique(pairs, return_inverse=True)
    firsts = np.arange(len(passages))
    join_groups(firsts, places.reshape(-1, 2))
    groups = len(np.unique(firsts))
    return groups, len(passages) - groups

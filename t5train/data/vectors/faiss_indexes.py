"""FAISS indexes of embeddings: finds and opens the one that a user names, or builds one.

Indexes are memory-mapped, because the largest one of wiki_dpr has 38 GB.
"""

import contextlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import numpy as np

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_commit import files_at, record_commit, repository_of
from t5train.data.download.remote_reading import Backoff, is_busy, storage_options
from t5train.data.sources import Downloads
from t5train.data.vectors.embeddings import Embeddings, chunks, normalised, rows_at, spread_rows
from t5train.errors import InputError
from t5train.files.confined import confined
from t5train.host_resources import host_memory_bytes
from t5train.progress import Progress, silent
from t5train.quantities import format_bytes, quantity
from t5train.records.locations import explained, local_folder, redacted
from t5train.spec.known_texts import KnownIndex, known_indexes

_METRICS = {0: "inner product", 1: "L2"}
EXACT_ROWS = 1 << 16
"""Up to so many vectors, the index that is built here is exact. A larger one stores 8 bits a number."""
_TRAINING_VECTORS_A_LIST = 40
LISTS_SEARCHED = 32
"""Of an index with lists (IVF). A given one may name more."""
_MEMORY_SHARE = 0.5
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


class ChosenIndex(NamedTuple):
    """The index that a user names."""

    location: str
    """Absolute path or URL."""
    known: KnownIndex | None


def chosen_index(source: str, name: str) -> ChosenIndex:
    """Return the index with this name, path or URL. Raises InputError if a path is that of no file."""
    indexes = known_indexes(source)
    if name in indexes:
        return ChosenIndex(indexes[name].location, indexes[name])
    path = local_folder(name)
    if path is None:
        return ChosenIndex(name, None)
    if not path.is_file():
        names = f"{source} has indexes named {' and '.join(indexes)}" if indexes else f"{redacted(source)} has none"
        raise InputError(
            f"--index is {name!r}, which is neither a file nor the name of an index ({names}). Give the path or URL of "
            "a FAISS index"
        )
    return ChosenIndex(str(path), None)


def local_index(chosen: ChosenIndex, revision: str, root: Path, progress: Progress) -> Path:
    """Return the path of an index on this machine. A remote one is downloaded to ``{root}/cache``.

    Raises InputError before the download if its size is not the one that is known of it.
    """
    path = local_folder(chosen.location)
    if path is not None:
        return path
    with explained(chosen.location, "cannot be read (--index)", InputError):
        location = chosen.location
        if chosen.known is not None and (repository := repository_of(location)) is not None:
            # The commit of the embeddings.
            location = files_at(location, repository, record_commit(repository, revision, root))
        downloads = Downloads(location, revision, root, whole_files=True)
        kept = downloads.kept()
        if kept is not None:
            return kept[0].path
        cache = downloads.folder
        filesystem, remote = fsspec.core.url_to_fs(location, **storage_options(location))
        _require_size(filesystem, remote, chosen)
        place = confined(cache, PurePosixPath(remote).name, redacted(chosen.location), InputError)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        download(filesystem, cache, [Wanted(remote, place)], progress)
    return place


def _require_size(filesystem: Any, remote: str, chosen: ChosenIndex) -> None:
    size = Backoff().retried(lambda: filesystem.size(remote), redacted(remote), is_busy)
    if chosen.known is not None and size not in {None, chosen.known.size_bytes}:
        raise InputError(
            f"{redacted(chosen.location)} has {quantity(size, 'byte')}, but should have {chosen.known.size_bytes:,}. "
            "The store has another file under this name: to check that one, give its URL with --index"
        )


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


def search_lists(index: Any) -> None:
    """Let each search read at least ``LISTS_SEARCHED`` lists, if the index has lists (IVF)."""
    if (inverted := faiss_module().try_extract_index_ivf(index)) is not None:
        inverted.nprobe = max(int(inverted.nprobe), min(LISTS_SEARCHED, int(inverted.nlist)))


def share_of_own_rows(index: Any, rows: np.ndarray, embeddings: np.ndarray) -> float | None:
    """Return the share of rows whose stored vector is that of their embedding; None if the index returns no vectors."""
    stored = _reconstructed(index, rows)
    if stored is None:
        return None
    sizes = np.square(embeddings).sum(axis=1)
    errors = np.square(stored - embeddings).sum(axis=1)
    encoded = _recoded(index, embeddings)
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


def built_index(embeddings: Embeddings, seed: int, *, exact_rows: int = EXACT_ROWS, progress: Progress = silent) -> Any:
    """Build an index of all embeddings, scaled to length 1, in memory.

    Raises InputError if the memory of this machine is too small.
    """
    faiss = faiss_module()
    if embeddings.rows <= exact_rows:
        _require_memory(embeddings.rows * embeddings.dimension * 4)
        index = faiss.IndexFlatIP(embeddings.dimension)
    else:
        lists = 1 << int(np.log2(4 * np.sqrt(embeddings.rows)))
        index = faiss.index_factory(embeddings.dimension, f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        search_lists(index)
        training = min(_TRAINING_VECTORS_A_LIST * lists, embeddings.rows)
        # The sample as it is and normalised, and for each vector a byte a number and its id.
        _require_memory((training * 8 + embeddings.rows) * embeddings.dimension + embeddings.rows * 8)
        progress("vectors to train the index", 0, None)
        index.train(normalised(rows_at(embeddings, spread_rows(embeddings.rows, training, seed))))
    for _, vectors in chunks(embeddings, progress=progress, what="embeddings added to the index"):
        index.add(normalised(vectors))
    return index


def _reconstructed(index: Any, rows: np.ndarray) -> np.ndarray | None:
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


def _recoded(index: Any, vectors: np.ndarray) -> np.ndarray | None:
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


def _require_memory(needed_bytes: int) -> None:
    """Raise InputError if building an index would take more than half of the memory."""
    allowed = int(host_memory_bytes() * _MEMORY_SHARE)
    if needed_bytes > allowed:
        raise InputError(
            f"an index of these embeddings needs {format_bytes(needed_bytes)} of memory, but may take at most half of "
            f"this machine's, {format_bytes(allowed)}. Give an index that is on disk (--index), or use a larger machine"
        )

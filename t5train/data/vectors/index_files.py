"""Finds the files of a source with embeddings and of its FAISS index, and downloads those that are remote.

What can be refused is refused before anything is downloaded.
"""

from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_commit import files_at, record_commit, repository_of
from t5train.data.download.remote_reading import Backoff, is_busy, storage_options
from t5train.data.download.source_listing import few
from t5train.data.passages import SourceFile
from t5train.data.sources import Downloads, local_files, require_source
from t5train.errors import InputError
from t5train.files.confined import confined
from t5train.locations import explained, local_folder, redacted
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.spec.known_texts import BUILT_IN, KnownIndex, known_indexes


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


def require_embeddings(source: str, revision: str, root: Path) -> None:
    """Raise InputError unless a source exists and has only .parquet files. Downloads nothing."""
    if source == BUILT_IN:
        raise InputError(f"{source} has no embeddings. Name .parquet files that have some")
    names = require_source(source, revision, root, whole_files=True).sizes
    others = [name for name in names if not name.endswith(".parquet")]
    if others:
        raise InputError(
            f"{redacted(source)} has {quantity(len(others), 'file')} in other formats than .parquet, which have no "
            f"embeddings: {few(others)}. Name .parquet files only, for example with a pattern"
        )


def embedding_sources(source: str, revision: str, root: Path, progress: Progress) -> list[SourceFile]:
    """Return the files of a source on this machine. Remote ones are downloaded whole, with their embeddings."""
    return local_files(source, revision, root, progress, whole_files=True)


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

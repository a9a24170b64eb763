"""The corpus stage: find or create the text, verify every file, and record where its rows are."""

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from t5train.data.download.partial_file import whole_digest
from t5train.data.output_folder import making, stage_folder
from t5train.data.passages import SourceFile, TextDigests
from t5train.data.readers import FRAMES, is_compressed
from t5train.data.segments import SEGMENTS, FileSegments, Segment, write_segments
from t5train.data.sources import PYDOCS, local_files, pydocs_files, write_pydocs
from t5train.data.worker_processes import Json, in_processes
from t5train.errors import InputError
from t5train.files.os_errors import explain
from t5train.host_resources import num_cores, require_free_space, require_writable
from t5train.locations import redacted
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, digest_file, digest_files
from t5train.records.identity import fingerprint
from t5train.records.kept_files import keep_changed_files
from t5train.records.stage_records import REPEATED, Corpus, reusable
from t5train.spec import CorpusSpec
from t5train.spec.known_texts import KnownText, known_texts

_STAGE_VERSION = 1  # incremented when the same files would give another corpus
_PYDOCS_FILE = "pydocs.jsonl"
FRAMED_FROM_BYTES = 128 << 20
"""Compressed files of this size or more also get a seekable copy of their passages. Without the copy, each shard would
decompress the file from the beginning."""
_FRAMES_SIZE = 2.2
"""Largest size of that copy relative to the compressed file. Measured: 1.1 to 1.6 for .gz, up to 2.1 for .xz."""
_log = logging.getLogger(__name__)


def build_corpus(spec: CorpusSpec, root: Path, progress: Progress = silent, *, out: Path | None = None) -> Corpus:
    """Find or make the text, verify every file, and record where its passages are. A finished corpus is reused.

    Local files are used in place, and remote ones are downloaded to ``{root}/cache``. The fingerprint depends on the
    content of the source files and their names below the source, not on their location.

    Args:
        spec: The source, and how documents are split into train, validation and test.
        root: The root folder.
        progress: Called with the number of files hashed, then with the number of bytes read (as stored on disk).
        out: Folder of the result; ``{root}/corpus/{name}-{first 12 digits of the fingerprint}`` if left out.

    Returns:
        The record of the corpus; its counts are passages, empty passages, UTF-8 bytes of text, and about how many
        passages have the text of another one.

    Raises:
        InputError: The source is missing, empty, truncated, not UTF-8 or malformed.
        StorageError: The folder cannot be written, or holds something else. A full disk is noticed only once there is
            something to write, because a finished corpus needs no space.

    """
    require_writable(out or root)  # before hashing, which takes long for a large corpus
    if (known := known_texts().get(spec.source)) is not None:
        _log.info("%s. Its licence: %s", known.title, known.license)
    sources = _sources(spec, root, progress)
    if known is not None and known.columns:
        _require_columns(known, sources)
    digests = _digests(sources, progress)
    identity = fingerprint({"kind": "corpus", "stage": _STAGE_VERSION, "files": _content(sources, digests)})
    folder = out or stage_folder(root, "corpus", corpus_name(spec), identity)
    if out is None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with making(folder, identity):
        recorded = {str(source.path): digest for source, digest in digests.items()}
        if found := reusable(Corpus, folder, identity, progress, known=recorded):
            return found
        keep_changed_files(folder)
        if spec.source == PYDOCS:
            write_pydocs(folder / _PYDOCS_FILE, progress)
            sources = [SourceFile(folder / _PYDOCS_FILE, _PYDOCS_FILE)]
            recorded = {}
        files, repeated = _scanned(spec, sources, folder, progress)
        write_segments(folder, files)
        stored_again = [
            file.source.path.name for file in files if file.source.path.parent == folder and _is_framed(file.source)
        ]
        own = [SEGMENTS, *stored_again] if recorded else [_PYDOCS_FILE, SEGMENTS]
        return Corpus(
            path=folder,
            fingerprint=identity,
            files=recorded | digest_files(folder, own),
            counts=_counts(spec, files, repeated),
        ).commit()


def corpus_name(spec: CorpusSpec) -> str:
    """Return a folder name derived from the source."""
    name = PurePosixPath(redacted(spec.source)).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "text"


def _sources(spec: CorpusSpec, root: Path, progress: Progress) -> list[SourceFile]:
    if spec.source == PYDOCS:
        return pydocs_files()
    return local_files(spec.source, spec.revision, root, progress, spec.hub_text(), spec.workers)


def _require_columns(known: KnownText, sources: list[SourceFile]) -> None:
    from t5train.data.parquet import require_columns  # pyarrow is slow to import

    for source in sources:
        require_columns(source, known.columns)


def _digests(sources: list[SourceFile], progress: Progress) -> dict[SourceFile, FileDigest]:
    found: dict[SourceFile, FileDigest] = {}
    with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
        for source, digest in zip(sources, pool.map(_digest, sources), strict=True):
            found[source] = digest
            progress("source files hashed", len(found), len(sources))
    return found


def _digest(source: SourceFile) -> FileDigest:
    try:
        return digest_file(source.path)
    except OSError as error:
        raise InputError(f"{source.path} cannot be read: {explain(error)}") from error


def _content(sources: list[SourceFile], digests: Mapping[SourceFile, FileDigest]) -> list[dict[str, Any]]:
    """Return what identifies the text. Columns of a file stand for the whole file, however they were transferred."""
    return [{"name": each.name, **(whole_digest(each.path) or digests[each]).model_dump()} for each in sources]


def _scanned(
    spec: CorpusSpec, sources: list[SourceFile], folder: Path, progress: Progress
) -> tuple[list[FileSegments], int]:
    """Scan all files in worker processes.

    Returns the results in the order of ``sources``, and the number of passages with the text of another one. The
    passages of large compressed files are stored once more, in ``folder``.
    """
    sizes = [source.path.stat().st_size for source in sources]
    frames = [
        folder / f"{number:05d}{FRAMES}" if _needs_frames(source, size) else None
        for number, (source, size) in enumerate(zip(sources, sizes, strict=True))
    ]
    again = sum(size for size, path in zip(sizes, frames, strict=True) if path is not None)
    require_free_space(folder, int(again * _FRAMES_SIZE), "the passages of large compressed files")
    digests = [folder / f".digests.{number:08x}.tmp" for number in range(len(sources))]
    jobs = [
        {"path": str(source.path), "name": source.name, "frames": path and str(path), "digests": str(of_texts)}
        for source, path, of_texts in zip(sources, frames, digests, strict=True)
    ]
    total = sum(sizes)
    done = 0

    def advance(read_bytes: int) -> None:
        nonlocal done
        done += read_bytes
        progress("bytes of text read and checked", done, total)

    results = {
        result["name"]: result
        for result in in_processes("t5train.data.segments:scan_file", jobs, spec.workers or num_cores(), advance)
    }
    if (known := known_texts().get(spec.source)) is not None and known.has_sequential_ids:
        _require_sequence(spec, sources, results)
    steps = [results[source.name]["digests_step"] for source in sources]
    repeated = TextDigests.joined(zip(digests, steps, strict=True)).repeated()
    for path in digests:
        path.unlink()
    places = [SourceFile(path or source.path, source.name) for source, path in zip(sources, frames, strict=True)]
    return [_file_segments(place, results[place.name]) for place in places], repeated


def _is_framed(source: SourceFile) -> bool:
    return source.path.name.endswith(FRAMES)


def _needs_frames(source: SourceFile, size_bytes: int) -> bool:
    """Whether the passages of a file are stored once more."""
    return is_compressed(source.path) and not _is_framed(source) and size_bytes >= FRAMED_FROM_BYTES


def _require_sequence(spec: CorpusSpec, sources: list[SourceFile], results: Mapping[str, Json]) -> None:
    """Raise InputError if the ids of a text with sequential ids are not 1, 2, 3 ... over all its files."""
    expected = 1
    for source in sources:
        result = results[source.name]
        number, found = result["broken_id"] or (0, result["first_id"])
        rows = result["passages"] + result["empty"]
        if rows and (result["broken_id"] or found != expected):
            raise InputError(
                f"{source.path}, row {number}: the id is {found!r}, but should be {expected + number}, because the ids "
                f"of {spec.source} are numbered from 1. Rows are missing, or the file is another one: remove it, and "
                "download it again"
            )
        expected += rows


def _file_segments(source: SourceFile, result: Json) -> FileSegments:
    return FileSegments(source, result["passages"], result["empty"], [Segment(*each) for each in result["segments"]])


def _counts(spec: CorpusSpec, files: list[FileSegments], repeated: int) -> dict[str, int]:
    passages, empty = sum(file.passages for file in files), sum(file.empty_passages for file in files)
    if not passages:
        raise InputError(
            f"corpus.source {redacted(spec.source)!r} holds no text (empty passages: {empty}). Set corpus.source to "
            "files with text"
        )
    if empty:
        _log.warning("empty passages, which are skipped: %d of %d", empty, passages + empty)
    known = known_texts().get(spec.source)
    if known is not None and passages + empty != known.rows:
        raise InputError(
            f"corpus.source {spec.source!r} has {passages + empty:,} rows, but should have {known.rows:,}. Its "
            "files are not those that the name stands for: name the text by its URL, if it is the one that you want"
        )
    text_bytes = sum(segment.text_bytes for file in files for segment in file.segments)
    return {"passages": passages, "empty_passages": empty, "text_bytes": text_bytes, REPEATED: repeated}

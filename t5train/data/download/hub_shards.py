"""Streams the text of a dataset of the Hugging Face Hub to files under the root: one for each of its shards.

Each file is written by a worker process and is complete or absent. Beside it lies its note: the commit, its digest, and
the digest of its passages, which identifies the text whatever compressed it. A download that was killed continues with
the missing files, and what is complete is used without asking the Hub.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t5train.data.download.hub_commit import commit_of, record_commit, recorded_commit, require_online
from t5train.data.download.hub_dataset import HubColumns, HubRows, explained_by_datasets, open_rows, reopen
from t5train.data.download.kept_downloads import (
    Note,
    cache_folder,
    downloaded_before,
    locked,
    note_completed,
    read_note,
    whole_copies,
    write_note,
)
from t5train.data.download.remote_reading import Backoff, is_interrupted
from t5train.data.formats.passage_frames import FRAMES, PassageFrames
from t5train.data.passages import Passage, SourceFile, id_at, nonblank_bytes, title_of
from t5train.data.readers import SEGMENT_BYTES, require_short_text
from t5train.data.worker_processes import Advance, Json, in_processes
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.host_resources import require_free_space
from t5train.locations import hub_dataset_name
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, digest_file
from t5train.spec.data_spec import HubText

_STEP_ROWS = 10_000
"""Progress is reported after so many rows, because each report is a message to another process."""
_BATCH_ROWS = 1000
_log = logging.getLogger(__name__)


class HubSource(NamedTuple):
    """A text of a dataset of the Hub, and its state."""

    repository: str
    revision: str
    text: HubText

    def cache(self, root: Path) -> Path:
        """Return the folder of its files. The size of their frames must be that of a segment, so it is in the key."""
        more = [*(each or "" for each in self.text), f"frames of {SEGMENT_BYTES}"]
        return cache_folder(f"hf://{self.repository}", self.revision, root, more)


def hub_source(source: str, revision: str, text: HubText | None) -> HubSource | None:
    """Return the text that ``hf://OWNER/NAME`` stands for; None for any other source."""
    name = hub_dataset_name(source)
    return None if name is None else HubSource(name, revision, text or HubText())


def kept_hub_files(source: HubSource, root: Path) -> list[SourceFile] | None:
    """Return the files of a text if all are here; None if some are missing or damaged.

    Raises InputError if that is so and the Hub must not be asked.
    """
    places = downloaded_before(source.cache(root))
    if places and all(whole_copies(places)):
        return list(map(_source_file, places))
    require_online(f"hf://{source.repository}")
    return None


def look_at_dataset(source: HubSource, root: Path | None) -> HubRows:
    """Open the dataset without writing anything. Raises InputError if it has no such text."""
    recorded = None if root is None else recorded_commit(source.repository, source.revision, root)
    return open_rows(source.repository, recorded or commit_of(source.repository, source.revision), source.text)


def hub_files(source: HubSource, root: Path, workers: int, progress: Progress) -> list[SourceFile]:
    """Return the files of a text, in the order of the dataset's shards. Missing ones are made by worker processes.

    Raises InputError if the dataset has no such text or cannot be read, or if its commit gives another text than
    before, and StorageError if the disk is too small.
    """
    if (kept := kept_hub_files(source, root)) is not None:
        return kept
    cache = source.cache(root)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(cache):
        commit = record_commit(source.repository, source.revision, root)
        progress(f"shards of hf://{source.repository} looked at", 0, None)
        found = open_rows(source.repository, commit, source.text)
        _log.info("reading hf://%s at commit %s, configuration %s", source.repository, commit, found.config)
        places = _places(cache, source.text.split, found.num_shards)
        for leftover in cache.glob(".*.tmp"):  # of a process that was killed
            leftover.unlink()
        whole = [
            is_whole and _is_at(commit, place) for place, is_whole in zip(places, whole_copies(places), strict=True)
        ]
        missing = [number for number, is_there in enumerate(whole) if not is_there]
        jobs = [_job(source, commit, found, places, number) for number in missing]
        _made(
            [place for place, is_there in zip(places, whole, strict=True) if is_there], jobs, found, workers, progress
        )
        note_completed(cache, places)
    return list(map(_source_file, places))


def _is_at(commit: str, place: Path) -> bool:
    note = read_note(place)
    return note is not None and note.state == commit


def _places(cache: Path, split: str, number: int) -> list[Path]:
    return [cache / f"{split}-{index:05d}-of-{number:05d}{FRAMES}" for index in range(number)]


def _source_file(place: Path) -> SourceFile:
    return SourceFile(place, place.name.removesuffix(FRAMES))


def _job(source: HubSource, commit: str, found: HubRows, places: Sequence[Path], number: int) -> Json:
    return {
        "repository": source.repository,
        "commit": commit,
        "config": found.config,
        "split": source.text.split,
        "columns": list(found.columns),
        "shard": number,
        "num_shards": len(places),
        "path": str(places[number]),
    }


def _made(there: list[Path], jobs: Sequence[Json], found: HubRows, workers: int, progress: Progress) -> None:
    """Let workers make the missing files, and report how many rows they have read."""
    sizes = [place.stat().st_size for place in there]
    total, done = found.num_rows if not there else None, 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress(f"rows read, {len(sizes):,} of {found.num_shards:,} shards complete", done, total)

    def require_space() -> None:
        """The files are assumed to be as large as those that there are."""
        if sizes and (unmade := found.num_shards - len(sizes)):
            needed = sum(sizes) // len(sizes) * unmade
            require_free_space(Path(jobs[0]["path"]).parent, needed, f"the text of {quantity(unmade, 'more shard')}")

    require_space()
    for result in in_processes("t5train.data.download.hub_shards:write_shard", jobs, workers, report):
        sizes.append(result["size"])
        report(0)
        require_space()


def write_shard(job: Json, advance: Advance) -> Json:
    """Write the passages of one shard and their note. The worker processes of ``hub_files`` call this.

    Raises InputError if the text is not text, or not that which the same commit gave before.
    """
    path = Path(job["path"])
    name = f"hf://{job['repository']}"
    with explained_by_datasets(job["repository"], job["commit"]):
        whole = Backoff().retried(lambda: _write(job, path, advance), name, is_interrupted)
    before = read_note(path)
    if before is not None and before.state == job["commit"] and before.whole != whole:
        path.unlink()
        raise InputError(
            f"{name} gave another text for {path.name} than before, at the same commit "
            f"{job['commit']}. To take the present one, remove {path.parent} and all that was made of it"
        )
    content = digest_file(path)
    write_note(path, Note(job["commit"], content, whole))
    return {"size": content.size}


def _write(job: Json, path: Path, advance: Advance) -> FileDigest:
    """Write the passages, and return the size and digest of their lines."""
    columns = HubColumns(*job["columns"])
    stream = reopen(job["repository"], job["commit"], job["config"], job["split"], columns)
    digest, size, text_bytes, unreported = hashlib.sha256(), 0, 0, 0
    with replacing(path) as file:
        frames = PassageFrames(file)
        name = f"shard {_source_file(path).name} of hf://{job['repository']}"
        for passage in _passages(stream.shard(job["num_shards"], job["shard"]), columns, _source_file(path), name):
            line = frames.add(passage)
            digest.update(line)
            size += len(line)
            text_bytes += nonblank_bytes(passage.text)
            unreported += 1
            if text_bytes >= SEGMENT_BYTES:
                frames.end_frame()
                text_bytes = 0
            if unreported == _STEP_ROWS:
                advance(unreported)
                unreported = 0
        frames.end_frame()
    advance(unreported)
    return FileDigest(size=size, sha256=digest.hexdigest())


def _passages(stream: Any, columns: HubColumns, source: SourceFile, name: str) -> Iterator[Passage]:
    """Yield the rows of a shard. A row without text is an empty passage, but not all rows may be without.

    If a dataset's card states its columns, ``datasets`` reads None for those that a file does not have.
    """
    # As tables of Arrow, which takes less than a third of the CPU time of reading row by row.
    tables = stream.with_format("arrow").iter(_BATCH_ROWS)
    number, has_text = -1, False
    for number, row in enumerate(row for table in tables for row in table.to_pylist()):
        text = row.get(columns.text)
        if text is not None and not isinstance(text, str):
            raise InputError(
                f"{source.name}, row {number}: column {columns.text!r} (corpus.column) holds {type(text).__name__} and "
                "not text. Set corpus.column to a column that holds text in every row"
            )
        require_short_text(source.name, number, text or "")
        has_text = has_text or text is not None
        yield Passage(id_at(_value(row, columns.id), source, number), title_of(_value(row, columns.title)), text or "")
    if number >= 0 and not has_text:
        raise InputError(
            f"{name} has {quantity(number + 1, 'row')}, but none has a value in column {columns.text!r} "
            "(corpus.column): its file may not have this column. Set corpus.column to a column that all files have, or "
            "corpus.config or corpus.hub_split to a part of the dataset whose files have it"
        )


def _value(row: Mapping[str, Any], column: str | None) -> Any:
    return None if column is None else row.get(column)

"""Streams the text of a dataset of the Hugging Face Hub to files under the root: one for each of its shards.

Each file is written by a worker process and is complete or absent. Beside it lies its note: the commit, its digest, and
the digest of its passages, which identifies the text whatever compressed it. A download that was killed continues with
the missing files, and what is complete is used without asking the Hub.

``datasets`` runs no code of a dataset: since version 4 it reads data files only.
"""

import hashlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from t5train.data.download.hub_commit import (
    by_files,
    commit_of,
    explained_by_datasets,
    gated,
    record_commit,
    recorded_commit,
    require_online,
)
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
from t5train.data.formats.compressed import use_in_fsspec
from t5train.data.formats.passage_frames import FRAMES, PassageFrames
from t5train.data.passages import Passage, SourceFile, id_at, nonblank_bytes, title_of
from t5train.data.readers import SEGMENT_BYTES, require_short_text
from t5train.data.worker_processes import Advance, InSteps, Json, in_processes
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.host_resources import require_free_space
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, digest_file
from t5train.records.locations import hub_dataset_name
from t5train.spec.data_spec import HubText

_STEP_ROWS = 10_000
_BATCH_ROWS = 1000
_PACKAGE = "'datasets>=4.8.4,<6'"
_TEXT_TYPES = {"string", "large_string", "string_view"}
_NUMBER_TYPES = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {
    f"float{bits}" for bits in (16, 32, 64)
}
_TYPES = {str: "string", int: "int64", float: "float64", type(None): "null"}
_SHOWN = 20
_ROWS_FOR_TYPES = 100
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


class HubColumns(NamedTuple):
    """The columns of a dataset that passages are made of. Those of ids and titles are None if there are none."""

    text: str
    id: str | None
    title: str | None


class HubRows(NamedTuple):
    """The rows of one split of a dataset."""

    stream: Any
    """An ``IterableDataset``."""
    config: str
    """The name of its configuration."""
    columns: HubColumns

    @property
    def num_shards(self) -> int:
        """How many parts it has that can be read independently: usually its files."""
        return int(self.stream.num_shards)

    @property
    def num_rows(self) -> int | None:
        """How many rows it has, as far as its card says so."""
        splits = self.stream.info.splits or {}
        stated = splits.get(str(self.stream.split))
        return stated.num_examples if stated is not None and stated.num_examples else None


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
    folder = source.cache(root)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder):
        commit = record_commit(source.repository, source.revision, root)
        progress(f"shards of hf://{source.repository} looked at", 0, None)
        found = open_rows(source.repository, commit, source.text)
        _log.info("reading hf://%s at commit %s, configuration %s", source.repository, commit, found.config)
        number, split = found.num_shards, source.text.split
        places = [folder / f"{split}-{index:05d}-of-{number:05d}{FRAMES}" for index in range(number)]
        for leftover in folder.glob(".*.tmp"):  # of a process that was killed
            leftover.unlink()
        whole = [place for place, is_whole in zip(places, whole_copies(places), strict=True) if is_whole]
        there = {place for place in whole if (note := read_note(place)) is not None and note.state == commit}
        common: Json = {"repository": source.repository, "commit": commit, "config": found.config, "split": split}
        common |= {"columns": list(found.columns), "num_shards": number}
        jobs = [
            common | {"shard": index, "path": str(place)} for index, place in enumerate(places) if place not in there
        ]
        _made(there, jobs, found, workers, progress)
        note_completed(folder, places)
    return list(map(_source_file, places))


def _source_file(place: Path) -> SourceFile:
    return SourceFile(place, place.name.removesuffix(FRAMES))


def _made(there: set[Path], jobs: Sequence[Json], found: HubRows, workers: int, progress: Progress) -> None:
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
    for result in in_processes("t5train.data.download.hub_text:write_shard", jobs, workers, report):
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
    watched, digest, size, text_bytes = InSteps(advance, _STEP_ROWS), hashlib.sha256(), 0, 0
    with replacing(path) as file:
        frames = PassageFrames(file)
        name = f"shard {_source_file(path).name} of hf://{job['repository']}"
        for passage in _passages(stream.shard(job["num_shards"], job["shard"]), columns, _source_file(path), name):
            line = frames.add(passage)
            digest.update(line)
            size += len(line)
            text_bytes += nonblank_bytes(passage.text)
            watched(1)
            if text_bytes >= SEGMENT_BYTES:
                frames.end_frame()
                text_bytes = 0
        frames.end_frame()
    watched.flush()
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
        yield Passage(id_at(row.get(columns.id), source, number), title_of(row.get(columns.title)), text or "")
    if number >= 0 and not has_text:
        raise InputError(
            f"{name} has {quantity(number + 1, 'row')}, but none has a value in column {columns.text!r} "
            "(corpus.column): its file may not have this column. Set corpus.column to a column that all files have, or "
            "corpus.config or corpus.hub_split to a part of the dataset whose files have it"
        )


def open_rows(repository: str, commit: str, text: HubText) -> HubRows:
    """Open a split of a dataset, and find its text.

    Raises InputError if the dataset has no such configuration, split or column, or cannot be read.
    """
    with explained_by_datasets(repository, commit):
        return Backoff().retried(lambda: _opened(repository, commit, text), f"hf://{repository}", is_interrupted)


def _opened(repository: str, commit: str, text: HubText) -> HubRows:
    builder = _builder(repository, commit, text.config)
    streams, dataset = builder.as_streaming_dataset(), f"hf://{repository} (configuration {builder.config.name!r})"
    if text.split not in streams:
        raise _no_split(text.split, dataset, streams)
    types = _types(streams[text.split])
    columns = _columns(types, text, f"split {text.split!r} of {dataset}")
    return HubRows(streams[text.split], builder.config.name, columns)


def files_of_split(repository: str, commit: str, config: str | None, split: str) -> list[str]:
    """Return the URLs of the data files of a split of a dataset, in its order.

    Raises InputError if the dataset has no such configuration or split, or cannot be read.
    """
    with explained_by_datasets(repository, commit):
        builder = Backoff().retried(lambda: _builder(repository, commit, config), f"hf://{repository}", is_interrupted)
    files = builder.config.data_files or {}
    if split not in files:
        raise _no_split(split, f"hf://{repository} (configuration {builder.config.name!r})", files)
    return list(map(str, files[split]))


@cache
def reopen(repository: str, commit: str, config: str, split: str, columns: HubColumns) -> Any:
    """Return the stream of rows that ``open_rows`` found. Of .parquet files, only these columns are read.

    Pages of .parquet files that have a checksum are compared with it. Without one, a damaged byte may go unnoticed: the
    Hub has a digest of each file, but not all of a file is read here.

    A process opens it once, for all its shards, because that takes some ten requests. Errors are those of ``datasets``
    and of the Hub's client, so that the caller can try again.
    """
    builder, names = _builder(repository, commit, config), [name for name in columns if name is not None]
    if hasattr(builder.config, "columns"):
        from pyarrow.dataset import ParquetFragmentScanOptions  # slow to import, and not needed for other formats

        compared = ParquetFragmentScanOptions(page_checksum_verification=True)
        builder = _builder(repository, commit, config, columns=names, fragment_scan_options=compared)
    return builder.as_streaming_dataset(split).select_columns(names)


def _builder(repository: str, commit: str, config: str | None, **options: Any) -> Any:
    datasets = _package(repository)
    dataset = {"path": f"hf://datasets/{repository}", "revision": commit}
    # If anything fails, datasets would use what it has cached of any revision: so it gets an empty cache.
    with tempfile.TemporaryDirectory(prefix="t5-pretrain-") as empty:
        try:
            return datasets.load_dataset_builder(**dataset, name=config, cache_dir=empty, **options)
        except datasets.exceptions.DatasetNotFoundError as error:
            reason = gated(repository) if "gated" in str(error) else f"hf://{repository} cannot be read: {error}"
            raise InputError(reason) from None
        except (datasets.exceptions.DataFilesNotFoundError, datasets.data_files.EmptyDatasetError):
            reason = "has no data files in a format that datasets reads"
            raise InputError(f"corpus.source 'hf://{repository}' {reason}. {by_files(repository)}") from None
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise InputError(
                f"corpus.source 'hf://{repository}' has a loading script, and code of datasets is never run. "
                f"{by_files(repository)}"
            ) from None
        except ValueError:
            names = datasets.get_dataset_config_names(**dataset)
            if config in names or (config is None and len(names) < 2):
                raise
            said = "is not set" if config is None else f"is {config!r}"
            raise InputError(
                f"corpus.config {said}, but hf://{repository} has the configurations {_listed(names)}. Set "
                "corpus.config to one of these"
            ) from None


def _package(repository: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"hf://{repository} needs a package that is not installed ({error}): pip install {_PACKAGE}"
        ) from None
    use_in_fsspec()
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise each opening is reported to the Hub
    datasets.config.TORCH_AVAILABLE = False  # otherwise it imports torch, which takes seconds in each process
    for kind in ("OPEN", "READ"):  # otherwise each is tried 20 times, with pauses of up to a minute, before an error
        setattr(datasets.config, f"STREAMING_{kind}_MAX_RETRIES", 1)
    for kind in ("OPEN", "READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):  # it also pauses after its last try
        setattr(datasets.config, f"STREAMING_{kind}_RETRY_INTERVAL", 0)
    return datasets


def _types(stream: Any) -> dict[str, str]:
    """Return the types of a stream's columns by name: as its card or files state them, or of its first rows."""
    if stream.features is not None:
        return {name: str(getattr(kind, "dtype", kind)) for name, kind in stream.features.items()}
    types: dict[str, str] = {}
    for row in stream.take(_ROWS_FOR_TYPES):
        for name, value in row.items():
            if types.get(name) in {None, "null"}:
                types[name] = _TYPES.get(type(value), type(value).__name__)
    return types


def _no_split(split: str, dataset: str, splits: Iterable[str]) -> InputError:
    return InputError(
        f"corpus.hub_split is {split!r}, but {dataset} has the splits {_listed(splits)}. Set corpus.hub_split to one "
        "of these"
    )


def _columns(types: Mapping[str, str], text: HubText, dataset: str) -> HubColumns:
    shown = _listed(f"{name} ({kind})" for name, kind in types.items())
    if not types:
        raise InputError(f"{dataset} is empty. Set corpus.hub_split or corpus.config to one with text")
    if text.column not in types:
        raise InputError(
            f"corpus.column is {text.column!r}, but {dataset} has the columns {shown}. Set corpus.column to one that "
            "holds text"
        )
    if types[text.column] not in _TEXT_TYPES:
        raise InputError(
            f"corpus.column is {text.column!r}, which holds {types[text.column]} and not text: {dataset} has "
            f"the columns {shown}. Set corpus.column to one of type string"
        )
    has_id = types.get("id") in {*_TEXT_TYPES, *_NUMBER_TYPES} and text.column != "id"
    has_title = types.get("title") in _TEXT_TYPES and text.column != "title"
    return HubColumns(text.column, "id" if has_id else None, "title" if has_title else None)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more

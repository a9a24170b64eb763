"""Opens a dataset of the Hugging Face Hub with ``datasets``, for streaming, and finds its text in it.

``datasets`` runs no code of a dataset: since version 4 it reads data files only.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from t5train.data.download.hub_commit import explained_by_hub, gated, page
from t5train.data.download.remote_reading import Backoff, is_interrupted
from t5train.data.formats.compressed import use_in_fsspec
from t5train.errors import InputError, T5TrainError
from t5train.locations import without_queries
from t5train.spec.data_spec import HubText

_PACKAGE = "'datasets>=4.8.4,<6'"
_TEXT_TYPES = {"string", "large_string", "string_view"}
_NUMBER_TYPES = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {
    f"float{bits}" for bits in (16, 32, 64)
}
_TYPES = {str: "string", int: "int64", float: "float64", type(None): "null"}
_SHOWN, _SHOWN_CHARACTERS = 20, 500
_ROWS_FOR_TYPES = 100


class HubColumns(NamedTuple):
    """The columns of a dataset that passages are made of. Those of ids and titles are None if there are none."""

    text: str
    id: str | None
    title: str | None

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return [name for name in self if name is not None]


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


def open_rows(repository: str, commit: str, text: HubText) -> HubRows:
    """Open a split of a dataset, and find its text.

    Raises InputError if the dataset has no such configuration, split or column, or cannot be read.
    """
    with explained_by_datasets(repository, commit):
        return Backoff().retried(lambda: _opened(repository, commit, text), f"hf://{repository}", is_interrupted)


def _opened(repository: str, commit: str, text: HubText) -> HubRows:
    builder = _builder(repository, commit, text.config)
    streams = builder.as_streaming_dataset()
    if text.split not in streams:
        raise InputError(
            f"corpus.hub_split is {text.split!r}, but {_dataset(repository, builder.config.name)} has the splits "
            f"{_listed(streams)}. Set corpus.hub_split to one of these"
        )
    types = _types(streams[text.split])
    columns = _columns(types, text, f"split {text.split!r} of {_dataset(repository, builder.config.name)}")
    return HubRows(streams[text.split], builder.config.name, columns)


@cache
def reopen(repository: str, commit: str, config: str, split: str, columns: HubColumns) -> Any:
    """Return the stream of rows that ``open_rows`` found. Of .parquet files, only these columns are read.

    Pages of .parquet files that have a checksum are compared with it. Without one, a damaged byte may go unnoticed: the
    Hub has a digest of each file, but not all of a file is read here.

    A process opens it once, for all its shards, because that takes some ten requests. Errors are those of ``datasets``
    and of the Hub's client, so that the caller can try again.
    """
    builder = _builder(repository, commit, config)
    if hasattr(builder.config, "columns"):
        builder = _builder(
            repository, commit, config, columns=columns.names, fragment_scan_options=_with_checksums_compared()
        )
    return builder.as_streaming_dataset(split).select_columns(columns.names)


def _with_checksums_compared() -> Any:
    from pyarrow.dataset import ParquetFragmentScanOptions  # slow to import, and not needed for other formats

    return ParquetFragmentScanOptions(page_checksum_verification=True)


@contextmanager
def explained_by_datasets(repository: str, commit: str) -> Iterator[None]:
    """Convert the errors of ``datasets`` and of the Hub's client: those of reading data files share no base."""
    try:
        with explained_by_hub(repository, commit):
            yield
    except T5TrainError:
        raise
    except Exception as error:
        said = without_queries(" ".join(str(error).split()))[:_SHOWN_CHARACTERS] or type(error).__name__
        raise InputError(f"hf://{repository} cannot be read by datasets: {said}. {_by_files(repository)}") from None


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
            raise InputError(f"corpus.source 'hf://{repository}' {reason}. {_by_files(repository)}") from None
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise InputError(
                f"corpus.source 'hf://{repository}' has a loading script, and code of datasets is never run. "
                f"{_by_files(repository)}"
            ) from None
        except ValueError:
            names = datasets.get_dataset_config_names(**dataset)
            if config in names or (config is None and len(names) < 2):
                raise
            raise InputError(_no_config(repository, config, names)) from None


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


def _no_config(repository: str, config: str | None, names: list[str]) -> str:
    said = "is not set" if config is None else f"is {config!r}"
    return (
        f"corpus.config {said}, but hf://{repository} has the configurations {_listed(names)}. Set corpus.config to "
        "one of these"
    )


def _by_files(repository: str) -> str:
    return (
        f"See {page(repository)}/tree/main, and name its files by their path: "
        f"corpus.source=hf://datasets/{repository}/PATH"
    )


def _dataset(repository: str, config: str) -> str:
    return f"hf://{repository} (configuration {config!r})"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more

"""The files of pairs on this machine, and pairs that are made on it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_commit import commit_of, record_commit, recorded_commit, require_online
from t5train.data.download.hub_text import files_of_split
from t5train.data.download.kept_downloads import cache_folder, download_places, downloaded_before, whole_copies
from t5train.data.download.remote_reading import filesystem_of
from t5train.data.download.source_listing import file_identity
from t5train.data.formats.compressed import COMPRESSIONS
from t5train.data.pairs.pair_reading import PAIR_FORMATS
from t5train.data.passages import SPLITS, SourceFile, Split
from t5train.data.readers import FORMATS, format_of
from t5train.data.sources import SourceFacts, local_files, require_source
from t5train.errors import InputError
from t5train.progress import Progress, silent
from t5train.records.locations import hub_dataset_name, local_folder, redacted
from t5train.spec import PairsSpec
from t5train.spec.pairs_spec import GENERATED, PairSource

GENERATED_PAIRS = 10_500
"""Pairs of each of ``GENERATED``: their sources differ."""
GENERATED_VERSION = 1
"""Incremented when the same name gives other pairs."""
_JSON = re.compile(rf"\.json(?=({'|'.join(map(re.escape, COMPRESSIONS))})?$)")
_FEWEST_DIGITS, _MOST_DIGITS = 3, 8


class TaskFiles(NamedTuple):
    """The files of a task in ``pairs.train`` (some of whose pairs may be held out), ``validation`` or ``test``."""

    number: int
    """The place of the task in ``pairs.train``."""
    split: Split
    source: PairSource
    files: list[SourceFile]
    """Sorted; empty for pairs that are made on this machine."""


def task_files(spec: PairsSpec, root: Path, progress: Progress) -> list[TaskFiles]:
    """Return the files of each task. Remote ones are downloaded to ``{root}/cache``, unless a copy is current.

    Raises InputError if there are none, if their format is unknown, if a store fails, or if a file is in two splits.
    """
    named = {"train": spec.tasks(), "validation": spec.held_out("validation"), "test": spec.held_out("test")}
    found = list[TaskFiles]()
    for split in SPLITS:
        for number, source in enumerate(named[split]):
            with _of_setting(f"pairs.{split}", source):
                found.append(TaskFiles(number, split, source, _files(source, root, progress)))
    _require_apart(found)
    return found


def require_pair_source(setting: str, source: PairSource, root: Path) -> SourceFacts | None:
    """Return what is known of files of pairs without reading them; None for pairs that are made. Writes nothing.

    ``setting`` is the one that names them. Raises InputError if there are none.
    """
    if source.location in GENERATED:
        return None
    with _of_setting(setting, source):
        if local_folder(source.location) is not None:
            return _facts(_files(source, root, silent))
        if (repository := hub_dataset_name(source.location)) is None:
            return require_source(source.location, "", root, whole_files=True, is_read=_is_read)
        places = downloaded_before(_cache(source, repository, root))
        if places and all(whole_copies(places)):
            return _facts(_files_of_dataset(source, repository, root, silent))
        require_online(f"hf://{repository}")
        commit = recorded_commit(repository, source.revision, root) or commit_of(repository, source.revision)
        return SourceFacts(dict.fromkeys(files_of_split(repository, commit, source.config, source.split)), [], [])


def _facts(files: list[SourceFile]) -> SourceFacts:
    return SourceFacts({each.name: each.path.stat().st_size for each in files}, [], files)


def generated_pairs(name: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of digits and what becomes of them, such as ``3 1 2`` and ``2 1 3``."""
    seen, number = set[str](), 0
    while len(seen) < GENERATED_PAIRS:
        drawn = int.from_bytes(blake2b(f"{name}\n{number}".encode(), digest_size=16).digest(), "little")
        count = _FEWEST_DIGITS + drawn % (_MOST_DIGITS - _FEWEST_DIGITS + 1)
        digits = f"{drawn >> 32:0{_MOST_DIGITS}d}"[-count:]
        number += 1
        if digits not in seen:
            seen.add(digits)
            yield " ".join(digits), " ".join(sorted(digits) if name == "sort_digits" else digits[::-1])


def _files(source: PairSource, root: Path, progress: Progress) -> list[SourceFile]:
    if source.location in GENERATED:
        return []
    if (repository := hub_dataset_name(source.location)) is not None:
        return _files_of_dataset(source, repository, root, progress)
    return list(map(_as_lines, local_files(source.location, "", root, progress, whole_files=True, is_read=_is_read)))


def _is_read(name: str) -> bool:
    """Return whether pairs are read from a file that was named. In a folder, .json files are often about the others."""
    return format_of(name) is not None or _JSON.search(name) is not None


def _as_lines(file: SourceFile) -> SourceFile:
    """Return a .json file under a name that says that it has JSON lines, as pairs in such files usually are."""
    return file._replace(name=_JSON.sub(".jsonl", file.name))


def _files_of_dataset(source: PairSource, repository: str, root: Path, progress: Progress) -> list[SourceFile]:
    """Return the data files of a split of a dataset, as the Hub has them at the recorded commit."""
    folder = _cache(source, repository, root)
    places = downloaded_before(folder)
    if not places or not all(whole_copies(places)):
        require_online(f"hf://{repository}")
        commit = record_commit(repository, source.revision, root)
        urls = files_of_split(repository, commit, source.config, source.split)
        names = [each.partition(f"@{commit}/")[2] for each in urls]
        places = download_places(folder, names, f"{source.location} (split {source.split!r})")
        filesystem, _ = filesystem_of(urls[0])
        remote = [filesystem_of(each)[1] for each in urls]
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        download(filesystem, folder, list(map(Wanted, remote, places)), progress)
    return [_as_lines(SourceFile(each, each.relative_to(folder).as_posix())) for each in places]


def _cache(source: PairSource, repository: str, root: Path) -> Path:
    chosen = ["pairs", source.config or "", source.split]
    return cache_folder(f"hf://{repository}", source.revision, root, chosen)


@contextmanager
def _of_setting(setting: str, source: PairSource) -> Iterator[None]:
    """Let errors, which speak of the text of a corpus, name the setting, and what is chosen after ``#``."""
    try:
        yield
    except InputError as error:
        message = str(error).replace("corpus.source", setting)
        if "," in source.location and "does not exist" in message:
            message += f'. If it stands for several tasks, give them as a list: {setting}=\'["A", "B"]\''
        message = message.replace(", ".join(FORMATS), PAIR_FORMATS)
        if ".json" in message and PAIR_FORMATS in message:
            message += ". To read .json files, name them, as in 'FOLDER/*.json'"
        message = re.sub(r"corpus\.(?:hub_)?(config|split|column|revision)\b", r"#\1=", message)
        raise type(error)(message) from error.__cause__


def _require_apart(found: Sequence[TaskFiles]) -> None:
    """Raise InputError if a file is in two splits. Two tasks may read it, such as both directions of a translation."""
    owners = dict[object, TaskFiles]()
    for task in found:
        for file in task.files:
            owner = owners.setdefault(file_identity(str(file.path)), task)
            if owner.split != task.split:
                use = "trained on" if owner.split == "train" else "chosen by"
                raise InputError(
                    f"{file.shown} is in pairs.{owner.split} ({redacted(owner.source.location)}) and in "
                    f"pairs.{task.split} ({redacted(task.source.location)}), so that the model would be measured on "
                    f"what it was {use}. Name each file in one of them"
                )

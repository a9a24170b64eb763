"""Resolves a source (a path, folder, pattern or fsspec URL) to files on this machine.

The built-in source is the documentation that comes with Python, as passages of at most 100 words. It is taken from
Python source files, which are read but never imported. Only files that every distribution of Python includes are used,
so that the corpus depends only on the version of Python.
"""

import ast
import inspect
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_commit import (
    commit_of,
    files_at,
    offline_switch,
    record_commit,
    recorded_commit,
    repository_of,
    require_online,
)
from t5train.data.download.hub_text import HubSource, hub_files, hub_source, kept_hub_files, look_at_dataset
from t5train.data.download.kept_downloads import (
    cache_folder,
    download_places,
    downloaded_before,
    read_note,
    whole_copies,
)
from t5train.data.download.remote_reading import Backoff, is_busy
from t5train.data.download.source_listing import LeftOut, Matches, is_local, left_out_lines, list_files
from t5train.data.passages import READ_COLUMNS, Passage, SourceFile
from t5train.data.readers import format_of
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.files.confined import confined
from t5train.host_resources import num_cores
from t5train.progress import Progress, silent
from t5train.quantities import quantity
from t5train.records.digests import FileDigest
from t5train.records.locations import explained, redacted, require_utf8_names
from t5train.spec.data_spec import HubText, TextSource
from t5train.spec.known_texts import BUILT_IN, KnownText, known_texts, location_of

_log = logging.getLogger(__name__)


class SourceFacts(NamedTuple):
    """What is known of a source before its files are read."""

    sizes: dict[str, int | None]
    """The size of each file as stored, by its name; None if the store does not report it."""
    skipped: list[str]
    """Files of other formats, relative to the source's folder."""
    local: list[SourceFile]
    """The files, if they are on this machine; empty otherwise."""
    left_out: LeftOut = LeftOut()

    @property
    def size_bytes(self) -> int:
        """The total size of the files, as stored. Those of unknown size count as 0."""
        return sum(size or 0 for size in self.sizes.values())


class Downloads(NamedTuple):
    """The downloads of a source, and what is known of them."""

    location: str
    """Path, pattern or URL of the source."""
    revision: str
    root: Path | None
    known: KnownText | None = None
    """If the source has a name: what it stands for."""
    whole_files: bool = False
    """Whether .parquet files have all of their columns; such downloads are apart from those with some."""

    @classmethod
    def of(cls, source: str, revision: str, root: Path | None, *, whole_files: bool = False) -> Self:
        """Return those of a source under a root."""
        location, known = location_of(source), known_texts().get(source)
        return cls(location, revision or (known.revision if known is not None else ""), root, known, whole_files)

    @property
    def folder(self) -> Path:
        """The folder that they are in: for a named text of the Hub, one for each commit.

        Files that are named by their URL may be of any commit, so they are in another folder.
        """
        more = ["whole files"] if self.whole_files else []
        if self.pinned_repository is not None:
            more += ["commit", self._recorded_commit() or ""]
        return cache_folder(self.location, self.revision, self._root(), more)

    @property
    def pinned_repository(self) -> str | None:
        """If the source is a named text of the Hub: its dataset, which is read at one commit."""
        return None if self.known is None else repository_of(self.location)

    def at_commit(self, *, records: bool) -> str:
        """Return the location, for a named text of the Hub with the commit in it.

        That is the recorded commit if there is one. Otherwise it is the revision's current one, which is recorded on
        request.
        """
        if (repository := self.pinned_repository) is None:
            return self.location
        if records:
            return files_at(self.location, repository, record_commit(repository, self.revision, self._root()))
        return files_at(self.location, repository, self._recorded_commit() or commit_of(repository, self.revision))

    def kept(self) -> list[SourceFile] | None:
        """Return the earlier downloads if they are used without asking the store; None otherwise.

        That is so for the Hub if it is not to be asked, for files that all have known digests and are here, and for
        those of a recorded commit. Raises InputError if the Hub is not to be asked, and a file is not here.
        """
        is_offline = self.location.startswith("hf://") and offline_switch() is not None
        if self.root is None:
            if is_offline:
                require_online(self.location)
            return None
        if digests := self._digests():
            return _with_known_content(self.folder, digests)
        if not is_offline and self.pinned_repository is None:
            return None
        has_commit = self.pinned_repository is None or self._recorded_commit() is not None
        if has_commit and (places := downloaded_before(self.folder)) is not None:
            return self._kept(places, is_offline)
        if is_offline:
            require_online(self.location)
        return None

    def _kept(self, places: Sequence[Path], is_offline: bool) -> list[SourceFile] | None:
        num_files = len(places) if self.known is None else self.known.num_files
        if len(places) != num_files and not is_offline:
            return None
        self.require_all([str(place) for place in places])
        for place, is_intact in zip(places, whole_copies(places), strict=True):
            if not is_intact and is_offline:
                raise InputError(f"{place} is missing or damaged, and without a network it cannot be downloaded again")
            if not is_intact:
                return None
        return [SourceFile(place, place.relative_to(self.folder).as_posix()) for place in places]

    def known_digest(self, name: str) -> FileDigest | None:
        """Return what a file is known to be: from the catalogue, or of a commit from its first download."""
        if self.pinned_repository is None:
            return self._digests().get(name)
        note = read_note(self.folder / name)
        return self._digests().get(name) or (None if note is None else note.stands_for)

    def require_all(self, found: Sequence[str]) -> None:
        """Raise InputError if a named text does not have the files that it should have."""
        if self.known is not None and len(found) != self.known.num_files:
            raise InputError(
                f"{redacted(self.location)} is {quantity(len(found), 'file')}, but should be {self.known.num_files:,}. "
                "The store does not have the text that the name stands for: name the files by their URL, if they are "
                "what you want"
            )

    def _recorded_commit(self) -> str | None:
        repository = self.pinned_repository
        if repository is None or self.root is None:
            return None
        return recorded_commit(repository, self.revision, self.root)

    def _root(self) -> Path:
        assert self.root is not None  # noqa: S101  who downloads has a root
        return self.root

    def _digests(self) -> dict[str, FileDigest]:
        digests = {} if self.known is None else self.known.files
        return {name: FileDigest(size=each.size, sha256=each.sha256) for name, each in digests.items()}


def _with_known_content(cache: Path, digests: Mapping[str, FileDigest]) -> list[SourceFile] | None:
    files = [SourceFile(confined(cache, name, "the list of known texts", InputError), name) for name in digests]
    for file in files:
        note = read_note(file.path)
        if note is None or note.stands_for != digests[file.name]:
            return None
    return files if all(whole_copies([file.path for file in files])) else None


def local_files(  # noqa: PLR0913 - where text is, how it gets here, and what of it is read
    source: str,
    revision: str,
    root: Path,
    progress: Progress,
    hub_text: HubText | None = None,
    workers: int | None = None,
    *,
    whole_files: bool = False,
    is_read: Callable[[str], Any] = format_of,
) -> list[SourceFile]:
    """Return the files of a source, sorted. Remote ones are downloaded to ``{root}/cache``, unless a copy is current.

    Those of a dataset of the Hub, ``hf://OWNER/NAME``, are made there of its rows (``hub_text``), by ``workers``
    processes. Of remote .parquet files that are mostly other columns, only what is read is fetched, unless
    ``whole_files``. What runs made below the source's folder is left out, and so is ``LeftOut``. If HF_HUB_OFFLINE or
    HF_DATASETS_OFFLINE is set, files of the Hub are those that were downloaded before. Raises InputError if no file is
    found, the name of a named or matched file is not ``is_read``, the protocol is unknown, its package is not
    installed, or the store fails.
    """
    downloads = Downloads.of(source, revision, root, whole_files=whole_files)
    source = downloads.location
    with _explained(source):
        if (dataset := hub_source(source, revision, hub_text)) is not None:
            return hub_files(dataset, root, workers or num_cores(), progress)
        if (kept := downloads.kept()) is not None:
            return kept
        listed = list_files(downloads.at_commit(records=True), is_read=is_read)
        _log_left_out(listed)
        return _downloaded(downloads, listed, progress)


def files_of_earlier_version(text: TextSource, root: Path, progress: Progress) -> list[SourceFile]:
    """Return the files of a text as ``local_files`` does, with those of ``LeftOut``, which earlier versions read."""
    downloads = Downloads.of(text.source, text.revision, root)
    if hub_source(downloads.location, text.revision, text.hub_text) is not None or downloads.kept() is not None:
        return local_files(text.source, text.revision, root, progress, text.hub_text)
    with _explained(downloads.location):
        listed = list_files(downloads.at_commit(records=True), with_left_out=True)
        return _downloaded(downloads, listed, progress)


def _downloaded(downloads: Downloads, listed: Matches, progress: Progress) -> list[SourceFile]:
    """Return the files on this machine. Remote ones are downloaded, unless a copy is current."""
    filesystem, found = listed.filesystem, listed.files
    downloads.require_all(found)
    names = _names(found)
    if is_local(filesystem):
        return [SourceFile(Path(each), name) for each, name in zip(found, names, strict=True)]
    cache = downloads.folder
    places = download_places(cache, names, f"corpus.source {redacted(downloads.location)!r}")
    cache.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = [
        Wanted(each, place, downloads.known_digest(name), _columns(name, whole_files=downloads.whole_files))
        for each, place, name in zip(found, places, names, strict=True)
    ]
    download(filesystem, cache, wanted, progress)
    return list(map(SourceFile, places, names))


def _log_left_out(listed: Matches) -> None:
    """Log what is not read. A choice of files needs no warning at every start."""
    lines = left_out_lines(listed.skipped, listed.left_out)
    lines += [f"leaving out {quantity(listed.made, 'file')} that runs made"] if listed.made else []
    for line in lines:
        _log.info("%s", line)


def _columns(name: str, *, whole_files: bool) -> tuple[str, ...]:
    return READ_COLUMNS if name.endswith(".parquet") and not whole_files else ()


def require_source(
    source: str,
    revision: str = "",
    root: Path | None = None,
    hub_text: HubText | None = None,
    *,
    whole_files: bool = False,
    is_read: Callable[[str], Any] = format_of,
) -> SourceFacts:
    """Return what is known of a source, as ``local_files`` finds it, without reading its files. Writes nothing.

    With HF_HUB_OFFLINE, files of the Hub are those that were downloaded to ``root`` before. Raises InputError if there
    are no files, or if all are empty.
    """
    downloads = Downloads.of(source, revision, root, whole_files=whole_files)
    source = downloads.location
    with _explained(source):
        if (dataset := hub_source(source, revision, hub_text)) is not None:
            return _facts_of(dataset, root)
        if (kept := downloads.kept()) is not None:
            return _facts(kept)
        filesystem, found, skipped, left_out, _ = list_files(downloads.at_commit(records=False), is_read=is_read)
        names = _names(found)
        sizes = {name: _size(filesystem, each) for name, each in zip(names, found, strict=True)}
        if not any(size is None or size > 0 for size in sizes.values()):
            raise InputError(
                f"corpus.source {redacted(source)!r} holds no text: all files are empty. Set corpus.source to files "
                "with text"
            )
        is_here = is_local(filesystem)
        local = [SourceFile(Path(each), name) for each, name in zip(found, names, strict=True) if is_here]
        return SourceFacts(sizes, skipped, local, left_out)


def _facts(files: list[SourceFile]) -> SourceFacts:
    return SourceFacts({each.name: each.path.stat().st_size for each in files}, [], files)


def _facts_of(dataset: HubSource, root: Path | None) -> SourceFacts:
    """Return what is known of a dataset's text: that it is there, if it was not downloaded before."""
    if root is not None and (kept := kept_hub_files(dataset, root)) is not None:
        return _facts(kept)
    found = look_at_dataset(dataset, root)
    return SourceFacts(dict.fromkeys(map(str, range(found.num_shards))), [], [])


def _size(filesystem: Any, path: str) -> int | None:
    size: int | None = Backoff().retried(lambda: filesystem.size(path), redacted(path), is_busy)
    return size


def _names(found: list[str]) -> list[str]:
    """Return the names of files relative to their common folder. Raises InputError for one that is not UTF-8."""
    require_utf8_names(found)
    base = os.path.commonpath([PurePosixPath(each).parent for each in found])
    return [str(PurePosixPath(each).relative_to(base)) for each in found]


def _explained(source: str) -> AbstractContextManager[None]:
    return explained(source, "cannot be read (corpus.source)", InputError)


PYDOCS = BUILT_IN
_PASSAGE_WORDS = 100
_TOPICS = "pydoc_data/topics.py"
# Some distributions package these separately, or leave them out.
_OPTIONAL = {"distutils", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "test", "tests"}
_INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def pydocs_files() -> list[SourceFile]:
    """Return the source files of the standard library, sorted by name."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    kept = [name for name in names if not (_OPTIONAL | _INSTALLED).intersection(name.split("/"))]
    if _TOPICS not in kept:
        raise InputError(
            f"the built-in text (corpus.source=pydocs) needs {library / _TOPICS}, which does not exist. Install Python "
            "with its documentation, or set corpus.source to your own files"
        )
    return [SourceFile(library / name, name) for name in kept]


def write_pydocs(path: Path, progress: Progress = silent) -> None:
    """Write the built-in corpus as JSON lines with id, title and text. Duplicate texts are left out."""
    files = pydocs_files()
    seen: set[str] = set()
    with replacing(path) as out:
        for done, source in enumerate(files, start=1):
            for passage in _passages(source):
                if passage.text not in seen:
                    seen.add(passage.text)
                    out.write(json.dumps(passage._asdict(), ensure_ascii=False).encode() + b"\n")
            progress("source files read", done, len(files))


def _passages(source: SourceFile) -> Iterator[Passage]:
    tree = ast.parse(source.path.read_bytes())
    documents = _topics(tree) if source.name == _TOPICS else _docstrings(tree, _module_name(source.name))
    for title, text in documents:
        words = text.split()
        for number, start in enumerate(range(0, len(words), _PASSAGE_WORDS)):
            yield Passage(f"{title}#{number}", title, " ".join(words[start : start + _PASSAGE_WORDS]))


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each topic of ``pydoc``, from the module's only dictionary."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield f"topic {name}", text


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified name and docstring of everything documented in ``node``, depth first."""
    if isinstance(node, _Documented) and (text := ast.get_docstring(node, clean=False)):
        yield name, inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif not isinstance(child, ast.expr):
            yield from _docstrings(child, name)


def _module_name(file_name: str) -> str:
    return file_name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

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
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_shards import HubSource, hub_files, hub_source, kept_hub_files, look_at_dataset
from t5train.data.download.kept_downloads import Downloads, download_places
from t5train.data.download.remote_reading import Backoff, is_busy
from t5train.data.download.source_listing import LeftOut, Matches, is_local, left_out_lines, list_files
from t5train.data.passages import READ_COLUMNS, Passage, SourceFile
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.host_resources import num_cores
from t5train.locations import explained, redacted, require_utf8_names
from t5train.progress import Progress, silent
from t5train.quantities import quantity
from t5train.spec.data_spec import HubText, TextSource
from t5train.spec.known_texts import BUILT_IN

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


def local_files(
    source: str,
    revision: str,
    root: Path,
    progress: Progress,
    hub_text: HubText | None = None,
    workers: int | None = None,
    *,
    whole_files: bool = False,
) -> list[SourceFile]:
    """Return the files of a source, sorted. Remote ones are downloaded to ``{root}/cache``, unless a copy is current.

    Those of a dataset of the Hub, ``hf://OWNER/NAME``, are made there of its rows (``hub_text``), by ``workers``
    processes. Of remote .parquet files that are mostly other columns, only what is read is fetched, unless
    ``whole_files``. What runs made below the source's folder is left out, and so is ``LeftOut``. If HF_HUB_OFFLINE or
    HF_DATASETS_OFFLINE is set, files of the Hub are those that were downloaded before. Raises InputError if no file is
    found, a named or matched file has an unknown format, the protocol is unknown, its package is not installed, or the
    store fails.
    """
    downloads = Downloads.of(source, revision, root, whole_files=whole_files)
    source = downloads.location
    with _explained(source):
        if (dataset := hub_source(source, revision, hub_text)) is not None:
            return hub_files(dataset, root, workers or num_cores(), progress)
        if (kept := downloads.kept()) is not None:
            return kept
        listed = list_files(downloads.at_commit(records=True))
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
        filesystem, found, skipped, left_out, _ = list_files(downloads.at_commit(records=False))
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

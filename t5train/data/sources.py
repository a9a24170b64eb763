"""Resolves a source (a path, folder, pattern or fsspec URL) to files on this machine.

The built-in source is the documentation that comes with Python, as passages of at most 100 words. It is taken from
Python source files, which are read but never imported. Only files that every distribution of Python includes are used,
so that the corpus depends only on the version of Python.
"""

import ast
import fnmatch
import glob
import inspect
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_shards import HubSource, hub_files, hub_source, kept_hub_files, look_at_dataset
from t5train.data.download.kept_downloads import Downloads, download_places
from t5train.data.download.remote_reading import Backoff, filesystem_of, is_busy, is_web, message_of
from t5train.data.formats.wikipedia_dump import require_one_form
from t5train.data.passages import READ_COLUMNS, Passage, SourceFile
from t5train.data.readers import FORMATS, format_of
from t5train.errors import InputError, printable
from t5train.files.atomic import replacing
from t5train.files.made_files import MadeFiles
from t5train.host_resources import num_cores, quantity
from t5train.locations import explained, redacted, require_utf8_names
from t5train.progress import Progress, silent
from t5train.spec.data_spec import HubText
from t5train.spec.known_texts import BUILT_IN

_SHOWN_NAMES = 5
_log = logging.getLogger(__name__)


class Matches(NamedTuple):
    """The files that a source stands for: their paths in ``filesystem``, sorted."""

    filesystem: Any
    files: list[str]
    skipped: list[str]
    """Files below a source's folder that have other formats."""
    made: int
    """How many more files there are that runs made."""


class SourceFacts(NamedTuple):
    """What is known of a source before its files are read."""

    sizes: dict[str, int | None]
    """The size of each file as stored, by its name; None if the store does not report it."""
    skipped: list[str]
    """Files of other formats, relative to the source's folder."""
    local: list[SourceFile]
    """The files, if they are on this machine; empty otherwise."""

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
    ``whole_files``. What runs made below the source's folder is left out. If HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is
    set, files of the Hub are those that were downloaded before. Raises InputError if no file is found, a named or
    matched file has an unknown format, the protocol is unknown, its package is not installed, or the store fails.
    """
    downloads = Downloads.of(source, revision, root, whole_files=whole_files)
    source = downloads.location
    with _explained(source):
        if (dataset := hub_source(source, revision, hub_text)) is not None:
            return hub_files(dataset, root, workers or num_cores(), progress)
        if (kept := downloads.kept()) is not None:
            return kept
        filesystem, found, skipped, made = _matched(downloads.at_commit(records=True))
        downloads.require_all(found)
        if skipped:
            _log.info("%s", skipped_line(skipped))
        if made:
            _log.info("leaving out %s that runs made", quantity(made, "file"))
        names = _names(found)
        if _is_local(filesystem):
            return [SourceFile(Path(each), name) for each, name in zip(found, names, strict=True)]
        cache = downloads.folder
        places = download_places(cache, names, f"corpus.source {redacted(source)!r}")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = [
            Wanted(each, place, downloads.known_digest(name), _columns(name, whole_files=whole_files))
            for each, place, name in zip(found, places, names, strict=True)
        ]
        download(filesystem, cache, wanted, progress)
        return list(map(SourceFile, places, names))


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
        filesystem, found, skipped, _ = _matched(downloads.at_commit(records=False))
        names = _names(found)
        sizes = {name: _size(filesystem, each) for name, each in zip(names, found, strict=True)}
        if not any(size is None or size > 0 for size in sizes.values()):
            raise InputError(
                f"corpus.source {redacted(source)!r} holds no text: all files are empty. Set corpus.source to files "
                "with text"
            )
        is_local = _is_local(filesystem)
        local = [SourceFile(Path(each), name) for each, name in zip(found, names, strict=True) if is_local]
        return SourceFacts(sizes, skipped, local)


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


def skipped_line(skipped: Sequence[str]) -> str:
    """Return a sentence that names the files of a source's folder that are not read."""
    return f"leaving out {quantity(len(skipped), 'file')} in other formats than {_formats()}: {few(skipped)}"


def _names(found: list[str]) -> list[str]:
    """Return the names of files relative to their common folder. Raises InputError for one that is not UTF-8."""
    require_utf8_names(found)
    base = os.path.commonpath([PurePosixPath(each).parent for each in found])
    return [str(PurePosixPath(each).relative_to(base)) for each in found]


def few(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(printable, names[:_SHOWN_NAMES])) + more


def _formats() -> str:
    return ", ".join(FORMATS)


def _matched(source: str) -> Matches:
    """Return the files of a source."""
    if not source.strip():
        raise InputError("the text is named by nothing: name a file, folder, pattern or URL")
    filesystem, path = filesystem_of(source)
    path = _without_parents(path) if _is_local(filesystem) else path
    shown = redacted(source)
    made = 0
    if not (is_web(filesystem) and glob.has_magic(path)) and _is_file(filesystem, path, shown):
        found = [path]
    elif filesystem.isdir(path):
        return _in_folder(filesystem, path, shown)
    else:
        matched = _in_pattern(filesystem, path, shown)
        found = MadeFiles(Path(_folder_of_pattern(path))).without(matched) if _is_local(filesystem) else matched
        made = len(matched) - len(found)
        if not found:
            raise InputError(f"corpus.source {shown!r} matches only what runs made. Correct the pattern")
    for each in found:
        if format_of(each) is None:
            raise InputError(
                f"corpus.source includes {printable(each)}, which has an unsupported format. Set corpus.source to "
                f"{_formats()} files only"
            )
    require_one_form(found)
    return Matches(filesystem, sorted(found), [], made)


def _is_file(filesystem: Any, path: str, shown: str) -> bool:
    """Return whether a path is a file. A busy web server is asked again, because fsspec says that it has no such file.

    Raises InputError if it stays busy.
    """
    if not is_web(filesystem):
        return bool(filesystem.isfile(path))
    try:
        return bool(Backoff().retried(lambda: filesystem.info(path), shown, is_busy))
    except FileNotFoundError as error:
        if is_busy(error):
            raise InputError(f"corpus.source {shown!r} cannot be read: {message_of(error)}. Try again later") from None
        return False


def _without_parents(path: str) -> str:
    """Return a local path without ``..``, which a record of the files may not contain. Links before it are followed."""
    parts = PurePosixPath(path).parts
    if ".." not in parts:
        return path
    last = len(parts) - parts[::-1].index("..")
    return str(PurePosixPath(os.path.realpath(PurePosixPath(*parts[:last])), *parts[last:]))


def _folder_of_pattern(path: str) -> str:
    """Return the innermost folder that contains all that a pattern can match."""
    parts = PurePosixPath(path).parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return str(PurePosixPath(*parts[:fixed]))


def _in_folder(filesystem: Any, path: str, shown: str) -> Matches:
    """Return all files of known formats in a folder, at any depth."""
    made = MadeFiles(Path(path))
    if _is_local(filesystem):
        _require_readable(path, lambda folder: not made.includes_folder(PurePosixPath(folder).relative_to(path)))
    entries = filesystem.find(path, detail=True)
    every = [each for each, entry in sorted(entries.items()) if not _is_device(entry)]
    files = made.without(every) if _is_local(filesystem) else every
    found = [each for each in files if format_of(each)]
    skipped = [str(PurePosixPath(each).relative_to(path)) for each in files if not format_of(each)]
    require_one_form(found)
    if not found:
        empty = " It has only what runs made." if every else " It is empty."
        only = f" It has only files of other formats: {few(skipped)}." if skipped else empty
        raise InputError(
            f"corpus.source {shown!r} is a folder without {_formats()} files.{only} Set corpus.source to a folder, "
            "file or pattern with such files"
        )
    return Matches(filesystem, found, skipped, len(every) - len(files))


def _in_pattern(filesystem: Any, path: str, shown: str) -> list[str]:
    """Return the files that a pattern matches. A path without wildcards matches nothing, because it does not exist."""
    if _is_local(filesystem) and glob.has_magic(path):
        _require_readable(_folder_of_pattern(path), lambda folder: _may_match_in(folder, path))
    found = [each for each in filesystem.glob(path) if _is_file(filesystem, each, shown)]
    if found:
        return found
    if glob.has_magic(path):
        raise InputError(f"corpus.source {shown!r} matches no file. Correct the pattern")
    if _is_local(filesystem) and _is_there(Path(path)):
        raise InputError(f"corpus.source {shown!r} is neither a file nor a folder. Set corpus.source to one of these")
    raise InputError(f"corpus.source {shown!r} does not exist. Correct the path or URL")


def _require_readable(top: str, may_hold_text: Callable[[str], bool]) -> None:
    """Raise the system's error if a folder below ``top`` cannot be listed: fsspec leaves such folders out silently.

    Only root can list lost+found, which every ext4 file system has, and which holds no text.
    """
    errors = list[OSError]()
    for folder, names, _ in os.walk(top, onerror=errors.append):
        names[:] = [each for each in names if each != "lost+found" and may_hold_text(str(Path(folder, each)))]
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise error


def _may_match_in(folder: str, pattern: str) -> bool:
    """Whether a pattern can match something in a folder, both absolute."""
    wanted, parts = PurePosixPath(pattern).parts, PurePosixPath(folder).parts
    fixed = wanted.index("**") if "**" in wanted else len(wanted)
    if len(parts) >= len(wanted) and fixed == len(wanted):
        return False
    return all(fnmatch.fnmatchcase(part, each) for part, each in zip(parts, wanted[:fixed], strict=False))


def _is_there(path: Path) -> bool:
    """Return whether a path exists. Raises the system's error if that cannot be determined."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _is_device(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a pipe, socket or device: reading one might never end.

    fsspec reports the type "other" for them, and for symbolic links.
    """
    return bool(entry["type"] == "other" and not entry.get("islink"))


def _is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else tuple(protocol))


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

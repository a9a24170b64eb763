"""Which files a path, folder, pattern or URL stands for, and which of them are text.

Names that begin with ``.`` or ``_`` are those of what programs keep for themselves: ``.ipynb_checkpoints``,
``.Trash-0``, ``._a.txt`` of macOS and its ``__MACOSX``, Spark's ``_temporary``. Most of it copies text, and a copy can
be in another split. So what has such a name below the named folder is left out, unless a pattern names it, and so are
further names of one file.
"""

import glob
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from t5train.data.download.remote_reading import (
    Backoff,
    filesystem_of,
    is_busy,
    is_hub,
    is_tar,
    is_web,
    linked_members,
    message_of,
)
from t5train.data.formats.wikipedia_dump import require_one_form
from t5train.data.readers import FORMATS, format_of
from t5train.errors import InputError, printable
from t5train.files.output_folder import MadeFiles
from t5train.quantities import quantity
from t5train.records.locations import redacted

_SHOWN_NAMES = 5


class LeftOut(NamedTuple):
    """Files of text formats that are not read, relative to the named folder."""

    hidden: Sequence[str] = ()
    """Those whose name, or that of a folder they are in, begins with ``.`` or ``_``."""
    copies: Sequence[str] = ()
    """Symbolic and hard links to files that are read."""
    folders: Sequence[str] = ()
    """Symbolic links to folders, which are not followed."""

    def lines(self) -> list[str]:
        """Return a sentence for each kind, with the number and the first names."""
        hidden, copies, folders = map(len, self)
        found = {
            f"{quantity(hidden, 'hidden file')} (. or _ begins a name)": self.hidden,
            f"{quantity(copies, 'link')} to files that are read": self.copies,
            f"{quantity(folders, 'link')} to folders, which are read only if they are named": self.folders,
        }
        return [f"leaving out {what}: {few(names)}" for what, names in found.items() if names]


class Matches(NamedTuple):
    """The files that a source stands for: their paths in ``filesystem``, sorted."""

    filesystem: Any
    files: list[str]
    skipped: list[str]
    """Files below a source's folder that have other formats."""
    left_out: LeftOut
    made: int
    """How many more files there are that runs made."""


def left_out_lines(skipped: Sequence[str], left_out: LeftOut) -> list[str]:
    """Return a sentence for each kind of files of a source that are not read."""
    return [*([skipped_line(skipped)] if skipped else []), *left_out.lines()]


def skipped_line(skipped: Sequence[str]) -> str:
    """Return a sentence that names the files of a source's folder that are not read."""
    return f"leaving out {quantity(len(skipped), 'file')} in other formats than {_formats()}: {few(skipped)}"


def few(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(printable, names[:_SHOWN_NAMES])) + more


def _formats() -> str:
    return ", ".join(FORMATS)


def list_files(source: str, *, with_left_out: bool = False, is_read: Callable[[str], Any] = format_of) -> Matches:
    """Return the files of a source, without ``LeftOut`` unless ``with_left_out``.

    Raises InputError if there are none, or if one that is named or matched has a name that is not ``is_read``.
    """
    if not source.strip():
        raise InputError("the text is named by nothing: name a file, folder, pattern or URL")
    filesystem, path = filesystem_of(source)
    path = _without_parents(path) if is_local(filesystem) else path
    plain = _plain(filesystem)
    shown = redacted(source)
    made, left_out = 0, LeftOut()
    if not (is_web(filesystem) and glob.has_magic(path)) and _is_file(filesystem, path, shown):
        found = [path]
    elif filesystem.isdir(path):
        return _in_folder(filesystem, path, shown, with_left_out)
    else:
        matched, folders = _in_pattern(filesystem, path, shown)
        hidden = [] if with_left_out else [each for each in matched if not _is_named(plain(each), plain(path))]
        of_user = sorted(set(matched) - set(hidden))
        found, copies = of_user, list[str]()
        if is_local(filesystem):
            by_runs = MadeFiles(Path(_folder_of_pattern(path)))
            found, folders = by_runs.without(of_user), by_runs.without(folders)
            made = len(of_user) - len(found)
            found, copies = (found, copies) if with_left_out else _without_copies(found)
        elif is_tar(filesystem) and not with_left_out:
            found, copies = _without_linked_members(filesystem, found)
        base = _folder_of_pattern(path)
        not_read = (hidden, copies, [] if with_left_out else folders)
        left_out = LeftOut(*([_below(plain(base), plain(each)) for each in names] for names in not_read))
        if not found and not made:
            raise InputError(
                f"corpus.source {shown!r} matches only hidden files: {few(left_out.hidden)}. To read them, name what "
                "begins with . or _ in the pattern"
            )
        if not found:
            raise InputError(f"corpus.source {shown!r} matches only what runs made. Correct the pattern")
    for each in found:
        if not is_read(each):
            raise InputError(
                f"corpus.source includes {printable(each)}, which has an unsupported format. Set corpus.source to "
                f"{_formats()} files only"
            )
    require_one_form(found)
    return Matches(filesystem, sorted(found), [], left_out, made)


def _below(folder: str, file: str) -> str:
    """Return a path relative to a folder; only its name if the store writes the folder in another way."""
    top, parts = _parts(folder), _parts(file)
    return "/".join(parts[len(top) :] if parts[: len(top)] == top else parts[-1:])


def _plain(filesystem: Any) -> Callable[[str], str]:
    """Return what gives the names in a path as they are: those of the web and of the Hub may be percent-encoded."""
    return unquote if is_web(filesystem) or is_hub(filesystem) else str


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


def _in_folder(filesystem: Any, path: str, shown: str, with_left_out: bool) -> Matches:
    """Return all files of known formats in a folder, at any depth."""
    made = MadeFiles(Path(path))
    if is_local(filesystem):
        _linked_folders(path, lambda folder: _may_have_text(PurePosixPath(folder).relative_to(path), made))
    entries = filesystem.find(path, detail=True)
    every = [each for each, entry in sorted(entries.items()) if not _is_device(entry)]
    plain = _plain(filesystem)
    below = {each: _below(plain(path), plain(each)) for each in every}
    hidden = [] if with_left_out else [each for each in every if format_of(each) and _is_hidden(below[each])]
    shown_files = sorted(set(every) - set(hidden))
    of_user = made.without(shown_files) if is_local(filesystem) else shown_files
    found, copies, folders = [each for each in of_user if format_of(each)], list[str](), list[str]()
    if is_local(filesystem) and not with_left_out:
        folders = [each for each in of_user if entries[each].get("islink") and Path(each).is_dir()]
        found, copies = _without_copies(each for each in found if _is_file_or_broken(each))
    elif is_tar(filesystem) and not with_left_out:
        found, copies = _without_linked_members(filesystem, found)
    left_out = LeftOut(*([below[each] for each in names] for names in (hidden, copies, folders)))
    skipped = [below[each] for each in of_user if not format_of(each) and each not in folders]
    require_one_form(found)
    if not found:
        reasons = [f" It has only files of other formats: {few(skipped)}."] if skipped else []
        reasons += [f" {line[0].upper()}{line[1:]}." for line in left_out.lines()]
        empty = " It has only what runs made." if every else " It is empty."
        raise InputError(
            f"corpus.source {shown!r} is a folder without {_formats()} files.{''.join(reasons) or empty} Set "
            "corpus.source to a folder, file or pattern with such files"
        )
    return Matches(filesystem, found, skipped, left_out, len(shown_files) - len(of_user))


def _may_have_text(place: PurePosixPath, made: MadeFiles) -> bool:
    return not _is_hidden(str(place)) and not made.includes_folder(place)


def _in_pattern(filesystem: Any, path: str, shown: str) -> tuple[list[str], list[str]]:
    """Return the files that a pattern matches, and the links to folders that it may match, but that are not followed.

    A path without wildcards matches nothing, because it does not exist.
    """
    links = list[str]()
    if is_local(filesystem) and glob.has_magic(path):
        links = _linked_folders(_folder_of_pattern(path), lambda folder: _may_be_named_in(folder, path))
    is_file = _is_file_or_broken if is_local(filesystem) else lambda each: _is_file(filesystem, each, shown)
    found = list(filter(is_file, filesystem.glob(path)))
    if found:
        return found, links
    if glob.has_magic(path):
        not_followed = f" (links to folders are read only if they are named: {few(links)})" if links else ""
        raise InputError(f"corpus.source {shown!r} matches no file{not_followed}. Correct the pattern")
    if is_local(filesystem) and _is_there(Path(path)):
        raise InputError(f"corpus.source {shown!r} is neither a file nor a folder. Name a file or folder of text")
    raise InputError(f"corpus.source {shown!r} does not exist. Correct the path or URL")


def _linked_folders(top: str, may_hold_text: Callable[[str], bool]) -> list[str]:
    """Return the symbolic links to folders below ``top``, which fsspec does not follow.

    Raises the system's error if a folder cannot be listed: fsspec leaves such folders out silently. Only root can list
    lost+found, which every ext4 file system has, and which holds no text.
    """
    errors, links = list[OSError](), list[str]()
    for folder, names, _ in os.walk(top, onerror=errors.append):
        names[:] = [each for each in names if each != "lost+found" and may_hold_text(str(Path(folder, each)))]
        links += [str(place) for each in names if (place := Path(folder, each)).is_symlink()]
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise error
    return sorted(links)


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


def _is_hidden(place: str) -> bool:
    """Whether a name in a relative path begins with ``.`` or ``_``."""
    return any(map(_begins_hidden, _parts(place)))


def _is_named(path: str, pattern: str) -> bool:
    """Whether a pattern that matches a file names all of its parts that begin with ``.`` or ``_``.

    ``_part/*.txt`` and ``[._]*.txt`` do; ``*``, ``?`` and ``**`` name no such part.
    """
    parts, wanted = _parts(path), _parts(pattern)
    fixed = next((number for number, each in enumerate(wanted) if _has_magic(each)), len(wanted))
    if parts[:fixed] != wanted[:fixed]:  # a store may write the named folder in another way
        parts, wanted = parts[fixed - len(wanted) :], wanted[fixed - len(wanted) :]
    return _is_matched(parts, wanted)


def _may_be_named_in(folder: str, pattern: str) -> bool:
    """Whether a pattern can match something in a folder that ``is_named``."""
    parts, wanted = _parts(folder), _parts(pattern)
    fixed = wanted.index("**") if "**" in wanted else len(wanted)
    if len(parts) >= len(wanted) and fixed == len(wanted):
        return False
    if not all(_is_part(part, each) for part, each in zip(parts, wanted[:fixed], strict=False)):
        return False
    is_below_hidden = any(map(_begins_hidden, parts[fixed:]))
    return not is_below_hidden or any(_begins_hidden(each) or each.startswith("[") for each in wanted[fixed:])


def _is_matched(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    first, rest = wanted[0], wanted[1:]
    if first == "**":
        is_deeper = bool(parts) and not _begins_hidden(parts[0]) and _is_matched(parts[1:], wanted)
        return is_deeper or _is_matched(parts, rest)
    return bool(parts) and _is_part(parts[0], first) and _is_matched(parts[1:], rest)


def _is_part(part: str, wanted: str) -> bool:
    """Whether a part of a pattern matches a name, and names its first character if that is ``.`` or ``_``."""
    if part == wanted:
        return True
    return fnmatchcase(part, wanted) and (not _begins_hidden(part) or _names_first(part[0], wanted))


def _names_first(character: str, wanted: str) -> bool:
    if not wanted.startswith("[") or wanted.startswith("[!"):
        return wanted.startswith(character)
    return fnmatchcase(character, wanted[: wanted.index("]", 2) + 1])


def _begins_hidden(name: str) -> bool:
    return name.startswith((".", "_")) and name != ".."  # which is refused, not left out


def _has_magic(part: str) -> bool:
    return any(each in part for each in "*?[")


def _parts(path: str) -> list[str]:
    return [each for each in path.split("/") if each not in ("", ".")]


def _without_copies(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return files without further names of the same file, and these names.

    Of a file with several names, one that is no symbolic link is kept, and of these the first. Raises InputError for a
    link that leads to no file.
    """
    is_link = {each: Path(each).is_symlink() for each in files}
    of_links = any(is_link.values())
    return _once(is_link, lambda each: _identity(each, is_resolved=of_links))


def _without_linked_members(filesystem: Any, files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return files of a .tar archive as ``_without_copies`` does."""
    linked = linked_members(filesystem, files)
    is_link = {each: target is not None for each, target in linked.items()}
    return _once(is_link, lambda each: linked[each] or posixpath.normpath(each))


def _once(is_link: Mapping[str, bool], identity: Callable[[str], object]) -> tuple[list[str], list[str]]:
    kept, seen, copies = list[str](), set[object](), list[str]()
    for each in sorted(is_link, key=lambda name: (is_link[name], name)):
        found = identity(each)
        (copies if found in seen else kept).append(each)
        seen.add(found)
    return sorted(kept), sorted(copies)


def file_identity(path: str) -> object:
    """Return what is the same for all names of a file, and differs between files.

    Inodes are compared only for files that have several hard links, because some file systems make up their numbers.
    Raises InputError for a link that leads to no file.
    """
    return _identity(path, is_resolved=True)


def _identity(path: str, *, is_resolved: bool) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        if not Path(path).is_symlink():
            raise
        raise InputError(
            f"{path} is a link to {Path(path).readlink()}, which cannot be opened. Restore that file, or remove the "
            "link"
        ) from None
    if found.st_nlink > 1 and found.st_ino:
        return (found.st_dev, found.st_ino)
    return os.path.realpath(path) if is_resolved else path


def _is_file_or_broken(path: str) -> bool:
    """Whether a local path is a regular file, or a link to one or to nothing; not if it is a folder or a device."""
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except OSError:
        return Path(path).is_symlink()


def is_local(filesystem: Any) -> bool:
    """Whether the files are on this machine."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else tuple(protocol))

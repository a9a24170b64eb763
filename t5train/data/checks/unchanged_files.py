"""The digests of the files of a text, which identify it, and whether files are changed while they are read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from t5train.data.download.kept_downloads import whole_digest
from t5train.data.passages import SourceFile
from t5train.errors import DigestMismatch, InputError
from t5train.files.atomic import write_json
from t5train.files.os_errors import explain
from t5train.host_resources import num_cores
from t5train.progress import Progress
from t5train.records.digests import FileDigest, FileStamp, digest_file, verify_file


def stamps_of(sources: Iterable[SourceFile]) -> dict[Path, FileStamp]:
    """Return the stamps of files, by path. A file that cannot be looked at has none: reading it says why."""
    found = dict[Path, FileStamp]()
    for source in sources:
        with suppress(OSError):
            found[source.path] = FileStamp.of(source.path)
    return found


def digests_of(sources: Sequence[SourceFile], progress: Progress) -> dict[SourceFile, FileDigest]:
    """Return the digests of files, in their order. Raises InputError if one cannot be read."""
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
        raise InputError(f"{source.shown} cannot be read: {explain(error)}") from error


def content_of(digests: Mapping[SourceFile, FileDigest]) -> list[dict[str, Any]]:
    """Return the name, size and sha256 of each file, as they identify a text.

    Columns of a file stand for the whole file, however they were transferred.
    """
    return [
        {"name": each.name, **({"part": each.part} if each.part else {})}
        | (whole_digest(each.path) or digests[each]).model_dump()
        for each in digests
    ]


def require_unchanged(before: Mapping[Path, FileStamp], digests: Mapping[SourceFile, FileDigest]) -> None:
    """Raise InputError if a file has another stamp than before, and its content differs from its digest."""
    now = stamps_of(digests)
    _require({each.path: digest for each, digest in digests.items() if now.get(each.path) != before.get(each.path)})


def require_recorded(paths: Iterable[str], recorded: Mapping[str, FileDigest]) -> None:
    """Raise InputError if the content of one of the files at ``paths`` differs from what was recorded under its path.

    Paths without a record are those of files that the corpus stage made.
    """
    of_path = {str(Path(path).absolute()): digest for path, digest in recorded.items()}
    _require({Path(each): of_path[each] for each in {*paths} & of_path.keys()})


class TextStamps:
    """The stamps of the files that the shards in a folder are made of, kept there while they are made.

    Files that were changed since may have been changed back, so shards that were made of them meanwhile do not count.
    """

    NAME = ".text-stamps.json"

    def __init__(self, folder: Path, paths: Iterable[str]) -> None:
        self._file = folder / self.NAME
        self._paths = sorted({*paths})

    def changed(self) -> set[str]:
        """Return the files that were changed since ``keep``; none if it was not called."""
        kept = json.loads(self._file.read_bytes()) if self._file.exists() else {}
        now = self._now()
        return {path for path in self._paths if path in kept and kept[path] != now.get(path)}

    def keep(self) -> None:
        """Keep the present stamps."""
        write_json(self._file, self._now())

    def forget(self) -> None:
        """Keep no stamps, because all shards are made."""
        self._file.unlink(missing_ok=True)

    def _now(self) -> dict[str, list[int]]:
        found = stamps_of(SourceFile(Path(path), path) for path in self._paths)
        return {str(path): list(stamp) for path, stamp in found.items()}


def _require(expected: Mapping[Path, FileDigest]) -> None:
    with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
        for fault in pool.map(_fault, expected, expected.values()):
            if fault is not None:
                raise InputError(
                    f"a file of the text was changed while it was read: {fault}. Start again, and leave the text as "
                    "it is until the run has its token shards"
                )


def _fault(path: Path, digest: FileDigest) -> str | None:
    try:
        verify_file(path, digest)
    except DigestMismatch as error:
        return str(error).removesuffix(": restore it or make it again")
    return None

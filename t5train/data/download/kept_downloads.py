"""Earlier downloads that are used without asking the store."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from t5train.data.download.downloads import downloaded_before
from t5train.data.download.partial_file import read_note, whole_copies
from t5train.data.passages import SourceFile
from t5train.errors import InputError
from t5train.files.confined import confined
from t5train.locations import redacted
from t5train.records.digests import FileDigest
from t5train.spec.known_texts import known_texts

_OFFLINE, _TRUE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), {"1", "ON", "YES", "TRUE"}


def cache_folder(source: str, revision: str, root: Path, *, whole_files: bool = False) -> Path:
    """Return the folder for the downloads of a source. Whole files are apart from those of which columns are read."""
    named = [redacted(source), revision, *(["whole files"] if whole_files else [])]
    key = hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]
    return root.absolute() / "cache" / key


def known_digests(source: str) -> dict[str, FileDigest]:
    """Return the digests of the files of a text that has a name, by the names of the files; empty for others."""
    known = known_texts().get(source)
    digests = {} if known is None else known.files
    return {name: FileDigest(size=each.size, sha256=each.sha256) for name, each in digests.items()}


def kept_files(source: str, cache: Path, digests: Mapping[str, FileDigest]) -> list[SourceFile] | None:
    """Return the earlier downloads of a source if they are used without asking its store; None otherwise.

    That is so for the Hub if it is not to be asked, and for files that all have known digests and are here. Raises
    InputError if the Hub is not to be asked, and a file is not here.
    """
    if digests:
        return _with_known_content(cache, digests)
    switch = next((each for each in _OFFLINE if os.environ.get(each, "").upper() in _TRUE), None)
    if switch is None or not source.startswith("hf://"):
        return None
    names = downloaded_before(cache)
    if names is None:
        raise InputError(
            f"corpus.source {redacted(source)!r} is not on this machine, and {switch} does not allow downloading it. "
            f"Unset {switch}, or run `t5-pretrain corpus` with the same source, revision and root where it is not set"
        )
    return [SourceFile(cache / name, name) for name in names]


def _with_known_content(cache: Path, digests: Mapping[str, FileDigest]) -> list[SourceFile] | None:
    files = [SourceFile(confined(cache, name, "the list of known texts", InputError), name) for name in digests]
    for file in files:
        note = read_note(file.path)
        if note is None or note.content != digests[file.name]:
            return None
    return files if all(whole_copies([file.path for file in files])) else None

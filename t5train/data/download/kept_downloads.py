"""Earlier downloads that are used without asking the store."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from t5train.data.download.downloads import downloaded_before
from t5train.data.download.hub_commit import (
    commit_of,
    files_at,
    offline_switch,
    record_commit,
    recorded_commit,
    repository_of,
    require_online,
)
from t5train.data.download.partial_file import read_note, whole_copies
from t5train.data.passages import SourceFile
from t5train.errors import InputError
from t5train.files.confined import confined, require_distinct
from t5train.locations import redacted
from t5train.quantities import quantity
from t5train.records.digests import FileDigest
from t5train.spec.known_texts import KnownText, known_texts, location_of


def cache_folder(source: str, revision: str, root: Path, more: Sequence[str] = ()) -> Path:
    """Return the folder for the downloads of a source. ``more`` are further settings that choose its text."""
    key = hashlib.sha256("\n".join([redacted(source), revision, *more]).encode()).hexdigest()[:16]
    return root.absolute() / "cache" / key


def download_places(folder: Path, names: list[str], shown: str) -> list[Path]:
    """Return the local paths of downloads. All names are checked first, because the server chooses them."""
    require_distinct(names, shown, InputError)
    places = [confined(folder, name, shown, InputError) for name in names]
    for parent in {parent for place in places for parent in place.parents if parent.is_relative_to(folder)}:
        if parent.is_symlink():
            raise InputError(
                f"{parent} is a symbolic link, so {shown} would be downloaded to the link's target. Remove the link"
            )
    return places


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

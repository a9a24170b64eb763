"""Which files below a folder were made by runs: recognised by what runs leave beside them, not by their names."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

from t5train.files.run_folder import RUN, RUNS

CLAIM = ".claim"
"""The file in the folder of a data stage that says for which result it is."""
DOWNLOADED = ".download.json"
"""The end of the name of a downloaded file's note, which lies beside the file."""


def is_result(file: PurePath) -> bool:
    """Whether a path is in the folder of a finished data stage, which makes its files again if some are gone."""
    return all(Path(file.parent, name).exists() for name in (CLAIM, "manifest.json"))


class MadeFiles:
    """The files below a folder that runs made under it, whatever their root."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._folders = {PurePosixPath(): False}
        """Whether runs made what is in a folder, by its path relative to ``top``, which itself counts as the user's."""

    def includes(self, file: str) -> bool:
        """Whether runs made a file below ``top``."""
        place = PurePosixPath(file).relative_to(self._top)
        note = f"{file}{DOWNLOADED}"
        return self.includes_folder(place.parent) or os.path.exists(note)  # noqa: PTH110  Path refuses one too long

    def includes_folder(self, place: PurePosixPath) -> bool:
        """The same for all that is in a folder, given relative to ``top``."""
        if place not in self._folders:
            self._folders[place] = self.includes_folder(place.parent) or _is_made(self._top / place)
        return self._folders[place]

    def without(self, files: Iterable[str]) -> list[str]:
        """Return the files that no run made."""
        return [file for file in files if not self.includes(file)]


def _is_made(folder: Path) -> bool:
    """Whether a folder is a run, the result of a data stage, a home of Prefect's server, or that of the regression."""
    marks = [CLAIM]
    if folder.parent.name == RUNS:
        marks += [RUN, "lock"]
    if folder.name.startswith(("prefect", "server")):
        marks += ["api-key"]
    if folder.name == "regression":
        marks += ["nights"]
    return any((folder / mark).exists() for mark in marks)

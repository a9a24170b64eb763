"""Which files below a folder were made by runs: those in the folders that runs make in their root."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from t5train.files.run_folder import RUN, RUNS

CLAIM = ".claim"
"""The file in the folder of a data stage that says for which result it is."""
_STAGES = ("corpus", "shards", "tokenizer")
_FOLDERS = frozenset({"cache", "prefect", "published", "regression", RUNS, *_STAGES})


def without_made(files: Iterable[str], top: Path, root: Path) -> list[str]:
    """Return the files below ``top`` that no run made, under ``root`` or under another root below ``top``."""
    roots = {os.path.realpath(root): True}

    def is_made(file: str) -> bool:
        folders = PurePosixPath(file).relative_to(top).parts[:-1]
        above = (os.path.realpath(top.joinpath(*folders[:i])) for i, name in enumerate(folders) if name in _FOLDERS)
        return any(roots[each] if each in roots else roots.setdefault(each, _is_root(Path(each))) for each in above)

    return [file for file in files if not is_made(file)]


def _is_root(folder: Path) -> bool:
    """Whether runs have made something in a folder: it has a run, or the folder of a data stage."""
    marks = (f"{RUNS}/*/{RUN}", *(f"{stage}/*/{CLAIM}" for stage in _STAGES))
    return any(next(folder.glob(mark), None) for mark in marks)

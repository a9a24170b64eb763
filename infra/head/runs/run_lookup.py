"""Finds the run that a user names: by its name under a root, or by the path of its folder."""

import os
import re
import shlex
from pathlib import Path

from t5train.errors import InputError
from t5train.files.presence import is_folder, is_there, visible_in
from t5train.files.run_folder import ATTEMPTS, CHECKPOINTS, EXPORT, LAST_START, METRICS, PUBLICATIONS, RUN, RUNS
from t5train.spec import RUN_NAME_PATTERN, nearest

_SIGNS = ("lock", RUN, LAST_START, METRICS, CHECKPOINTS, ATTEMPTS)
"""Any of these files in a folder shows that it is a run's."""


def find_run(root: Path, named: str) -> Path:
    """Return the absolute path of the folder of a run, ``{root}/runs/{name}``; ``named`` is its name or that path.

    Raises InputError with the nearest name if there is no such run.
    """
    folder = folder_of_run(root, named)
    if not is_folder(folder):
        names = [path.name for path in visible_in(folder.parent) if is_folder(path)]
        raise InputError(
            f"there is no run {folder.name!r} in {folder.parent}{nearest(folder.name, names)}. "
            f"{_status(root_of_run(folder))} lists the runs; --root names another folder"
        )
    if not _is_run(folder):
        raise InputError(
            f"{folder} is not the folder of a run: it has no {RUN}. {_status(root_of_run(folder))} lists the runs"
        )
    return folder


def folder_of_run(root: Path, named: str) -> Path:
    """Return the path of a run's folder, whether or not it exists. Raises InputError if it would not be in ``runs``."""
    if re.fullmatch(RUN_NAME_PATTERN, named):
        return root / RUNS / named
    folder = Path(os.path.abspath(Path(named).expanduser()))  # noqa: PTH100 - resolve() would follow links
    is_path = os.sep in named and ".." not in Path(named).parts
    if not is_path or folder.parent.name != RUNS or not re.fullmatch(RUN_NAME_PATTERN, folder.name):
        raise InputError(
            f"{named!r} is neither the name of a run nor the path of its folder, which is {root / RUNS}/NAME. "
            f"{_status(root)} lists the names"
        )
    return folder


def _status(root: Path) -> str:
    return f"`t5-pretrain status --root {shlex.quote(str(root))}`"


def run_of_result(path: Path) -> Path | None:
    """Return the folder of the run that puts a result at an absolute path; None if there is no such run.

    The path is that of the run's folder, of its export, or of where it is published under the root.
    """
    folder = path.parent if path.name == EXPORT else path
    if folder.parent.name == PUBLICATIONS:
        folder = folder.parent.with_name(RUNS) / folder.name
    return folder if folder.parent.name == RUNS and _is_run(folder) else None


def _is_run(folder: Path) -> bool:
    return any(is_there(folder / sign) for sign in _SIGNS)


def root_of_run(folder: Path) -> Path:
    """Return the root that a run's folder is under."""
    return folder.parent.parent

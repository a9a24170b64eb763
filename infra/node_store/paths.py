"""Where things lie on a node's own disk.

::

    {scratch}/
        shards/{name}/                  staged token shards, named as on the root
        staged/{name}-{fingerprint}/    other folders that a run begins from, staged
        runs/{name}/checkpoints/        by ``name_on_nodes``: what this node's ranks wrote, a folder a tag
        runs/{name}/owner.json          which run that belongs to (infra.node_store.ownership)
        set-aside/{name}/               what of it must neither be used nor deleted; nothing prunes or frees it

The scratch folder is ``storage.scratch``, by default within the node folder.
"""

import os
import stat
from pathlib import Path

from infra.node_folder import node_folder
from t5train.confined import confined
from t5train.errors import StorageError
from t5train.run_files import CHECKPOINTS, RUNS, SET_ASIDE

SHARDS = "shards"
STAGED = "staged"


def scratch_folder(chosen: Path | str | None) -> Path:
    """The scratch folder of this machine, made if it is not there; ``chosen`` is ``storage.scratch``.

    Raises StorageError if it cannot be made, or if others can write to it.
    """
    folder = Path(chosen) if chosen is not None else node_folder() / "scratch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}; choose another storage.scratch") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StorageError(
            f"{folder} belongs to user {found.st_uid} and has the mode {stat.filemode(found.st_mode)}: only its owner, "
            f"user {os.getuid()}, may write to storage.scratch; choose a folder within it"
        )
    return folder


def shards_place(name: str) -> str:
    """Place of staged token shards within the scratch folder."""
    return f"{SHARDS}/{name}"


def staged_place(name: str, fingerprint: str) -> str:
    """Place of another staged folder within the scratch folder."""
    return f"{STAGED}/{name}-{fingerprint[:12]}"


def name_on_nodes(run_name: str, run_fingerprint: str) -> str:
    """What a run is called on nodes. One of the same name and settings under another root is called the same, and is
    told apart by its owner (infra.node_store.ownership).
    """
    return f"{run_name}-{run_fingerprint[:12]}"


def run_name_of(name: str) -> str:
    """The name of a run that is called so on nodes."""
    return name.rpartition("-")[0]


def run_place(run_name: str) -> str:
    """Place of a run within the scratch folder."""
    return f"{RUNS}/{run_name}"


def tag_place(run_name: str, tag: str) -> str:
    """Place of a tag of a run within the scratch folder."""
    return f"{RUNS}/{run_name}/{CHECKPOINTS}/{tag}"


def aside_place(run_name: str) -> str:
    """Place within the scratch folder for what of a run must neither be used nor deleted."""
    return f"{SET_ASIDE}/{run_name}"


def within(folder: Path, name: str) -> Path:
    """``folder / name`` for a name that another machine sent; StorageError for one that leads out of the folder."""
    return confined(folder, name, "the other machine")

"""The folders that each machine keeps for a user: the node folder at a fixed path, and the scratch folder.

::

    /var/tmp/t5-pretrain-{uid}/
        attempts/{run_id}/              files of an attempt, listed in infra.node.attempts.attempt
        heads/{run_id}/                 on the head's machine, which may also be a host: files of the launcher
        locks/{accelerator}-{slot}.lock held by the rank that uses the accelerator
        wheels/                         wheels of the last installation (infra.node.environment_installer)
        code/{digest}/                  code that a head has sent here (infra.head.hosts.code_shipping)
        operators/{key}/                operators that DeepSpeed has compiled (infra.node.operator_folder)
        dask/                           folders of Dask's workers, with nothing but locks (infra.node.stages)
        inductor/{key}/, triton/{key}/  what torch.compile and Triton have generated

    {scratch}/                          ``storage.scratch``, by default within the node folder
        shards/{name}/                  staged token shards, with the same name as under the root
        staged/{name}-{fingerprint}/    other staged folders that a run begins from, and models that predict
        staged/predict-{number}/        rows and parts while this node predicts
        runs/{name}/checkpoints/        what this node's ranks wrote, one folder per tag
        runs/{name}/owner.json          which run these files belong to (infra.node.attempts.run_ownership)
        set-aside/{name}/               files of a run that must be neither used nor deleted; nothing removes them

``name`` of a run is its ``name_on_nodes``. Anyone can write to ``/var/tmp``, so the node folder is used only if only
this user can access it. Standard library only, as the guards import it.
"""

import os
import re
import stat
from pathlib import Path

from t5train.errors import StorageError
from t5train.files.confined import confined
from t5train.files.locks import private_folder
from t5train.files.os_errors import reason
from t5train.files.run_folder import CHECKPOINTS, RUNS, SET_ASIDE

PARENT = Path("/var/tmp")  # noqa: S108 - survives a reboot, is on a disk, and exists on every machine
ATTEMPTS, CODE, HEADS = "attempts", "code", "heads"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def node_path(*names: str) -> Path:
    """A path in this user's node folder, whether or not it exists."""
    return PARENT.joinpath(f"t5-pretrain-{os.getuid()}", *names)


def node_folder() -> Path:
    """This user's node folder, created for its owner alone if it does not exist.

    Raises StorageError if it is a link, belongs to another user, or is open to others.
    """
    return private_folder(node_path())


def attempts_folder() -> Path:
    """The parent of the folders of this machine's attempts, which are named by run id."""
    return private_folder(node_folder() / ATTEMPTS)


def locks_folder() -> Path:
    """The folder of the locks of this machine's accelerators."""
    return private_folder(node_folder() / "locks")


def code_folder(digest: str) -> Path:
    """The path for the code with that digest, whether or not it exists."""
    return node_path(CODE, digest)


def attempt_folder(run_id: str) -> Path:
    """The path for the attempt with that run id, whether or not it exists. Raises StorageError if the id is invalid."""
    return attempts_folder() / _fit(run_id)


def head_folder(run_id: str) -> Path:
    """The path for the head's own files of that attempt. Raises StorageError if the id is invalid."""
    return heads_folder() / _fit(run_id)


def heads_folder() -> Path:
    """The parent of the folders for the own files of heads on this machine, which are named by run id."""
    return private_folder(node_folder() / HEADS)


def _fit(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise StorageError(f"{run_id!r} is not a valid attempt id: use letters, digits, '.', '_' and '-'")
    return run_id


SHARDS = "shards"
PAIR_SHARDS = "pair-shards"
"""Where the shards of pairs are below the root. On hosts, they are staged as token shards are."""
STAGED = "staged"


def scratch_folder(chosen: Path | None) -> Path:
    """The scratch folder of this machine, created if it does not exist; ``chosen`` is ``storage.scratch``.

    Raises StorageError if it cannot be created, or if others can write to it.
    """
    folder = chosen if chosen is not None else node_folder() / "scratch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise StorageError(f"{folder} (storage.scratch) cannot be created: {reason(error, folder)}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StorageError(
            f"{folder} belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}, but storage.scratch "
            f"must belong to user {os.getuid()} and be writable by that user only. Choose a folder within it"
        )
    return folder


def shards_path(name: str) -> str:
    """Relative path of staged token shards within the scratch folder."""
    return f"{SHARDS}/{name}"


def staged_path(name: str, fingerprint: str) -> str:
    """Relative path of another staged folder within the scratch folder."""
    return f"{STAGED}/{name}-{fingerprint[:12]}"


def name_on_nodes(run_name: str, run_fingerprint: str) -> str:
    """The name of a run on nodes.

    A run with the same name and settings under another root has the same name on nodes; its owner tells them apart
    (infra.node.attempts.run_ownership).
    """
    return f"{run_name}-{run_fingerprint[:12]}"


def run_name_of(name: str) -> str:
    """The name of a run, given its name on nodes."""
    return name.rpartition("-")[0]


def run_path(run_name: str) -> str:
    """Relative path of a run within the scratch folder."""
    return f"{RUNS}/{run_name}"


def tag_path(run_name: str, tag: str) -> str:
    """Relative path of a tag of a run within the scratch folder."""
    return f"{RUNS}/{run_name}/{CHECKPOINTS}/{tag}"


def set_aside_path(run_name: str) -> str:
    """Relative path within the scratch folder for files of a run that are set aside."""
    return f"{SET_ASIDE}/{run_name}"


def within(folder: Path, name: str) -> Path:
    """``folder / name`` for a name that another machine sent. Raises StorageError if it leads out of the folder."""
    return confined(folder, name, "the other machine")

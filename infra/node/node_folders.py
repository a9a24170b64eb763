"""The folders that each machine keeps for a user: the node folder at a fixed path, and the scratch folder.

::

    /var/tmp/t5-pretrain-{uid}/
        attempts/{run_id}/              files of an attempt, named as infra.node.attempts.attempt says
        heads/{run_id}/                 on the head's machine, which may be one of the hosts: its launcher's files
        locks/{accelerator}-{slot}.lock held by the rank that uses the accelerator
        code/{digest}/                  a head's code that was sent here (infra.head.hosts.code_shipping)
        operators/{key}/                what DeepSpeed has compiled (infra.node.operator_folder)

    {scratch}/                          ``storage.scratch``, by default within the node folder
        shards/{name}/                  staged token shards, named as on the root
        staged/{name}-{fingerprint}/    other folders that a run begins from, staged
        runs/{name}/checkpoints/        by ``name_on_nodes``: what this node's ranks wrote, a folder a tag
        runs/{name}/owner.json          which run that belongs to (infra.node.attempts.run_ownership)
        set-aside/{name}/               what of it must neither be used nor deleted; nothing prunes or frees it

Everybody may write to ``/var/tmp``, so what lies at that path is used only if it is surely this user's own.
Standard library only, as the guards import it.
"""

import os
import re
import stat
from pathlib import Path

from t5train.errors import StorageError
from t5train.files.confined import confined
from t5train.files.locks import private_folder
from t5train.files.run_folder import CHECKPOINTS, RUNS, SET_ASIDE

PARENT = Path("/var/tmp")  # noqa: S108 - outlives a reboot, is on a disk, and is there on every machine
ATTEMPTS, CODE, HEADS = "attempts", "code", "heads"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def node_path(*names: str) -> Path:
    """Where that lies in this user's folder on a machine, be it there or not."""
    return PARENT.joinpath(f"t5-pretrain-{os.getuid()}", *names)


def node_folder() -> Path:
    """This user's folder on this machine; made, for its owner alone, if it is not there.

    Raises StorageError if it is a link, another user's, or open to others.
    """
    return private_folder(node_path())


def attempts_folder() -> Path:
    """Where attempts of this machine lie, one folder a run id."""
    return private_folder(node_folder() / ATTEMPTS)


def locks_folder() -> Path:
    """Where the locks of this machine's accelerators lie."""
    return private_folder(node_folder() / "locks")


def code_folder(digest: str) -> Path:
    """Where code of that digest lies that a head has sent, or would."""
    return node_path(CODE, digest)


def attempt_folder(run_id: str) -> Path:
    """Where the attempt of that run id lies, or would; StorageError if the id is not fit for a name."""
    return attempts_folder() / _fit(run_id)


def head_folder(run_id: str) -> Path:
    """Where the head keeps what is its own of that attempt; StorageError if the id is not fit for a name."""
    return heads_folder() / _fit(run_id)


def heads_folder() -> Path:
    """Where heads of this machine keep what is their own, one folder a run id."""
    return private_folder(node_folder() / HEADS)


def _fit(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise StorageError(f"{run_id!r} is not the id of an attempt: letters, digits, '.', '_' and '-' make one")
    return run_id


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
    told apart by its owner (infra.node.attempts.run_ownership).
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

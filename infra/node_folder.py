"""The folder that each machine keeps for the attempts of a user: at a fixed path, on a disk of its own.

::

    /var/tmp/t5-pretrain-{uid}/
        attempts/{run_id}/              files of an attempt, named as infra.attempts.attempt says
        heads/{run_id}/                 on the head's machine, which may be one of the hosts: its launcher's files
        locks/{accelerator}-{slot}.lock held by the rank that uses the accelerator
        code/{digest}/                  a head's code that was sent here (infra.cluster.shipping)
        operators/{key}/                what DeepSpeed has compiled (infra.operator_folder)

Everybody may write to ``/var/tmp``, so what lies at that path is used only if it is surely this user's own.
Standard library only, as the guards import it.
"""

import os
import re
from pathlib import Path

from t5train.errors import StorageError
from t5train.private_folder import private_folder

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

"""Whether DeepSpeed finds ninja and its compiled operators on a node, as ranks will look for them."""

import os
import shutil
from collections.abc import Mapping

from infra import op_cache
from infra.environment import search_path
from infra.operator_folder import VARIABLE, operator_folder
from infra.preflight.facts import Build
from t5train.errors import StorageError


def build(given: Mapping[str, str]) -> Build:
    """With the variables that ranks get from the head, and otherwise this node's, as sshd gives them.

    Stale locks of the cache of operators are removed.
    """
    environment = {**os.environ, **given}
    path = search_path()
    try:
        environment |= {VARIABLE: str(operator_folder(environment))}
    except StorageError:  # which preflight/room.py reports
        environment |= {VARIABLE: os.devnull}
    cleared, foreign = op_cache.clear_stale_locks(environment), op_cache.foreign_locks(environment)
    return Build(
        ninja=shutil.which("ninja", path=path),
        compiler=shutil.which(environment.get("CXX", "c++"), path=path),
        compiled=op_cache.compiled(environment),
        cleared_locks=[str(lock) for lock in cleared],
        foreign_locks=[str(lock) for lock in foreign],
        shared_locks=[str(lock) for lock in op_cache.shared_locks(environment)],
    )

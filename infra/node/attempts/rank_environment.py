"""What ranks get to see of the environment: what is on a list, and never a secret that nobody asked for.

On one machine they see what is allowed of the head's. Over hosts the settings of libraries travel from the head in a
file, what is a machine's own (its folders, its user, its devices) stays that machine's, and numbers of ranks are what
DeepSpeed's launcher, Slurm's or OpenMPI's says they are. Standard library only, as the guards import it.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.node import node_folders
from infra.node import operator_folder as operators
from infra.node.attempts.attempt import Attempt, rank_name
from infra.node.processes import RUN_ID_VARIABLE
from t5train.errors import LaunchError
from t5train.files.run_folder import LOCKS, RANK_FILES

ENVIRONMENT = "environment.json"
"""In an attempt's folder on a host: what came from the head."""

DEVICES_VARIABLE = "T5_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES as the user set it: DeepSpeed's launcher writes its own numbering over that name."""

_LIBRARIES = re.compile(
    "(CCL|CUBLAS|CUDA|CUDNN|DS|FI|GLOO|GOMP|HCCL|HSA|KMP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|RCCL|TORCH|TORCHINDUCTOR|TRITON"
    "|UCX)_.*|PYTHON.*|HF_HUB_OFFLINE"
)
_DEVICES = re.compile(".*_VISIBLE_DEVICES|.*_VISIBLE_MODULES|ZE_AFFINITY_MASK")
_OWN = re.compile(
    "CC|CXX|CUDA_HOME|HF_HOME|HF_HUB_CACHE|HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SHELL|TMPDIR|TZ|USER"
    "|VIRTUAL_ENV|XDG_CACHE_HOME"
)
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH_STRING", re.IGNORECASE)
_HIDDEN = "[secret]"
_SHORTEST_SECRET = 6  # words like "1" and "true" are settings
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_ALWAYS = {
    # `python -m` would else put the current folder first on the path, where a stray module can shadow a package.
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",  # torch reads sources of its own in the locale's encoding
}
_SAME_NUMBER = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
_OF_THE_LAUNCH = ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_environment(
    attempt: Attempt,
    *,
    num_ranks: int,
    accelerator: str | None,
    extra: Mapping[str, str],
    parent: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The whole environment of an attempt's processes on one machine: allowed names of ``parent``, ``extra``.

    Variables of another launcher (RANK, WORLD_SIZE, LOCAL_SIZE ...) are not on the list either: DeepSpeed's would
    believe them.
    """
    environment = {name: value for name, value in parent.items() if _is_allowed(name)}
    environment["PATH"] = search_path(parent)
    environment.setdefault("OMP_NUM_THREADS", _threads(num_ranks))
    # Ranks of one machine meet on loopback: a hostname that resolves to 127.0.1.1 would make gloo wait in vain.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault(operators.VARIABLE, str(operators.operator_folder(environment)))
    environment |= _ALWAYS
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    if (devices := environment.pop("CUDA_VISIBLE_DEVICES", None)) is not None:  # empty: none of them
        environment[DEVICES_VARIABLE] = devices
    return {**environment, RUN_ID_VARIABLE: attempt.run_id, **extra}


def travelling_environment(
    attempt: Attempt, *, accelerator: str | None, names: Iterable[str], parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What ranks on hosts get from the head, of its environment and besides."""
    chosen = {} if accelerator is None else {"DS_ACCELERATOR": accelerator}
    run = {RUN_ID_VARIABLE: attempt.run_id}
    return {"HF_HUB_OFFLINE": "1", **settings_of_head(names, parent), **chosen, **_ALWAYS, **run}


def settings_of_head(names: Iterable[str], parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What ranks on hosts get of the head's environment: settings of libraries, and ``names``, secret or not.

    Which devices the head may see is its own affair, and where it keeps things too.
    """
    allowed = {
        name: value
        for name, value in parent.items()
        if _LIBRARIES.fullmatch(name) and not _SECRET.search(name) and not _is_own(name)
    }
    return allowed | {name: parent[name] for name in names if name in parent}


def variables_of_rank(attempt: Attempt, own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the rank whose guard has ``own``."""
    if attempt.head is not None:
        environment = dict(own)
        if DEVICES_VARIABLE in environment:
            environment["CUDA_VISIBLE_DEVICES"] = environment[DEVICES_VARIABLE]
    else:
        given: dict[str, str] = json.loads((attempt.folder / ENVIRONMENT).read_text("utf-8"))
        environment = {name: value for name, value in own.items() if _is_own(name)}
        environment |= {"PATH": search_path(own), "OMP_NUM_THREADS": _threads(max(1, len(attempt.slots)))}
        environment |= given | {name: own[name] for name in _OF_THE_LAUNCH if name in own}
        environment.setdefault(operators.VARIABLE, str(operators.operator_folder(environment)))
    environment |= _numbers(own)
    environment |= {LOCKS: str(node_folders.node_path("locks"))}
    return environment | {RANK_FILES: str(attempt.rank_files(rank_name(int(environment["RANK"]))))}


def redact(text: str, parent: Mapping[str, str] = os.environ) -> str:
    """``text`` without the values of variables that seem secret, and without passwords in URLs."""
    for name, value in parent.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, _HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", text)


def search_path(parent: Mapping[str, str] = os.environ) -> str:
    """PATH with this Python's folder first: a venv that is used without being activated has its ninja on nobody's."""
    return os.pathsep.join([str(Path(sys.executable).parent), parent.get("PATH", os.defpath)])


def _numbers(own: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE, by whoever started this process; LaunchError if nobody says which rank it is."""
    said = {name: own[one] for name, others in _SAME_NUMBER.items() for one in (*reversed(others), name) if one in own}
    if "RANK" not in said:
        raise LaunchError(
            f"a guard was started with neither RANK nor {' nor '.join(_SAME_NUMBER['RANK'])} in its environment: ranks "
            "are to be started by DeepSpeed's launcher, srun or mpirun"
        )
    return said


def _threads(num_ranks: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def _is_own(name: str) -> bool:
    return (_OWN.fullmatch(name) or _DEVICES.fullmatch(name)) is not None


def _is_allowed(name: str) -> bool:
    return (_is_own(name) or _LIBRARIES.fullmatch(name) is not None) and not _SECRET.search(name)

"""The environment of ranks: variables on an allowlist, and no secret unless the user asks for it by name.

On one machine, ranks get the allowed variables of the head. With several hosts, the head sends library settings in
a file, variables specific to a machine (its folders, user and devices) come from that machine, and rank numbers come
from the launcher of DeepSpeed, Slurm or OpenMPI. Standard library only, as the guards import it.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.node import node_folders, operator_folder
from infra.node.attempts.attempt import Attempt, rank_name
from infra.node.processes import RUN_ID_VARIABLE
from t5train.errors import LaunchError
from t5train.files.run_folder import LOCKS, RANK_FILES

ENVIRONMENT = "environment.json"
"""The file in an attempt's folder on a host that contains the variables that the head sent."""

DEVICES_VARIABLE = "T5_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES as the user set it: the launcher overwrites that variable with its own numbering."""

_LIBRARIES = re.compile(
    "(CCL|CUBLAS|CUDA|CUDNN|DS|FI|GLOO|GOMP|HCCL|HSA|KMP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|RCCL|TORCH|TORCHINDUCTOR|TRITON"
    "|UCX)_.*|PYTHON.*|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE"
)
_DEVICES = re.compile(".*_VISIBLE_DEVICES|.*_VISIBLE_MODULES|ZE_AFFINITY_MASK")
_OWN = re.compile(
    "CC|CXX|CUDA_HOME|HF_HOME|HF_HUB_CACHE|HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SHELL|TMPDIR|TZ|USER"
    "|VIRTUAL_ENV|XDG_CACHE_HOME"
)
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH_STRING", re.IGNORECASE)
_HIDDEN = "[secret]"
_SHORTEST_SECRET = 6  # shorter values, such as "1" and "true", are settings
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_ALWAYS = {
    # Otherwise `python -m` puts the current folder first on the path, where a stray module can shadow a package.
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",  # torch reads some of its sources in the locale's encoding
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Ranks read what was downloaded before. In ``datasets``, the second variable has precedence over the first."""
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
    """The whole environment of the processes of a run on one machine: allowed variables of ``parent``, and ``extra``.

    Variables of another launcher (RANK, WORLD_SIZE, LOCAL_SIZE ...) are not allowed, because ranks would use them.
    """
    environment = allowed(parent)
    environment["PATH"] = search_path(parent)
    environment.setdefault("OMP_NUM_THREADS", _threads(num_ranks))
    # Ranks of one machine use loopback: if the hostname resolves to 127.0.1.1, gloo would wait until it times out.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment = _OFFLINE | environment
    environment |= operator_folder.compile_folders(environment)
    environment |= _ALWAYS
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    if (devices := environment.pop("CUDA_VISIBLE_DEVICES", None)) is not None:  # an empty value hides all devices
        environment[DEVICES_VARIABLE] = devices
    return {**environment, RUN_ID_VARIABLE: attempt.run_id, **extra}


def allowed(parent: Mapping[str, str]) -> dict[str, str]:
    """The variables that processes of a run may have from those of ``parent`` on the same machine."""
    return {name: value for name, value in parent.items() if _is_allowed(name)}


def travelling_environment(
    attempt: Attempt, *, accelerator: str | None, names: Iterable[str], parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that the head sends to ranks on hosts: settings of its environment, and those of the attempt."""
    chosen = {} if accelerator is None else {"DS_ACCELERATOR": accelerator}
    run = {RUN_ID_VARIABLE: attempt.run_id}
    return {**_OFFLINE, **settings_of_head(names, parent), **chosen, **_ALWAYS, **run}


def settings_of_head(names: Iterable[str], parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the head's environment that ranks on hosts get: library settings, and ``names``, even if secret.

    The devices and folders of the head are not included, because they apply only to its own machine.
    """
    allowed = {
        name: value
        for name, value in parent.items()
        if _LIBRARIES.fullmatch(name) and not _SECRET.search(name) and not _is_own(name)
    }
    return allowed | {name: parent[name] for name in names if name in parent}


def variables_of_rank(attempt: Attempt, own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the rank whose guard has the environment ``own``."""
    if attempt.head is not None:
        environment = dict(own)
        if DEVICES_VARIABLE in environment:
            environment["CUDA_VISIBLE_DEVICES"] = environment[DEVICES_VARIABLE]
    else:
        given: dict[str, str] = json.loads((attempt.folder / ENVIRONMENT).read_text("utf-8"))
        environment = {name: value for name, value in own.items() if _is_own(name)}
        environment |= {"PATH": search_path(own), "OMP_NUM_THREADS": _threads(max(1, len(attempt.slots)))}
        environment |= given | {name: own[name] for name in _OF_THE_LAUNCH if name in own}
        environment |= operator_folder.compile_folders(environment)
    environment |= _numbers(own)
    environment |= {LOCKS: str(node_folders.node_path("locks"))}
    return environment | {RANK_FILES: str(attempt.rank_files(rank_name(int(environment["RANK"]))))}


def redact(text: str, parent: Mapping[str, str] = os.environ) -> str:
    """Remove the values of variables that seem secret, and passwords in URLs, from ``text``."""
    for name, value in parent.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, _HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", text)


def search_path(parent: Mapping[str, str] = os.environ) -> str:
    """PATH with this Python's folder first, so that the ninja of a venv is found even if the venv is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), parent.get("PATH", os.defpath)])


def _numbers(own: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE, as set by the launcher. Raises LaunchError if the rank is not set."""
    said = {name: own[one] for name, others in _SAME_NUMBER.items() for one in (*reversed(others), name) if one in own}
    if "RANK" not in said:
        raise LaunchError(
            f"a guard was started with neither RANK nor {' nor '.join(_SAME_NUMBER['RANK'])} in its environment: start "
            "ranks with DeepSpeed's launcher, srun or mpirun"
        )
    return said


def _threads(num_ranks: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def _is_own(name: str) -> bool:
    return name in operator_folder.CACHES or (_OWN.fullmatch(name) or _DEVICES.fullmatch(name)) is not None


def _is_allowed(name: str) -> bool:
    return (_is_own(name) or _LIBRARIES.fullmatch(name) is not None) and not _SECRET.search(name)

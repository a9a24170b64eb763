"""What ranks get to see of the environment: what is on a list, and never a secret."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.attempt import Attempt
from infra.processes import RUN_ID_VARIABLE

DEVICES_VARIABLE = "T5_VISIBLE_DEVICES"
"""CUDA_VISIBLE_DEVICES as the user set it: DeepSpeed's launcher writes its own numbering over that name."""

_ALLOWED = re.compile(
    "CC|CXX|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|HOME|LANG|LANGUAGE|LD_LIBRARY_PATH|LOGNAME|PATH|SHELL|TMPDIR|TZ|USER"
    "|VIRTUAL_ENV|XDG_CACHE_HOME"
    "|(CUBLAS|CUDA|CUDNN|DS|GLOO|GOMP|KMP|LC|MKL|NCCL|NVIDIA|OMP|OPENBLAS|TORCH|TORCHINDUCTOR|TRITON|UCX)_.*"
    "|PYTHON.*"
)
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")


def rank_environment(
    attempt: Attempt,
    *,
    num_ranks: int,
    accelerator: str | None,
    extra: Mapping[str, str],
    parent: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The whole environment of an attempt's processes: allowed names of ``parent``, what a run needs, ``extra``.

    Variables of another launcher (RANK, WORLD_SIZE, LOCAL_SIZE ...) are not on the list either: DeepSpeed's would
    believe them.
    """
    environment = {name: value for name, value in parent.items() if _is_allowed(name)}
    # A venv that is used without being activated has its ninja on nobody's PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), parent.get("PATH", os.defpath)])
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    # Ranks of one machine meet on loopback: a hostname that resolves to 127.0.1.1 would make gloo wait in vain.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # `python -m` would else put the current folder first on the path, where a stray module can shadow a package.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONUTF8"] = "1"  # torch reads sources of its own in the locale's encoding
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    if (devices := environment.pop("CUDA_VISIBLE_DEVICES", None)) is not None:  # empty: none of them
        environment[DEVICES_VARIABLE] = devices
    return {**environment, RUN_ID_VARIABLE: attempt.run_id, **extra}


def _is_allowed(name: str) -> bool:
    return _ALLOWED.fullmatch(name) is not None and not _SECRET.search(name)

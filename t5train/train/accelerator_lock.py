"""The lock of a rank on its accelerator, which keeps two runs of a user from sharing one by accident.

Only a rank knows for certain which kind of accelerator it has. On the CPU there is no lock: runs may share it.
"""

import os
import re
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from t5train.errors import AcceleratorBusy
from t5train.files.locks import private_folder, try_lock
from t5train.files.run_folder import LOCKS

_RUN_ID = "T5_RUN_ID"
_MOMENT_SECONDS = 0.5  # a process that looks up the holder takes a shared lock for a moment
_UNFIT = re.compile("[^A-Za-z0-9-]")


def lock_accelerator() -> None:
    """Lock this rank's accelerator until the process ends. Raises AcceleratorBusy if another process holds the lock."""
    kind, folder = get_accelerator().device_name(), os.environ.get(LOCKS)
    if kind == "cpu" or folder is None:
        return
    private_folder(Path(folder).parent)  # this user's folder on this machine
    path = private_folder(Path(folder)) / f"{kind}-{_slot()}.lock"
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
    )  # closed by the kernel when the process ends
    if not try_lock(descriptor, _MOMENT_SECONDS):
        holder = path.read_text("utf-8") or "another run"
        raise AcceleratorBusy(
            f"accelerator {path.stem} on {os.uname().nodename} is in use by {holder}: "
            "wait for that run to end, or choose other accelerators (slots of the hostfile, CUDA_VISIBLE_DEVICES)"
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"attempt {os.environ.get(_RUN_ID)}, process {os.getpid()}".encode(), 0)


def _slot() -> str:
    """Return the accelerator's index on this machine: the LOCAL_RANK-th of the visible ones, or LOCAL_RANK itself."""
    local_rank = int(os.environ["LOCAL_RANK"])
    for name in get_accelerator().visible_devices_envs() or ():
        visible = [slot.strip() for slot in os.environ.get(name, "").split(",") if slot.strip()]
        if local_rank < len(visible):
            return _UNFIT.sub("_", visible[local_rank])
    return str(local_rank)

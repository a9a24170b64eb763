"""The devices that predict: accelerators or cores of this machine, or those of other machines."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from t5train.data.worker_processes import Workers
from t5train.errors import SpecError
from t5train.host_resources import host_memory_bytes, num_cores
from t5train.inference.model_folder import ModelFolder, chosen_device
from t5train.quantities import quantity

_COPIES = 2  # of the weights in memory while a process loads them
_CPU_BYTES = 4 << 30
"""For each process, of which a machine may have many: 64 sequences of 900 tokens with base."""


class OtherMachines(NamedTuple):
    """Machines that predict in place of this one. They change no result, if they have the same kind of device."""

    device: str
    """The kind of device that all of them use, such as ``cuda`` or ``cpu``."""
    device_bytes: int
    """What ``device_bytes`` returns there; the least of all machines."""
    workers: Workers
    """Does jobs there, of which each is one part. It adds their device, and replaces folders by those there."""


Machines = Callable[[], AbstractContextManager[OtherMachines | None]]
"""Makes a context with the machines that predict; None: this machine."""


def devices_of(
    folder: ModelFolder, device: str | None, processes: int | None, machines: OtherMachines | None
) -> list[str]:
    """Return the device of each process: every accelerator, or as often the CPU as its cores and memory allow.

    Of other machines, it is the kind of device, once. Raises SpecError if this machine lacks the device, or has fewer
    than ``processes``.
    """
    if machines is not None:
        return [machines.device]
    import torch  # slow to import, and only needed here

    chosen = chosen_device(device)
    if chosen == "cpu":
        weights = sum(each.stat().st_size for each in folder.path.glob("*.safetensors"))
        fitting = host_memory_bytes() // (_COPIES * max(1, weights))
        return [chosen] * (processes or max(1, min(num_cores(), fitting)))
    count = 1 if ":" in chosen else torch.accelerator.device_count()
    if (processes or 1) > count:
        raise SpecError(
            f"--processes is {processes}, but {chosen} is {quantity(count, 'device')}: it must be at most {count}"
        )
    return [chosen] if ":" in chosen else [f"{chosen}:{number}" for number in range(processes or count)]


def device_bytes(device: str) -> int:
    """Return the memory of the smallest accelerator of this machine or, on a CPU, what a process may use for a batch.

    ``device`` is its kind, such as cpu.
    """
    import torch  # slow to import, and only needed here

    if device == "cpu":
        return _CPU_BYTES
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is None:  # Apple's share the memory of the host
        return host_memory_bytes() // 2
    return min(int(properties(number).total_memory) for number in range(torch.accelerator.device_count()))

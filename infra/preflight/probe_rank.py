"""One rank of the all-reduce that proves that the ranks of a run can meet: ``python -m infra.preflight.probe_rank``.

It says how far it has come, a word a line, on stdout, and what stopped it after the word ``failed``. Where it runs is
in the variables that torch knows (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), its accelerator in DS_ACCELERATOR and
SLOT.
"""

import errno
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STARTED, REACHED, IMPORTED, MET, SUMMED = STAGES = ("started", "reached", "imported", "met", "summed")
FAILED = "failed"
SLOT = "T5_PREFLIGHT_SLOT"
_ELEMENTS = 1 << 18
_CONNECT_SECONDS = 5.0
_NEVER = timedelta(days=1)  # whoever started the ranks ends them at the deadline: the first error is then the culprit's
_ANSWERED = {0, errno.ECONNREFUSED}  # by the machine, that is; rank 0 may still be on its way


def main() -> int:
    """Meet, sum, compare."""
    _say(STARTED)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if problem := unreachable(address, port):
        return _fail(f"{address}, port {port}, where ranks meet, cannot be reached: {problem}")
    _say(REACHED)
    try:
        import torch.distributed  # noqa: F401 - tried, and timed
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        return _fail(f"torch cannot be imported: {error}")
    _say(IMPORTED)
    try:
        problem = _meet_and_sum(_device())
    except (RuntimeError, ValueError, OSError) as error:  # what collectives raise when others cannot be reached
        problem = f"{type(error).__name__}: {error}"
    return _fail(problem) if problem else 0


def unreachable(address: str, port: int) -> str:
    """Why no packet from there comes back; empty when the machine answers, if only that nobody listens yet."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        try:
            number = sock.connect_ex((address, port))
        except TimeoutError:
            number = errno.ETIMEDOUT
    # EAGAIN is what connect_ex says when its time is over.
    number = errno.ETIMEDOUT if number == errno.EAGAIN else number
    return "" if number in _ANSWERED else os.strerror(number)


def _device() -> "torch.device":
    import torch

    slot = int(os.environ[SLOT])
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(slot)
    return torch.device(found.type, slot)


def _meet_and_sum(device: "torch.device") -> str:
    """What is wrong with the result; empty when nothing is."""
    import torch.distributed as dist

    dist.init_process_group(dist.get_default_backend_for_device(device), init_method="env://", timeout=_NEVER)
    _say(MET)
    problem = _sum(device)
    if not problem:
        _say(SUMMED)
    dist.destroy_process_group()
    return problem


def _sum(device: "torch.device") -> str:
    """Add up a number of each rank; sums of small whole numbers are exact in fp32."""
    import torch
    import torch.distributed as dist

    values = torch.full((_ELEMENTS,), _share(dist.get_rank()), dtype=torch.float32, device=device)
    dist.all_reduce(values)
    right = sum(map(_share, range(dist.get_world_size())))
    low, high = values.min().item(), values.max().item()
    return "" if low == high == right else f"the sum over all ranks is {low:g} to {high:g}, and must be {right:g}"


def _share(rank: int) -> float:
    return float(rank % 7 + 1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fail(problem: str) -> int:
    _say(f"{FAILED} {' '.join(problem.split())}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

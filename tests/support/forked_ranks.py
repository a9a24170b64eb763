"""Ranks of test programs, forked from a process that has imported what ranks import.

A rank takes some ten CPU seconds to import torch, its compiler and DeepSpeed, most of what a small training takes.
Each process of pytest starts one such process, which imports them once and has no threads.
"""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path

from infra.node.attempts import shared_memory
from infra.node.ports import free_port

_ROOT = Path(__file__).parents[2]
_SECONDS = 600.0


def run_ranks(program: str, arguments: Sequence[str], ranks: int, log: Path, accelerator: str | None = "cpu") -> None:
    """Run the module ``program`` on ``ranks`` ranks of this machine, with output in ``{log}.rank-{rank}``.

    If ``accelerator`` is None, DeepSpeed chooses it, and ranks are not forked. Raises AssertionError with the end of
    the output if a rank fails. The others are killed then: they would wait for it forever.
    """
    port = free_port()
    own = _environment(accelerator) | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    logs = [Path(f"{log}.rank-{rank}") for rank in range(ranks)]
    if accelerator:
        _start_server(accelerator)
    context = get_context("forkserver" if accelerator else "spawn")
    started = []
    try:
        for rank, output in enumerate(logs):
            environment = own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(context.Process(target=_become_rank, args=(program, [*arguments], environment, output)))
            started[-1].start()
        deadline = time.monotonic() + _SECONDS
        while None in (codes := [process.exitcode for process in started]) and not any(codes):
            assert time.monotonic() < deadline, f"ranks do not end in {_SECONDS:.0f} s"
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.join()
        shared_memory.remove_all("127.0.0.1", port)
    assert not any(codes), "".join(output.read_text(errors="replace")[-3000:] for output in logs)


def _environment(accelerator: str | None) -> dict[str, str]:
    """The environment of this process, changed so that libraries that read it when they are imported suit ranks."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    chosen = {"DS_ACCELERATOR": accelerator} if accelerator else {}
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | chosen


def _start_server(accelerator: str) -> None:
    """Start the process that ranks are forked from, unless it runs."""
    before = dict(os.environ)
    os.environ.update(_environment(accelerator))
    try:
        forkserver.set_forkserver_preload(["tests.support.rank_imports"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _become_rank(program: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__")

"""Checkpoints to consolidate: generated files in DeepSpeed's layout, or files that DeepSpeed itself saved."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infra.node.attempts import shared_memory
from tests.support.checkpoints.deepspeed_files import Layout, Written
from tests.support.checkpoints.sidecar_files import write


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Written]:
    """``write_checkpoint(groups=..., ranks=..., sidecars=True)`` writes a generated checkpoint, ZeRO 2 by default."""
    counter = iter(range(1_000_000))

    def make(*, sidecars: bool = False, **settings: Any) -> Written:
        layout = Layout(**{"groups": [[(5, 3), (7,)], [(4,), (2, 2)]]} | settings)
        return write(tmp_path / f"checkpoint{next(counter)}", layout, sidecars=sidecars)

    return make


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of real DeepSpeed runs on two ranks, one for each dense layout."""
    return _launch("deepspeed_checkpoints", tmp_path_factory.mktemp("engines"), num_ranks=2)


@pytest.fixture(scope="session")
def engines_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of real DeepSpeed runs on four ranks, for a few dense layouts."""
    return _launch("deepspeed_checkpoints", tmp_path_factory.mktemp("four"), 4, "zero2-bf16", "zero3-bf16")


@pytest.fixture(scope="session")
def pipeline_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of real DeepSpeed pipelines: two stages of two ranks each."""
    return _launch("deepspeed_pipeline_checkpoints", tmp_path_factory.mktemp("pipelines"), num_ranks=4)


@pytest.fixture(scope="session")
def expert_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``expert_engines(4)`` gives checkpoints of real DeepSpeed runs with experts on four ranks. Runs once."""
    return cache(
        lambda ranks: _launch("deepspeed_moe_checkpoints", tmp_path_factory.mktemp("experts"), num_ranks=ranks)
    )


@pytest.fixture(scope="session")
def launch_on_accelerators(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``launch_on_accelerators("deepspeed_checkpoints", 4, "zero2-fp16")`` gives checkpoints of four ranks."""
    return lambda program, *rest: _launch(program, tmp_path_factory.mktemp("gpu"), *rest, accelerator=None)


_ROOT = Path(__file__).parents[4]


def _launch(program: str, folder: Path, num_ranks: int, *arguments: str, accelerator: str | None = "cpu") -> Path:
    """Run a program of tests.support.checkpoints on ``num_ranks`` ranks. It writes to ``folder``."""
    ranks, port = [], os.getpid()  # the port only names the ranks' shared memory
    for rank in range(num_ranks):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}",
            **({"DS_ACCELERATOR": accelerator} if accelerator else {}),
        }  # fmt: skip
        with open(folder / f"rank{rank}.log", "wb") as log:
            command = [sys.executable, "-m", f"tests.support.checkpoints.{program}", str(folder), *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        shared_memory.remove_all("127.0.0.1", port)
    logs = "".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
    assert not any(codes), logs
    return folder

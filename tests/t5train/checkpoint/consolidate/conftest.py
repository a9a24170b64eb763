"""Checkpoints to consolidate: generated files in DeepSpeed's layout, or files that DeepSpeed itself saved."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints.deepspeed_files import Layout, Written
from tests.support.checkpoints.sidecar_files import write
from tests.support.forked_ranks import run_ranks


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
def expert_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``expert_engines(4, *layouts)`` gives checkpoints of real DeepSpeed runs with experts on four ranks. Runs once.

    By default, they are in all layouts.
    """
    return cache(
        lambda ranks, *layouts: _launch(
            "deepspeed_moe_checkpoints", tmp_path_factory.mktemp("experts"), ranks, *layouts
        )
    )


@pytest.fixture(scope="session")
def launch_on_accelerators(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``launch_on_accelerators("deepspeed_checkpoints", 4, "zero2-fp16")`` gives checkpoints of four ranks."""
    return lambda program, *rest: _launch(program, tmp_path_factory.mktemp("gpu"), *rest, accelerator=None)


def _launch(program: str, folder: Path, num_ranks: int, *arguments: str, accelerator: str | None = "cpu") -> Path:
    """Run a program of tests.support.checkpoints on ``num_ranks`` ranks. It writes to ``folder``."""
    program = f"tests.support.checkpoints.{program}"
    run_ranks(program, [str(folder), *arguments], num_ranks, folder / "log", accelerator)
    return folder

"""Checkpoints to consolidate: written as files, in DeepSpeed's layout, or by DeepSpeed itself."""

import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from t5train import sidecar
from t5train.records import digest_files
from t5train.sidecar import DataState, ParallelLayout, ParameterSlot, Sidecar


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk, and the fp32 tensors it must give."""

    tag: Path
    expected: dict[str, torch.Tensor]

    @property
    def folder(self) -> Path:
        return self.tag.parent


@dataclass(frozen=True)
class Zero12:
    """A ZeRO 1 or 2 checkpoint: shapes of each parameter group, and what else the module holds."""

    groups: list[list[tuple[int, ...]]]
    ranks: int = 2
    alignment: int = 1
    precision: torch.dtype = torch.bfloat16
    keep_padding: bool = False
    frozen: list[tuple[int, ...]] = field(default_factory=list)
    ties: int = 0
    buffers: int = 0
    prefix: str = ""
    sidecars: bool = False
    seed: int = 0
    step: int = 7


def _write(folder: Path, layout: Zero12) -> Written:
    """Write the files of every rank as DeepSpeed 0.19 lays them out."""
    generator = torch.Generator().manual_seed(layout.seed)
    tag = folder / f"global_step{layout.step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    masters = [
        {f"layer{g}.weight{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(group)}
        for g, group in enumerate(layout.groups)
    ]
    paddings = [_paddings(group, layout.alignment) for group in layout.groups]
    cut = [_cut(list(group.values()), pads, layout) for group, pads in zip(masters, paddings, strict=True)]
    for rank in range(layout.ranks):
        state = {
            "single_partition_of_fp32_groups": [parts[rank] for parts in cut],
            "partition_count": [layout.ranks] * len(cut),
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(5)}}},
        }
        if not layout.keep_padding:
            state["param_alignment_paddings"] = paddings
        torch.save({"optimizer_state_dict": state}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model, expected = _model_states(layout, masters, generator)
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    if layout.sidecars:
        _write_sidecars(tag, layout, masters, paddings, model["shared_params"])
    return Written(tag, expected)


def _paddings(shapes: list[tuple[int, ...]], alignment: int) -> list[int]:
    paddings, offset = [], 0
    for index, shape in enumerate(shapes):
        offset += math.prod(shape)
        paddings.append(0 if index == len(shapes) - 1 else -offset % alignment)
        offset += paddings[-1]
    return paddings


def _cut(tensors: list[torch.Tensor], paddings: list[int], layout: Zero12) -> list[torch.Tensor]:
    pieces = [
        piece for tensor, pad in zip(tensors, paddings, strict=True) for piece in (tensor.reshape(-1), torch.zeros(pad))
    ]
    flat = torch.cat(pieces)
    whole = torch.cat([flat, torch.zeros(-flat.numel() % (2 * layout.ranks))])
    size = whole.numel() // layout.ranks
    held = whole.numel() if layout.keep_padding else flat.numel()
    return [whole[rank * size : min((rank + 1) * size, max(held, rank * size))].clone() for rank in range(layout.ranks)]


def _model_states(
    layout: Zero12, masters: list[dict[str, torch.Tensor]], generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    expected = {name: tensor for group in masters for name, tensor in group.items()}
    module = {name: tensor.to(layout.precision) for name, tensor in expected.items()}
    for index, shape in enumerate(layout.frozen):
        module[f"frozen{index}"] = torch.randn(shape, generator=generator).to(layout.precision)
        expected[f"frozen{index}"] = module[f"frozen{index}"].float()
    for index in range(layout.buffers):
        module[f"buffer{index}"] = torch.arange(3 + index)
        expected[f"buffer{index}"] = module[f"buffer{index}"]
    ties = dict(zip((f"tie{index}" for index in range(layout.ties)), list(masters[0]), strict=False))
    module |= {alias: module[owner] for alias, owner in ties.items()}
    model = {
        "module": {layout.prefix + name: tensor for name, tensor in module.items()},
        "buffer_names": [f"{layout.prefix}buffer{index}" for index in range(layout.buffers)],
        "param_shapes": [
            OrderedDict((layout.prefix + name, tensor.shape) for name, tensor in group.items()) for group in masters
        ],
        "shared_params": {layout.prefix + alias: layout.prefix + owner for alias, owner in ties.items()},
        "optimizer": None,
        "dp_world_size": layout.ranks,
        "global_steps": layout.step,
    }
    return model, expected


def _write_sidecars(
    tag: Path,
    layout: Zero12,
    masters: list[dict[str, torch.Tensor]],
    paddings: list[list[int]],
    aliases: dict[str, str],
) -> None:
    groups = []
    for group, pads in zip(masters, paddings, strict=True):
        slots, offset = [], 0
        for (name, tensor), pad in zip(group.items(), pads, strict=True):
            slots.append(ParameterSlot.of(name, tuple(tensor.shape), offset))
            offset += tensor.numel() + pad
        groups.append(slots)
    for rank in range(layout.ranks):
        names = [path.name for path in tag.glob(f"*zero_pp_rank_{rank}_*.pt")]
        names += ["mp_rank_00_model_states.pt"] if rank == 0 else []
        place = ParallelLayout(zero_stage=2, precision="bf16", data_parallel_rank=rank, data_parallel_size=layout.ranks)
        sidecar.write(
            tag,
            Sidecar(
                run_fingerprint="a" * 64,
                step=layout.step,
                tag=tag.name,
                rank=rank,
                world_size=layout.ranks,
                layout=place,
                files=digest_files(tag, names),
                groups=groups,
                aliases={a.removeprefix(layout.prefix): o.removeprefix(layout.prefix) for a, o in aliases.items()},
                huggingface_config={"model_type": "t5"},
                model_prefix=layout.prefix,
                data=DataState(samples_consumed=56, shards_fingerprint="b" * 64),
            ),
        )


@pytest.fixture(scope="session")
def write_zero12() -> Callable[..., Written]:
    """Writes a checkpoint into the folder it is given: ``write_zero12(folder, groups=..., ranks=...)``."""

    def make(folder: Path, **settings: Any) -> Written:
        return _write(folder, Zero12(**settings))

    return make


@pytest.fixture
def zero12(tmp_path: Path) -> Callable[..., Written]:
    """Writes a checkpoint into a new folder: ``zero12(groups=..., ranks=...)``."""
    counter = iter(range(1_000_000))

    def make(**settings: Any) -> Written:
        settings.setdefault("groups", [[(5, 3), (7,)], [(4,), (2, 2)]])
        return _write(tmp_path / f"checkpoint{next(counter)}", Zero12(**settings))

    return make


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of real DeepSpeed runs on two ranks, one for each dense layout."""
    folder = tmp_path_factory.mktemp("engines")
    program = Path(__file__).with_name("deepspeed_checkpoints.py")
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        with open(folder / f"rank{rank}.log", "wb") as log:
            command = [sys.executable, str(program), str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], (folder / "rank0.log").read_text()[-3000:] + (folder / "rank1.log").read_text()[-3000:]
    return folder

"""The program that ranks run in test_gradient_reduction.py: they reduce gradients that get ready in different orders.

``python -m tests.support.training.reduction_program JOBS`` reads ``{name: job}`` from the JSON file JOBS and writes
what each rank sums, by group, to ``{name}.rank-{rank}.json`` beside it. All ranks share the first group. Of the second,
each rank has its own, like experts that ranks divide.
"""

import json
import random
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from torch import Tensor, nn

from t5train.engine.gradient_reduction import FlatGroup, GradientReduction
from tests.support.training import rank_main

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNMENT = 4


def gradient_of(rank: int, number: int, parameter: int, numel: int) -> Tensor:
    """The gradient of a parameter in a pass, fp32: small integers, whose sums are exact in bf16."""
    generator = torch.Generator().manual_seed(rank * 10_000 + number * 1_000 + parameter)
    return torch.randint(-8, 9, (numel,), generator=generator).float()


def offsets_of(sizes: list[int], ranks: int) -> tuple[list[int], int]:
    """Where each parameter begins in the flat buffer of a group, and how long that is, both with padding."""
    offsets = [sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes[:number]) for number in range(len(sizes))]
    end = offsets[-1] + sizes[-1]
    return offsets, -(-end // ranks) * ranks


def main(jobs: Path) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    alone = [comm.new_group([rank]) for rank in range(comm.get_world_size())][comm.get_rank()]
    for name, job in json.loads(jobs.read_text()).items():
        groups = [_group(job["sizes"], None, comm.get_world_size()), _group(job["own_sizes"], alone, 1)]
        sums = [each.float().tolist() for each in _reduced(groups, job)]
        jobs.with_name(f"{name}.rank-{comm.get_rank()}.json").write_text(json.dumps(sums))
    comm.barrier()
    comm.destroy_process_group()


def _group(sizes: list[int], sharers: Any, ranks: int) -> FlatGroup:
    offsets, total = offsets_of(sizes, ranks)
    flat = torch.zeros(total, dtype=torch.bfloat16)
    parameters = [
        nn.Parameter(flat[first : first + size], requires_grad=False)
        for first, size in zip(offsets, sizes, strict=True)
    ]
    return FlatGroup(flat, parameters, sharers)


def _reduced(groups: list[FlatGroup], job: dict[str, Any]) -> list[Tensor]:
    """Take two steps of which the first must leave nothing behind, and return the sums of the second."""
    rank = comm.get_rank()
    parameters = [each for group in groups for each in group.parameters]
    reduction = GradientReduction(
        groups, parameters, comm.get_world_size(), DTYPES[job["dtype"]], job["bucket_elements"]
    )
    sums: list[Tensor] = []
    for _ in range(2):
        reduction.clear()
        for number in range(job["passes"]):
            used = [n for n in range(len(parameters)) if [rank, n] not in job["unused"]]
            for index in random.Random(rank * 100 + number).sample(used, len(used)):
                given = gradient_of(rank, number, index, parameters[index].numel())
                parameters[index].grad = given.bfloat16()
                reduction.take(parameters[index])
                assert parameters[index].grad is None
            reduction.finish()
        sums = [reduction.sum_of(index).clone() for index in range(len(groups))]
    return sums


if __name__ == "__main__":
    rank_main.run(main)

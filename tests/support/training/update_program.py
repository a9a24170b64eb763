"""The program that ranks run in test_fused_update.py: the same step with DeepSpeed's update and with the fused one.

``python update_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "shards", "run_folder", "poison"}]``,
and writes ``{name}.rank-{rank}.json`` beside it for each job: relative distances by name. With ``poison``, a number
that is not finite, they are instead those of what a fused step leaves from what it finds, if gradients on rank 0 have
that number.
"""

import contextlib
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor

from t5train.data.samples.loader import Prefetched
from t5train.engine.partitions import inner_optimizer, masters_of
from t5train.errors import NonFiniteLoss
from t5train.train import loop
from tests.support.training import rank_main
from tests.support.training.fused_ranks import fused


def _report(entry: dict[str, Any]) -> dict[str, float]:
    compare = _before_and_after_poison if "poison" in entry else _without_and_with_kernels
    expected, found = compare(entry)
    return {name: _distance(found[name], expected[name]) for name in expected}


def _without_and_with_kernels(entry: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The gradient norm, and the optimizer's tensors on this rank, after a step."""
    states = []
    for is_fused in (False, True):
        with fused() if is_fused else nullcontext():
            trainer = trainer_of(entry)
            norm = take_step(trainer)
        stage, optimizer = trainer.spec.layout.zero_stage, inner_optimizer(trainer.engine)
        assert (optimizer._kernels is not None) is (is_fused and stage == 3)
        states.append({"gradient norm": torch.tensor(norm), **state_of(trainer)})
    return states


def _before_and_after_poison(entry: dict[str, Any]) -> list[dict[str, Tensor]]:
    with fused():
        trainer = trainer_of(entry)
        take_step(trainer)
        before = {name: tensor.clone() for name, tensor in state_of(trainer).items()}
        if comm.get_rank() == 0:
            last = [*trainer.engine.module.parameters()][-1]
            last.register_hook(lambda gradient: torch.full_like(gradient, float(entry["poison"])))
        with contextlib.suppress(NonFiniteLoss):
            take_step(trainer)
            raise AssertionError("the step does not fail")
    after = state_of(trainer)
    for name in [name for name in after if name.startswith("steps")]:
        del before[name], after[name]
    return [before, after]


def trainer_of(entry: dict[str, Any]) -> loop.Trainer:
    rank_main.forget_groups()
    return loop.Trainer(rank_main.job_of(entry))


def take_step(trainer: loop.Trainer) -> float:
    with Prefetched(loop.micro_batches(trainer.dataset.train, trainer.spec, trainer.step), 1) as batches:
        values, _ = trainer._take_step(batches)
    assert values["gradient_norm"] is not None
    return float(values["gradient_norm"])


def state_of(trainer: loop.Trainer) -> dict[str, Tensor]:
    """The optimizer's tensors on this rank, and its model's weights."""
    found: dict[str, Tensor] = {}
    optimizer = inner_optimizer(trainer.engine)
    for number, master in enumerate(masters_of(trainer.engine)):
        state = optimizer.state_of(master)
        found |= {f"weights {number}": master.detach(), f"first moments {number}": state["exp_avg"]}
        found |= {f"second moments {number}": state["exp_avg_sq"], f"steps {number}": state["step"]}
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.engine.module.parameters()])
    return found | {"the model's weights": weights}


def _distance(found: Tensor, expected: Tensor) -> float:
    if torch.equal(found, expected):
        return 0.0
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


if __name__ == "__main__":
    torch.manual_seed(0)
    rank_main.run_jobs(_report)

"""The program that ranks run in test_pipeline_engine.py: the same steps with DeepSpeed's passes and with recorded ones.

``python recorded_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "shards", "run_folder"}]``, and writes
``{name}.rank-{rank}.json`` beside it for each job: the names of tensors whose bits differ, and how many passes were
recorded. CPUs record nothing, so a double launches the passes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from t5train.engine import pipeline_engine
from tests.support.training import rank_main
from tests.support.training.update_program import state_of, take_step, trainer_of

STEPS = 3


class LaunchedPasses:
    """Launches the passes that RecordedPasses records, in memory of its own, too."""

    made = 0

    def __init__(
        self, run: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], sums: Mapping[Tensor, Tensor]
    ) -> None:
        self._run, self._sums = run, sums
        self._shapes = [(each.shape, each.dtype, each.requires_grad) for each in inputs]
        LaunchedPasses.made += 1

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        assert [(each.shape, each.dtype, each.requires_grad) for each in inputs] == self._shapes
        self._inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        self._output = self._run(self._inputs)
        return self._output.detach()

    def backward(self, output_gradient: Tensor) -> Tensor | None:
        differentiable = [each for each in self._inputs if each.requires_grad]
        gradients = torch.autograd.grad(self._output, [*differentiable, *self._sums], output_gradient)
        for total, gradient in zip(self._sums.values(), gradients[len(differentiable) :], strict=True):
            total.add_(gradient)
        return gradients[0] if differentiable else None


def _report(entry: dict[str, Any]) -> dict[str, Any]:
    LaunchedPasses.made = 0
    expected, found = _states(entry, is_recorded=False), _states(entry, is_recorded=True)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    return {"different": different, "recorded": LaunchedPasses.made}


def _states(entry: dict[str, Any], is_recorded: bool) -> dict[str, Tensor]:
    """The norms and losses of some steps with a validation between them, and the tensors on this rank at the end."""
    found: dict[str, Tensor] = {}
    trainer = trainer_of(entry)
    if is_recorded:
        trainer.engine.record_passes()
    with mock.patch.object(pipeline_engine, "RecordedPasses", LaunchedPasses):
        for step in range(STEPS):
            found[f"norm of step {step}"] = torch.tensor(take_step(trainer))
            validated = trainer._validate().found.values
            found[f"validation after step {step}"] = torch.tensor(validated["validation_content_loss"])
    return found | state_of(trainer)


if __name__ == "__main__":
    torch.manual_seed(0)
    rank_main.run_jobs(_report)

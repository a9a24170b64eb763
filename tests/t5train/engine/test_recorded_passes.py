"""Passes that are recorded as CUDA graphs, on an accelerator; test_pipeline_engine.py tests how engines use them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from t5train.engine.pipeline_engine import RecordedPasses

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")]


def test_recorded_passes_compute_the_bits_of_launched_ones() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda", torch.bfloat16)
    given = [torch.randn(8, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(5)]
    gradient = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        output: Tensor = model(inputs[0])
        return output

    expected = {each: torch.zeros_like(each, dtype=torch.float32) for each in model.parameters()}
    outputs, of_inputs = [], []
    for each in given:
        outputs.append(run([each]))
        of_input, *of_parameters = torch.autograd.grad(outputs[-1], [each, *expected], gradient)
        of_inputs.append(of_input)
        for total, part in zip(expected.values(), of_parameters, strict=True):
            total.add_(part)

    leaves = {name: nn.Parameter(each.detach()) for name, each in model.named_parameters()}
    sums = {leaves[name]: torch.zeros_like(each, dtype=torch.float32) for name, each in model.named_parameters()}
    passes = [
        RecordedPasses(lambda inputs: functional_call(model, leaves, (inputs[0],)), given[:1], sums) for _ in range(2)
    ]
    assert not any(total.any() for total in sums.values())
    under_way: list[int] = []
    for number, each in enumerate(given):  # a forward pass before the last one's backward pass, as in a pipeline
        assert passes[number % 2].forward([each]).equal(outputs[number])
        under_way.append(number)
        if number:
            _end(passes, under_way.pop(0), gradient, of_inputs)
    _end(passes, under_way.pop(0), gradient, of_inputs)
    assert all(found.equal(total) for found, total in zip(sums.values(), expected.values(), strict=True))


def _end(passes: list[RecordedPasses], number: int, gradient: Tensor, of_inputs: list[Tensor]) -> None:
    found = passes[number % 2].backward(gradient)
    assert found.equal(of_inputs[number])

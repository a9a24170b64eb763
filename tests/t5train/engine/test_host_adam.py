"""Adam in host memory with DeepSpeed's operator: the same update as torch's, and bit-equal after a resume."""

import copy

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.engine.optimizer import AdamWRms, HostAdam, Partition, Segment, sum_of_squares
from t5train.errors import SpecError

pytestmark = pytest.mark.slow
SIZES, PADDING = [30_011, 7, 1_000], 6
NUMEL = sum(SIZES) + PADDING


def _optimizer(flat: Tensor, host_adam: HostAdam | None, relative: bool = True, weight_decay: float = 0.1) -> AdamWRms:
    optimizer = AdamWRms([flat], (0.9, 0.999), 1e-8, weight_decay, relative=relative, host_adam=host_adam)
    optimizer.param_groups[0]["lr"] = 0.01
    starts = [sum(SIZES[:owner]) for owner in range(len(SIZES))]
    segments = [
        Segment(start, start + SIZES[owner], owner, SIZES[owner], 0, is_decayed=owner != 1)
        for owner, start in enumerate(starts)
    ]
    optimizer.attach({flat: Partition(segments, len(SIZES))}, None)
    return optimizer


def _weights() -> Tensor:
    scale = torch.cat([torch.full((size,), 10.0**-owner) for owner, size in enumerate([*SIZES, PADDING])])
    weights = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) * scale
    weights[-PADDING:] = 0
    return weights


def _steps(optimizer: AdamWRms, flat: Tensor, numbers: range) -> None:
    for number in numbers:
        flat.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
        flat.grad[-PADDING:] = 0
        optimizer.step()


@pytest.mark.parametrize("relative", [True, False])
def test_host_adam_updates_weights_as_torchs_operators_do(relative: bool) -> None:
    """The results agree to one fp32 rounding of the largest weight per step."""
    ours, theirs = _weights(), _weights()
    _steps(_optimizer(ours, HostAdam(), relative), ours, range(10))
    _steps(_optimizer(theirs, None, relative), theirs, range(10))
    rounding = theirs.abs().max().item() * torch.finfo(torch.float32).eps
    assert (theirs - _weights()).abs().max() > 1000 * 10 * rounding
    torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * rounding)
    assert not ours[-PADDING:].any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_that_are_measured_between_updates_are_updated_bit_equal(weight_decay: float) -> None:
    measured, plain = _weights(), _weights()
    optimizers = [_optimizer(flat, HostAdam(), weight_decay=weight_decay) for flat in (measured, plain)]
    for number in range(3):
        _steps(optimizers[0], measured, range(number, number + 1))
        optimizers[0].measure_weights()
        _steps(optimizers[1], plain, range(number, number + 1))
    assert measured.equal(plain)


def test_a_measurement_of_weights_does_not_outlast_the_loading_of_others() -> None:
    loaded, plain = torch.ones(NUMEL), _weights()
    optimizer = _optimizer(loaded, HostAdam(), weight_decay=0.0)
    optimizer.measure_weights()
    loaded.copy_(plain)
    optimizer.load_state_dict(optimizer.state_dict())
    _steps(optimizer, loaded, range(2))
    _steps(_optimizer(plain, HostAdam(), weight_decay=0.0), plain, range(2))
    assert loaded.equal(plain)


def test_an_update_has_a_relative_error_below_one_in_a_million() -> None:
    """From zero, the first step is as long as the rate, so that a misreading of the operator's betas shows."""
    weights = torch.zeros(1000)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    moments = torch.zeros(1000), torch.zeros(1000)
    HostAdam().update((weights, gradient, *moments), rate=1.0, step=1, betas=(0.9, 0.999), epsilon=0.0)
    torch.testing.assert_close(weights, -gradient.sign(), rtol=1e-6, atol=0)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one() -> None:
    """Even when another optimizer shares the operator."""
    whole, resumed, other = _weights(), _weights(), _weights()
    _steps(_optimizer(whole, HostAdam()), whole, range(8))
    first = _optimizer(resumed, HostAdam())
    _steps(first, resumed, range(5))
    _steps(_optimizer(other, HostAdam()), other, range(3))
    second = _optimizer(resumed, HostAdam())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _steps(second, resumed, range(5, 8))
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize("numel", [1, 8191, 8192, 100_000])
def test_sums_of_squares_have_a_relative_error_below_one_in_ten_million(numel: int) -> None:
    part = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    assert sum_of_squares(part).item() == pytest.approx(part.double().square().sum().item(), rel=1e-7)


def test_an_operator_that_cannot_be_compiled_is_reported_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler:
        def load(self, **_: bool) -> None:
            raise RuntimeError("c++: not found")

    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda _: NoCompiler())
    with pytest.raises(SpecError, match=r"cpu_adam, which cannot be compiled here \(c\+\+: not found\): install"):
        HostAdam()

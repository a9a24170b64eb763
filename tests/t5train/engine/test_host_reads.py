"""A training step reads numbers from the accelerator a fixed number of times, however many passes it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from t5train.data.samples.loader import Batch
from t5train.engine import collectives
from t5train.engine.expert_routing import Routing
from t5train.engine.forward_backward import StepResult, WholePasses
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec

EXPERTS = {"version": "v1.0", "moe": {"num_experts": 4, "aux_loss": 0.5}}


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor: one number by float() and its like, or many by tolist()."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, _types: Any, arguments: Any = (), settings: Any = None) -> Any:
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*arguments, **(settings or {}))


@contextmanager
def counted() -> Iterator[Reads]:
    to_list = Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        reads.count += 1
        return to_list(tensor)

    with Reads() as reads, mock.patch.object(Tensor, "tolist", counting):
        yield reads


class Engine:
    """What passes use of DeepSpeed's engine, with an update that changes nothing."""

    def __init__(self, model: T5, num_passes: int) -> None:
        self.module = model
        self.optimizer = SimpleNamespace(optimizer=SimpleNamespace(measure_weights=lambda: None))
        self._left, self.losses = num_passes, list[Tensor]()
        self.paid, self._last = list[Tensor](), torch.zeros(())

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Overwrite the loss of the last pass, as a CUDA graph does, and return this pass's."""
        self._last.zero_()
        loss: Tensor = self.module(inputs, targets)
        self.paid += Routing(self.module).paid()
        self.losses.append(loss.detach().clone())
        self._last = loss.detach()
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._left == 1

    def step(self) -> None:
        self._left -= 1

    def fp16_enabled(self) -> bool:
        return False

    def get_global_grad_norm(self) -> Tensor:
        return torch.tensor(1.5)


def _model(settings: dict[str, Any]) -> T5:
    torch.manual_seed(0)
    model = T5(resolve(ModelSpec.model_validate({"preset": "smoke", **settings}), 300), decoder_start_id=0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    for _, layer in model.sparse_layers():
        layer.dispatch = "rows"
    return model


def _batches(num_passes: int) -> Iterator[Batch]:
    random = np.random.default_rng(1)
    for _ in range(num_passes):
        inputs, targets = (random.integers(0, 300, (2, length), dtype=np.int32) for length in (9, 5))
        none = np.zeros(2, dtype=np.int64)
        yield Batch(sample_ids=none, epochs=none, inputs=inputs, targets=targets)


def _step(settings: dict[str, Any], num_passes: int) -> tuple[StepResult, Engine, int]:
    model = _model(settings)
    engine, routing = Engine(model, num_passes), Routing(model)
    passes, batches = WholePasses(engine, routing, None), iter([*_batches(num_passes)])
    with counted() as reads:
        result = passes.step(batches)
        routing.of_step(result.router_loss)
    return result, engine, reads.count


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "world_size", lambda: 1)


@pytest.mark.parametrize(("settings", "expected"), [({}, 2), (EXPERTS, 3)], ids=["dense", "experts"])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_a_pass_adds_no_read(settings: dict[str, Any], expected: int, num_passes: int) -> None:
    """A step reads the losses of all passes, the gradient norm, and the tokens of all experts."""
    assert _step(settings, num_passes)[2] == expected


@pytest.mark.parametrize("settings", [{}, EXPERTS], ids=["dense", "experts"])
def test_the_result_is_the_mean_over_the_passes(settings: dict[str, Any]) -> None:
    result, engine, _ = _step(settings, 3)
    paid = [float(each) for each in engine.paid] or [0.0] * 3
    losses = [float(each) - mine for each, mine in zip(engine.losses, paid, strict=True)]
    assert result == StepResult(sum(losses) / 3, sum(paid) / 3, 1.5)
    assert (result.router_loss > 0) is bool(settings)


def test_a_rank_alone_gathers_without_a_collective() -> None:
    with counted() as reads:
        assert collectives.gather([3, -(2**63), True]) == [[3, -(2**63), 1]]
    assert reads.count == 0

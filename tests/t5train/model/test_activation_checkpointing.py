"""Activation checkpointing changes what is kept for the backward pass, but no number."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.initialization import initialise
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ExpertsSpec, ModelSpec

VOCABULARY = 300


def _model(recomputed: bool, **settings: Any) -> T5:
    shape = resolve(ModelSpec.model_validate({"preset": "smoke", "dropout_rate": 0.1, **settings}), VOCABULARY)
    torch.manual_seed(0)  # for experts, which are not initialised below
    model = T5(shape, decoder_start_id=0)
    for name, parameter in model.named_parameters():
        if "deepspeed" not in name:
            initialise(name, parameter, shape, seed=3)
    if recomputed:
        checkpoint_activations(model)
    return model


def _gradients(model: T5) -> list[Tensor]:
    """The gradients of one pass, preceded by the random number that torch draws after it."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randint(0, VOCABULARY, (2, length), generator=generator) for length in (30, 9))
    torch.manual_seed(1)
    model(inputs, targets).backward()
    return [torch.rand(1), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def _run_counts(model: T5) -> Counter[str]:
    """How often each module runs in a pass forward and backward."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    _gradients(model)
    return counts


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_gradients_are_bit_equal_with_activation_checkpointing_and_dropout(version: str) -> None:
    kept, recomputed = (_gradients(_model(recompute, version=version)) for recompute in (False, True))
    assert len(kept) == len(recomputed) > 40
    assert all(map(torch.equal, kept, recomputed))


def test_exactly_the_modules_within_blocks_are_recomputed() -> None:
    recomputed_modules = _run_counts(_model(recomputed=True)) - _run_counts(_model(recomputed=False))
    within = {name for name, _ in _model(recomputed=False).named_modules() if _is_within_a_block(name)}
    assert recomputed_modules == dict.fromkeys(within, 1)


def _is_within_a_block(name: str) -> bool:
    """Whether a block itself runs a module. The position bias is shared by all blocks, and its stack runs it."""
    return ".layer." in name and not name.endswith("relative_attention_bias")


def test_a_forward_pass_without_gradients_saves_no_tensors_for_recomputation() -> None:
    model = _model(recomputed=True)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse):
        model.eval().logits(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))


def _refuse(tensor: Tensor) -> Tensor:
    raise AssertionError("a pass that has no backward saves a tensor for it")


@pytest.mark.slow
def test_a_model_with_activation_checkpointing_compiles_to_one_graph() -> None:
    kept, recomputed = (_model(recompute, dropout_rate=0.0) for recompute in (False, True))
    recomputed.compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(_gradients(recomputed), _gradients(kept), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.slow
def test_experts_keep_router_loss_and_token_counts_with_activation_checkpointing() -> None:
    settings: dict[str, Any] = {"version": "v1.0", "moe": ExpertsSpec(num_experts=4), "dropout_rate": 0.1}
    kept, recomputed = (_model(recompute, **settings) for recompute in (False, True))
    assert all(map(torch.equal, _gradients(kept), _gradients(recomputed)))
    for (path, mine), (_, other) in zip(recomputed.sparse_layers(), kept.sparse_layers(), strict=True):
        assert mine.router_loss.requires_grad, path
        assert torch.equal(mine.tokens, other.tokens)

"""The FLOPs that MFU is computed from agree with torch's count, and with figures counted elsewhere for one shape."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec.recipes import recipe
from t5train.train.flops import flops_per_token, training_flops


@pytest.mark.parametrize(
    ("settings", "is_frozen"),
    [({}, False), ({}, True), ({"model.version": "v1.0", "model.num_decoder_layers": 3}, False)],
)
def test_flops_agree_with_the_count_of_torch(settings: dict[str, Any], is_frozen: bool) -> None:
    shape = resolve(recipe("smoke").with_settings(settings).model, 500)
    model = T5(shape, decoder_start_id=0).requires_grad_(not is_frozen)
    model.shared.requires_grad_()  # so that gradients reach all activations
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros((2, 64), dtype=torch.int64), torch.zeros((2, 20), dtype=torch.int64)).backward()
    assert counter.get_total_flops() == 2 * training_flops(shape, 64, 20, is_frozen)


@pytest.mark.parametrize(("tokens_per_second", "mfu"), [(181e3, 0.156), (351e3, 0.302), (391e3, 0.336)])
def test_the_mfu_of_base_agrees_with_independent_figures(tokens_per_second: float, mfu: float) -> None:
    """The peak is 790 TFLOP/s; sequences have 512 + 114 tokens."""
    spec = recipe("base")
    found = tokens_per_second * flops_per_token(resolve(spec.model, 32_100), spec.objective) / 790e12
    assert found == pytest.approx(mfu, abs=1e-3)


def test_flops_of_experts_depend_on_top_k_and_not_on_their_number() -> None:
    dense = recipe("base").with_settings({"model.version": "v1.0"})
    sparse = dense.with_settings({"model.moe.num_experts": 64, "model.compile": False, "layout.zero_stage": 1})
    two = sparse.with_settings({"model.moe.top_k": 2})
    counts = [training_flops(resolve(spec.model, 32_100), 512, 114) for spec in (dense, sparse, two)]
    assert 1 < counts[1] / counts[0] < 1.01
    assert 1.1 < counts[2] / counts[0] < 1.4

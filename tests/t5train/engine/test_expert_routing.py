"""The values that are logged about routers, for a model in one process."""

import logging

import pytest
import torch

from t5train.engine import expert_routing
from t5train.engine.expert_routing import Routing
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ExpertsSpec, ModelSpec

pytestmark = pytest.mark.slow
ENCODER, DECODER = "encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> T5:
    """A model with one sparse layer of four experts in each of its two stacks, on a single rank."""
    monkeypatch.setattr(expert_routing, "gather", lambda values: [values])
    moe = ExpertsSpec(num_experts=4)
    return T5(resolve(ModelSpec(preset="smoke", version="v1.0", moe=moe), 300), decoder_start_id=0)


def set_token_counts(model: T5, encoder: list[int], decoder: list[int], overflow: int = 0) -> None:
    for (_, layer), counts in zip(model.sparse_layers(), (encoder, decoder), strict=True):
        layer.tokens, layer.overflow = torch.tensor(counts), torch.tensor(overflow)


def test_a_starving_expert_is_named_and_counted(model: T5, caplog: pytest.LogCaptureFixture) -> None:
    routing = Routing(model)
    for _ in range(2):
        set_token_counts(model, [100, 100, 100, 100], [196, 100, 95, 9])
        routing.of_step(0.0)
    with caplog.at_level(logging.WARNING, "t5train.engine.expert_routing"):
        values = routing.of_experts()
    assert values["starving_experts"] == 1
    assert values[f"tokens/{ENCODER}/expert_2"] == 200
    assert values[f"tokens/{DECODER}/expert_3"] == 18
    assert caplog.messages[0].endswith(f"even share of the tokens: {DECODER}.experts.expert_3")
    set_token_counts(model, [1, 1, 1, 1], [1, 1, 1, 1])
    routing.of_step(0.0)
    assert routing.of_experts()["starving_experts"] == 0


def test_the_share_of_dropped_tokens_is_that_of_one_step(model: T5) -> None:
    routing = Routing(model)
    set_token_counts(model, [80, 0, 0, 0], [20, 0, 0, 0], overflow=10)
    assert routing.of_step(0.5) == {"router_loss": 0.5, "dropped_tokens": 0.2}
    set_token_counts(model, [25, 25, 25, 25], [25, 25, 25, 25])
    assert routing.of_step(0.5)["dropped_tokens"] == 0


def test_a_dense_model_reports_no_routing_values() -> None:
    dense = Routing(T5(resolve(ModelSpec(preset="smoke"), 300), decoder_start_id=0))
    assert dense.paid() == []
    assert dense.of_step(0.0) == dense.of_validation() == dense.of_experts() == {}

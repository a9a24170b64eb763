"""Initial values are T5's, the same however they are drawn, and nothing else is drawn."""

from functools import partial

import pytest
import torch
from torch import nn

from t5train.model import initialization
from t5train.model.initialization import NoDefaultValues, fill_all, filled, first_value, initialise
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec

SHAPE = resolve(ModelSpec(preset="smoke"), 300)
Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def expected() -> Values:
    """The values of every parameter, drawn one by one."""
    parameters = T5(SHAPE, decoder_start_id=0).named_parameters()
    return {name: first_value(name, parameter.shape, SHAPE, seed=3) for name, parameter in parameters}


def test_threads_fill_a_model_with_the_same_values(expected: Values) -> None:
    with NoDefaultValues():
        model = T5(SHAPE, decoder_start_id=0)
    fill_all(dict(model.named_parameters()), partial(initialise, shape=SHAPE, seed=3))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_values_made_in_advance_are_the_same_and_few(expected: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def fill(name: str, parameter: nn.Parameter) -> None:
        begun.append(name)
        initialise(name, parameter, SHAPE, seed=3)

    monkeypatch.setattr(initialization, "_MOST_THREADS", 4)
    values = filled({name: value.shape for name, value in expected.items()}, fill)
    for taken, (value, wanted) in enumerate(zip(values, expected.values(), strict=True)):
        assert torch.equal(value, wanted)
        assert len(begun) <= taken + 4


def test_an_error_while_filling_is_raised() -> None:
    def fill(name: str, _parameter: nn.Parameter) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError, match="wi"):
        fill_all({"wi": nn.Parameter(torch.zeros(2))}, fill)
    with pytest.raises(KeyError, match="wi"):
        next(filled({"wi": torch.Size([2])}, fill))


def test_no_default_values_are_drawn() -> None:
    before = torch.get_rng_state()
    with NoDefaultValues():
        T5(SHAPE, decoder_start_id=0)
    assert torch.equal(torch.get_rng_state(), before)
    T5(SHAPE, decoder_start_id=0)
    assert not torch.equal(torch.get_rng_state(), before)


def test_initial_values_depend_only_on_seed_and_name() -> None:
    size = torch.Size([8, 16])
    first = first_value("encoder.block.0.layer.0.SelfAttention.q.weight", size, SHAPE, seed=1)
    assert torch.equal(first, first_value("encoder.block.0.layer.0.SelfAttention.q.weight", size, SHAPE, seed=1))
    assert not torch.equal(first, first_value("encoder.block.0.layer.0.SelfAttention.q.weight", size, SHAPE, seed=2))
    assert not torch.equal(first, first_value("encoder.block.1.layer.0.SelfAttention.q.weight", size, SHAPE, seed=1))


def test_initial_values_have_t5s_standard_deviations(expected: Values) -> None:
    deviations = {
        "shared.weight": 1.0,
        "encoder.block.0.layer.0.SelfAttention.q.weight": (SHAPE.d_model * SHAPE.d_kv) ** -0.5,
        "encoder.block.0.layer.0.SelfAttention.k.weight": SHAPE.d_model**-0.5,
        "decoder.block.1.layer.2.DenseReluDense.wo.weight": SHAPE.d_ff**-0.5,
    }
    for name, deviation in deviations.items():
        assert expected[name].std().item() == pytest.approx(deviation, rel=0.05), name

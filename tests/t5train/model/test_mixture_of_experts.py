"""The model with experts computes the same as Hugging Face's SwitchTransformers."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, SwitchTransformersForConditionalGeneration

from t5train.engine.parameter_layout import huggingface_names
from t5train.errors import SpecError
from t5train.model.expert_dispatch import Route
from t5train.model.initialization import first_value, initialise
from t5train.model.model_shape import T5Shape, count_parameters, huggingface_config, resolve
from t5train.model.parameters import parameter_shapes
from t5train.model.t5 import T5
from t5train.spec import ExpertsSpec, ModelSpec

VOCABULARY = 300
HIDDEN = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.slow


def _shape(num_layers: int = 4, **experts: Any) -> T5Shape:
    moe = ExpertsSpec.model_validate({"num_experts": 4, **experts})
    return resolve(ModelSpec(preset="smoke", version="v1.0", num_layers=num_layers, moe=moe), VOCABULARY)


def _model(shape: T5Shape) -> T5:
    model = T5(shape, decoder_start_id=0)
    names = huggingface_names(model, expert_rank=0)
    for name, parameter in model.named_parameters():
        initialise(names[name], parameter, shape, seed=3)
    return model


def _ids(*size: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(5))


def _load_with_transformers(model: T5, folder: Path) -> SwitchTransformersForConditionalGeneration:
    names = huggingface_names(model, expert_rank=0)
    tensors = {names[name]: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(model.shape, pad_id=0, eos_id=1)))
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is SwitchTransformersForConditionalGeneration
    return loaded.eval()


@pytest.mark.parametrize(("every_n_layers", "num_layers"), [(1, 2), (2, 5), (3, 6)])
def test_logits_match_switch_transformers(every_n_layers: int, num_layers: int, tmp_path: Path) -> None:
    model = _model(_shape(num_layers, every_n_layers=every_n_layers)).eval()
    loaded = _load_with_transformers(model, tmp_path)
    inputs, decoder_inputs = _ids(3, 150), _ids(3, 40)
    with torch.no_grad():
        ours = model.logits(inputs, decoder_inputs)
        theirs = loaded(input_ids=inputs, decoder_input_ids=decoder_inputs).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * ours.abs().max().item())
    assert count_parameters(model.shape) == sum(parameter.numel() for parameter in loaded.parameters())
    assert parameter_shapes(model.shape) == {name: parameter.shape for name, parameter in loaded.named_parameters()}


@pytest.mark.parametrize("top_k", [1, 2])
def test_evaluation_is_deterministic_and_drops_no_tokens(top_k: int) -> None:
    model = _model(_shape(top_k=top_k, eval_capacity_factor=0.01)).eval()
    inputs, decoder_inputs = _ids(4, 60), _ids(4, 20)
    with torch.no_grad():
        together, again = model.logits(inputs, decoder_inputs), model.logits(inputs, decoder_inputs)
        alone = model.logits(inputs[:1], decoder_inputs[:1])
    assert torch.equal(together, again)
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-5)


def test_tokens_beyond_capacity_are_counted_and_dropped_while_training() -> None:
    model = _model(_shape(capacity_factor=0.25)).train()
    path, layer = next(model.sparse_layers())
    assert path == "encoder.block.1.layer.1.mlp"
    output = layer(HIDDEN)
    assert int(layer.tokens.sum()) == 64
    assert int(layer.overflow) == sum(max(0, count - 4) for count in layer.tokens.tolist()) > 0
    assert int((output.flatten(0, 1).abs().sum(-1) == 0).sum()) == int(layer.overflow)
    layer.reset()
    assert not layer.tokens.any()


def _trained(layer: Any, dispatch: str, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, router loss, counts and gradients of a training pass."""
    layer.dispatch = dispatch
    layer.reset()
    layer.zero_grad()
    leaf = hidden.clone().requires_grad_()
    torch.manual_seed(7)
    output = layer(leaf)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    ((output * slope).sum() + 10 * layer.router_loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    counts = {"tokens": layer.tokens, "overflow": layer.overflow}
    found = {"output": output.detach(), "router loss": layer.router_loss.detach(), "hidden": leaf.grad}
    return found | counts | gradients


def _require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("num_experts", [2, 5])
@pytest.mark.parametrize(("dispatch", "takes_all"), [("rows", False), ("rows", True), ("slots", False)])
def test_sorting_tokens_trains_as_deepspeeds_layer_does(num_experts: int, dispatch: str, takes_all: bool) -> None:
    factor = None if takes_all else num_experts
    model = _model(_shape(capacity_factor=factor, num_experts=num_experts, aux_loss=0.1, z_loss=0.1)).train()
    _, layer = next(model.sparse_layers())
    hidden = torch.randn(3, 41, model.shape.d_model, generator=torch.Generator().manual_seed(1))
    expected, found = _trained(layer, "deepspeed", hidden), _trained(layer, dispatch, hidden)
    assert len(found) == 3 + 2 + 1 + 2 * num_experts
    _require_close(found, expected)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dispatch", ["rows", "slots"])
def test_sorting_tokens_drops_those_beyond_capacity_at_random(top_k: int, dispatch: Literal["rows", "slots"]) -> None:
    model = _model(_shape(capacity_factor=0.25, top_k=top_k)).train()
    _, layer = next(model.sparse_layers())
    layer.dispatch = dispatch
    dropped = []
    for seed in (1, 2):
        layer.reset()
        torch.manual_seed(seed)
        output = layer(HIDDEN).flatten(0, 1)
        dropped.append(output.abs().sum(-1) == 0)
        capacity = 4 * top_k
        assert int(layer.tokens.sum()) == 64 * top_k
        assert int(layer.overflow) == sum(max(0, count - capacity) for count in layer.tokens.tolist()) > 0
        if top_k == 1:
            assert int(dropped[-1].sum()) == int(layer.overflow)
    assert not torch.equal(*dropped)


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_and_slots_keep_the_same_tokens(top_k: int) -> None:
    _, layer = next(_model(_shape(capacity_factor=0.5, top_k=top_k, z_loss=0.1)).train().sparse_layers())
    hidden = torch.randn(2, 37, 128, generator=torch.Generator().manual_seed(1))
    _require_close(_trained(layer, "slots", hidden), _trained(layer, "rows", hidden))


@pytest.mark.parametrize("dispatch", ["deepspeed", "rows"])
def test_experts_without_a_capacity_take_all_tokens(dispatch: Literal["deepspeed", "rows"]) -> None:
    _, layer = next(_model(_shape(capacity_factor=None)).train().sparse_layers())
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()  # all tokens go to the first expert
    layer.dispatch = dispatch
    output = layer(HIDDEN)
    assert layer.tokens.tolist() == [64, 0, 0, 0]
    assert int(layer.overflow) == 0
    assert bool((output.flatten(0, 1).abs().sum(-1) > 0).all())


def test_first_choices_are_kept_before_second_ones() -> None:
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
    route = Route.of(chosen, 2)
    assert route.place[:, 0].max() == 1
    assert route.place[:, 1].min() == 2
    assert torch.equal(route.row.flatten().sort().values, torch.arange(8))
    assert torch.equal(route.row.flatten()[route.order], torch.arange(8))
    assert torch.equal(chosen.flatten()[route.order], torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))


def test_auxiliary_and_z_losses_are_added_with_their_weights() -> None:
    losses = {}
    for aux_loss, z_loss in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.25)):
        _, layer = next(_model(_shape(aux_loss=aux_loss, z_loss=z_loss)).train().sparse_layers())
        layer(HIDDEN)
        losses[aux_loss, z_loss] = layer.router_loss.item()
    assert losses[0.0, 0.0] == 0
    assert losses[0.5, 0.25] == pytest.approx(0.5 * losses[1.0, 0.0] + 0.25 * losses[0.0, 1.0])
    # When all experts are equally likely, the product of shares and probabilities is 1, and log-sum-exp is log 4.
    assert losses[1.0, 0.0] == pytest.approx(1.0, abs=0.2)
    assert losses[0.0, 1.0] == pytest.approx(math.log(4) ** 2, rel=0.3)


def test_the_training_loss_is_cross_entropy_plus_router_losses() -> None:
    model = _model(_shape(capacity_factor=100)).train()
    inputs, targets = _ids(2, 30), _ids(2, 9)
    loss = model(inputs, targets)
    router_losses = sum(layer.router_loss for _, layer in model.sparse_layers())
    torch.testing.assert_close(loss - router_losses, model.token_losses(inputs, targets).mean())


def test_initial_values_of_experts_follow_their_global_numbers() -> None:
    shape = _shape()
    whole = _model(shape)
    names = huggingface_names(whole, expert_rank=0)
    values = {names[name]: parameter for name, parameter in whole.named_parameters()}
    half = T5(shape, decoder_start_id=0, expert_parallel_size=2)
    names = huggingface_names(half, expert_rank=1)
    expert_names = [name for name in names.values() if ".experts." in name]
    assert {name.split(".")[-3] for name in expert_names} == {"expert_2", "expert_3"}
    for name, parameter in half.named_parameters():
        assert torch.equal(first_value(names[name], parameter.shape, shape, seed=3), values[names[name]])


def test_experts_are_initialised_with_a_tenth_of_the_variance() -> None:
    model, shape = _model(_shape()), _shape()
    names = huggingface_names(model, expert_rank=0)
    values = {names[name]: parameter for name, parameter in model.named_parameters()}
    mlp = "decoder.block.1.layer.2.mlp"
    for name, fan_in in (("experts.expert_3.wi", shape.d_model), ("experts.expert_0.wo", shape.d_ff)):
        assert values[f"{mlp}.{name}.weight"].std().item() == pytest.approx(math.sqrt(0.1 / fan_in), rel=0.05)
    assert values["decoder.block.0.layer.2.mlp.wi.weight"].std().item() == pytest.approx(shape.d_model**-0.5, rel=0.05)


@pytest.mark.parametrize(("num_layers", "every_n_layers"), [(1, 2), (7, 4), (2, 3)])
def test_sparse_layers_that_switch_transformers_cannot_express_are_refused(
    num_layers: int, every_n_layers: int
) -> None:
    with pytest.raises(SpecError, match=rf"every_n_layers is {every_n_layers} and model\.num_layers {num_layers}: "):
        _shape(num_layers, every_n_layers=every_n_layers)

"""Adapters compute what LoRA's definition says, start as in PEFT, and are merged with the same bits everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.engine.forward_backward import rows_of
from t5train.model.counted_dropout import CountedDropout, branch
from t5train.model.lora import Adapter, LoraLinear, Merging, first_factor, merged, product
from t5train.model.parameters import count_trained
from t5train.model.t5 import T5
from t5train.spec import LoraSpec
from tests.support.training.ragged_pairs import (
    MODELS,
    PACKED,
    UNPACKED,
    batch_of,
    distance,
    gradients_of,
    load_with_transformers,
    make_model,
    make_pairs,
)

# transformers warns that it does not tie an untied checkpoint, although the config says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
PAIRS = make_pairs()
TARGETS = ("q", "k", "v", "o", "wo")


def _lora(name: str, targets: tuple[str, ...] = TARGETS, dropout: float = 0.0) -> LoraSpec:
    inner = ("wi",) if name == "relu, tied" else ("wi_0", "wi_1")
    return LoraSpec.model_validate({"rank": 3, "alpha": 6, "targets": (*targets, *inner), "dropout": dropout})


def _backward(model: T5, rows: Any, has_keys: bool = False) -> tuple[float, dict[str, Tensor]]:
    batch = batch_of(rows, PAIRS, has_keys=has_keys)
    assert batch.segments is not None
    inputs, targets = (torch.from_numpy(each).long() for each in (batch.inputs, batch.targets))
    loss = model(inputs, targets, rows_of(batch.segments, 1))
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def _written_out(theirs: Any, factors: dict[str, Tensor]) -> None:
    """Let layers of Hugging Face's model add ``2 x A^T B^T`` to their outputs, with these factors."""
    for name in sorted({name.rpartition(".")[0] for name in factors}):
        a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]

        def add(_layer: Any, inputs: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return output + 2 * functional.linear(functional.linear(inputs[0], a), b)

        theirs.get_submodule(name).register_forward_hook(add)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_hugging_faces_model_with_lora_written_out(name: str, tmp_path: Path) -> None:
    model = make_model(name, lora=_lora(name))
    theirs = load_with_transformers(make_model(name), tmp_path)
    factors = {
        path: each.detach().clone().requires_grad_() for path, each in model.named_parameters() if "lora" in path
    }
    _written_out(theirs, factors)
    total = torch.zeros(())
    for pair in PAIRS:
        source, target = (torch.from_numpy(side).long().unsqueeze(0) for side in pair)
        logits = theirs(input_ids=source, labels=target).logits
        total = total + functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    expected = total / sum(len(pair.target) for pair in PAIRS)
    expected.backward()
    loss, gradients = _backward(model, PACKED)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert gradients.keys() == factors.keys()  # none of frozen weights
    assert count_trained(model.shape, _lora(name)) == sum(each.numel() for each in gradients.values())
    assert max(distance(gradients[each], factors[each].grad) for each in factors) < 1e-5  # type: ignore[arg-type]  # set


def test_in_16_bits_the_loss_is_that_of_the_merged_model_up_to_rounding() -> None:
    name = "gated, not tied"
    whole, found = make_model(name), make_model(name, dtype=torch.bfloat16, lora=_lora(name))
    for path, layer in found.named_modules():
        if isinstance(layer, LoraLinear):
            weight = whole.get_submodule(path).weight
            weight.data = merged(weight.data, layer.lora_a.detach(), layer.lora_b.detach(), layer.scaling)
    assert _backward(found, PACKED)[0] == pytest.approx(_backward(whole, PACKED)[0], rel=1e-2)


def test_dropout_of_adapters_follows_the_pair_and_differs_between_layers() -> None:
    name = "relu, tied"
    model = make_model(name, lora=_lora(name, dropout=0.3))
    packed, unpacked = (_backward(model, rows, has_keys=True) for rows in (PACKED, UNPACKED))
    assert packed[0] == pytest.approx(unpacked[0], rel=1e-6)
    assert _backward(model.eval(), PACKED, has_keys=True)[0] != pytest.approx(packed[0], rel=1e-4)
    keys, ones = torch.arange(64), torch.ones(64, model.shape.d_model)
    layers = [each for each in model.train().modules() if isinstance(each, LoraLinear)]
    same = [each for each in layers if each.in_features == model.shape.d_model][:2]
    for each in same:
        each.weight.data.zero_()
        each.lora_a.data.copy_(torch.eye(3, model.shape.d_model))
        each.lora_b.data.zero_()[:3] = torch.eye(3)
    first, second = (each(ones, keys) for each in same)
    assert not torch.equal(first[:, :3], second[:, :3])


def test_what_dropout_of_an_adapter_drops_follows_from_the_path_of_its_layer_also_in_16_bits() -> None:
    layer = LoraLinear(nn.Linear(8, 8, bias=False), _lora("relu, tied", dropout=0.5), 3, "decoder.q").bfloat16()
    nn.init.zeros_(layer.weight)
    for factor in (layer.lora_a, layer.lora_b):
        nn.init.eye_(factor)
    keys, number = torch.arange(64) * 2**58, 0x66E840BCFD2A3A28  # of SHA-256
    kept = CountedDropout(0.5)(torch.ones(64, 8), branch(keys, number))
    assert torch.equal(layer(torch.ones(64, 8).bfloat16(), keys)[:, :3], 2 * kept[:, :3])
    assert not any("branch" in name for name in layer.state_dict())


def test_an_adapter_starts_at_zero_and_follows_from_seed_and_name_only() -> None:
    size = torch.Size((4, 300))
    a = first_factor("layer.q.weight.lora_a", size, seed=1)
    assert torch.equal(a, first_factor("layer.q.weight.lora_a", size, seed=1))
    assert not torch.equal(a, first_factor("layer.v.weight.lora_a", size, seed=1))
    assert not torch.equal(a, first_factor("layer.q.weight.lora_a", size, seed=2))
    assert float(a.abs().max()) <= 300**-0.5
    assert float(a.std()) == pytest.approx((3 * 300) ** -0.5, rel=0.1)
    assert not first_factor("layer.q.weight.lora_b", torch.Size((300, 4)), seed=1).any()


def test_a_merged_weight_has_the_same_bits_whole_and_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, weight = (torch.randn(size, generator=generator) for size in ((7, 65), (33, 7), (33, 65)))
    whole = merged(weight, a, b, 0.3)
    parts = [merged(weight[rows], a, b[rows], 0.3) for rows in (slice(0, 1), slice(1, 20), slice(20, 33))]
    assert torch.equal(whole, torch.cat(parts))
    merging = Merging(Adapter(a, b), 0.3)
    for start, stop in ((0, 70), (70, 71), (71, 2000), (2000, weight.numel())):
        assert torch.equal(merging.merged(weight.view(-1)[start:stop], start), whole.view(-1)[start:stop])
    torch.testing.assert_close(product(a, b), b @ a)
    torch.testing.assert_close(whole, weight + 0.3 * (b @ a))

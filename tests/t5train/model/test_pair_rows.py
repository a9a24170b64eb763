"""Rows of several pairs train as the pairs do one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from t5train.data.samples.loader import Batch
from t5train.engine.forward_backward import rows_of
from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.t5 import T5, PairRows, shift_right
from tests.support.training.ragged_pairs import (
    MODELS,
    PACKED,
    PAD,
    UNPACKED,
    UNUSED,
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


def _arguments(batch: Batch) -> tuple[Tensor, Tensor, PairRows]:
    assert batch.segments is not None
    return *(torch.from_numpy(each).long() for each in (batch.inputs, batch.targets)), rows_of(batch.segments, 1)


def _backward(model: T5, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(*_arguments(batch))
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def _smoothed(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """The sum of the losses of targets: as Hugging Face's LabelSmoother and t5x define them."""
    log_probabilities = logits.log_softmax(-1)
    likelihood = -log_probabilities.gather(-1, labels.unsqueeze(-1)).sum()
    smooth = -log_probabilities.mean(-1).sum()
    return (1 - smoothing) * likelihood + smoothing * smooth + z_loss * (logits.logsumexp(-1) ** 2).sum()


def _one_by_one(theirs: Any, smoothing: float, z_loss: float) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all target tokens, of Hugging Face's model, which gets a pair at a time."""
    total = torch.zeros(())
    for pair in PAIRS:
        source, target = (torch.from_numpy(side).long().unsqueeze(0) for side in pair)
        total = total + _smoothed(theirs(input_ids=source, labels=target).logits, target, smoothing, z_loss)
    loss = total / sum(len(pair.target) for pair in PAIRS)
    loss.backward()
    return float(loss.detach()), gradients_of(theirs)


@pytest.mark.parametrize(
    ("name", "smoothing", "z_loss"), [*((name, 0.0, 0.0) for name in MODELS), ("gated, not tied", 0.1, 1e-2)]
)
@pytest.mark.parametrize("rows", [PACKED, UNPACKED], ids=["packed", "unpacked"])
def test_loss_and_gradients_are_those_of_hugging_faces_model_for_one_pair_at_a_time(
    name: str, smoothing: float, z_loss: float, rows: Any, tmp_path: Path
) -> None:
    model = make_model(name)
    model.label_smoothing, model.z_loss = smoothing, z_loss
    expected, their_gradients = _one_by_one(load_with_transformers(model, tmp_path), smoothing, z_loss)
    loss, gradients = _backward(model, batch_of(rows, PAIRS))
    if model.shape.tied and "lm_head.weight" in their_gradients:
        their_gradients["shared.weight"] += their_gradients.pop("lm_head.weight")
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == their_gradients.keys()
    assert max(distance(gradients[each], their_gradients[each]) for each in gradients) < 1e-5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cross_entropy_alone_is_known_and_the_loss_and_gradients_are_the_bits_of_torchs(smoothing: float) -> None:
    model = make_model("gated, not tied")
    model.label_smoothing = smoothing
    inputs, targets, rows = _arguments(batch_of(PACKED, PAIRS))
    labels = targets.masked_fill(rows.target_segments == 0, -100).flatten()
    logits = model.logits(inputs, shift_right(targets, PAD, rows.target_segments), rows).flatten(0, 1)
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) * rows.scale
    expected.backward()
    their_gradients = gradients_of(model)
    loss, gradients = _backward(model, batch_of(PACKED, PAIRS))
    assert loss == float(expected.detach())
    assert all(torch.equal(gradients[name], their_gradients[name]) for name in gradients)
    assert torch.equal(model.cross_entropy, functional.cross_entropy(logits, labels, reduction="sum") * rows.scale)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_padded_pairs_are_bit_equal_to_hugging_faces_with_its_attention_mask(
    name: str, tmp_path: Path
) -> None:
    model = make_model(name).eval()
    theirs = load_with_transformers(model, tmp_path)
    inputs, targets, rows = _arguments(batch_of(UNPACKED, PAIRS))
    is_target = rows.target_segments > 0
    labels = targets.masked_fill(~is_target, -100)
    with torch.no_grad():
        logits = model.logits(inputs, shift_right(targets, PAD, rows.target_segments), rows)
        expected = theirs(input_ids=inputs, attention_mask=rows.input_segments, labels=labels).logits
        losses, is_hit = model.predictions(inputs, targets, rows)
        assert torch.equal(model.token_losses(inputs, targets, rows), losses)
    assert torch.equal(logits[is_target], expected[is_target])
    torch.testing.assert_close(losses, functional.cross_entropy(expected.mT, labels, reduction="none"))
    assert torch.equal(is_hit, (expected.argmax(-1) == targets) & is_target)


def test_decoder_inputs_of_packed_rows_are_those_of_seqio() -> None:
    """The example of its EncDecFeatureConverter."""
    targets, segments = torch.tensor([[3, 9, 1, 4, 1, 0, 0]]), torch.tensor([[1, 1, 1, 2, 2, 0, 0]])
    assert shift_right(targets, PAD, segments).tolist() == [[0, 3, 9, 0, 4, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_padding_changes_nothing_and_gets_no_gradient(dtype: torch.dtype, rate: float) -> None:
    model = make_model("gated, not tied", rate, dtype)
    batch = batch_of(PACKED, PAIRS, has_keys=rate > 0)
    assert batch.segments is not None
    before = _backward(model, batch)
    generator = np.random.default_rng(1)
    for tokens, segments in ((batch.inputs, batch.segments.inputs), (batch.targets, batch.segments.targets)):
        tokens[segments == 0] = generator.choice(UNUSED, (segments == 0).sum())
    after = _backward(model, batch)
    assert np.isfinite(before[0])
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert not after[1]["shared.weight"][list(UNUSED)].any()


def test_with_dropout_packed_and_unpacked_pairs_have_the_same_loss_and_gradients() -> None:
    model = make_model("gated, tied", dropout_rate=0.2)
    packed = _backward(model, batch_of(PACKED, PAIRS, has_keys=True))
    shuffled = [(7,), (4,), (5,), (2,), (0,), (3,), (6,), (1,)]
    unpacked = _backward(model, batch_of(shuffled, PAIRS, (13, 11), has_keys=True))
    undropped = _backward(model.eval(), batch_of(PACKED, PAIRS, has_keys=True))
    assert packed[0] == pytest.approx(unpacked[0], rel=1e-6)
    assert max(distance(packed[1][name], unpacked[1][name]) for name in packed[1]) < 1e-5
    assert distance(packed[1]["shared.weight"], undropped[1]["shared.weight"]) > 0.1


def test_dropout_is_the_same_when_activations_are_computed_again() -> None:
    batch = batch_of(PACKED, PAIRS, has_keys=True)
    kept, recomputed = make_model("relu, tied", 0.2), make_model("relu, tied", 0.2)
    checkpoint_activations(recomputed)
    expected, found = _backward(kept, batch), _backward(recomputed, batch)
    assert expected[0] == found[0]
    assert all(torch.equal(expected[1][name], found[1][name]) for name in expected[1])

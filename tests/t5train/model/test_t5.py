"""The model is the same as Hugging Face's T5 in everything that can be observed."""

from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from t5train.errors import SpecError
from t5train.model.attention import _bucket
from t5train.model.initialization import initialise
from t5train.model.model_shape import _SIZES, T5Shape, count_parameters, huggingface_config, resolve
from t5train.model.parameters import parameter_shapes
from t5train.model.t5 import T5
from t5train.spec import ModelSpec
from tests.support.training.ragged_pairs import load_with_transformers

VOCABULARY = 300
FAMILIES = ("v1.0", "v1.1")
# transformers warns that it does not tie an untied checkpoint, although the config says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*tie:UserWarning")


def _model(version: str, **settings: object) -> tuple[T5, T5Shape]:
    shape = resolve(ModelSpec.model_validate({"preset": "smoke", "version": version, **settings}), VOCABULARY)
    model = T5(shape, decoder_start_id=0)
    for name, parameter in model.named_parameters():
        initialise(name, parameter, shape, seed=3)
    return model.eval(), shape


@pytest.mark.parametrize("version", FAMILIES)
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_logits_are_bit_equal_to_hugging_faces(version: str, feed_forward: str, tmp_path: Path) -> None:
    model, _ = _model(version, feed_forward=feed_forward, num_decoder_layers=3)
    loaded = load_with_transformers(model, tmp_path)
    inputs, decoder_inputs = torch.randint(0, VOCABULARY, (3, 150)), torch.randint(0, VOCABULARY, (3, 40))
    with torch.no_grad():
        ours = model.logits(inputs, decoder_inputs)
        theirs = loaded(input_ids=inputs, decoder_input_ids=decoder_inputs).logits
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("version", FAMILIES)
def test_training_evaluation_and_the_mean_of_token_losses_are_the_same_loss(version: str) -> None:
    model, _ = _model(version)
    inputs, targets = torch.randint(0, VOCABULARY, (2, 30)), torch.randint(0, VOCABULARY, (2, 9))
    with torch.no_grad():
        evaluated, of_tokens = model.eval()(inputs, targets), model.token_losses(inputs, targets).mean()
        trained = model.train()(inputs, targets)
    torch.testing.assert_close(evaluated, trained, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_tokens, evaluated)


def test_a_decoder_position_does_not_attend_to_later_positions() -> None:
    model, _ = _model("v1.1")
    inputs, decoder_inputs = torch.randint(0, VOCABULARY, (1, 30)), torch.randint(0, VOCABULARY, (1, 9))
    changed = decoder_inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model.logits(inputs, decoder_inputs), model.logits(inputs, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_buckets_match_hugging_face(bidirectional: bool) -> None:
    distances = torch.arange(-2000, 2001)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, num_buckets=32, max_distance=128)
    assert torch.equal(_bucket(distances, bidirectional), theirs)


@pytest.mark.parametrize("version", FAMILIES)
@pytest.mark.parametrize("preset", list(_SIZES["v1.0"]))
def test_every_preset_has_the_same_parameters_as_transformers(version: str, preset: str) -> None:
    shape = resolve(ModelSpec.model_validate({"preset": preset, "version": version}), 32_100)
    config = T5Config(**huggingface_config(shape, pad_id=0, eos_id=1))
    with torch.device("meta"):
        theirs = T5ForConditionalGeneration(config)
        ours = T5(shape, decoder_start_id=0)
    shapes = {name: tensor.shape for name, tensor in ours.named_parameters()}
    expected = {name: tensor.shape for name, tensor in theirs.named_parameters()}
    if not shape.tied:  # transformers makes them tied, and unties them when it loads a file that has both
        expected["lm_head.weight"] = expected["shared.weight"]
    assert shapes == expected == parameter_shapes(shape)
    assert count_parameters(shape) == sum(size.numel() for size in expected.values())


@pytest.mark.parametrize(
    ("preset", "version", "millions"),
    [("small", "v1.0", 60.5), ("base", "v1.0", 222.9), ("base", "v1.1", 247.6), ("3b", "v1.1", 2849.8)],
)
def test_presets_have_their_published_size(preset: str, version: str, millions: float) -> None:
    shape = resolve(ModelSpec.model_validate({"preset": preset, "version": version}), 32_100)
    assert count_parameters(shape) / 1e6 == pytest.approx(millions, abs=0.05)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"model.vocab_size is 128, but the tokenizer has 300 ids .* set model\.vocab_size=384"
    ):
        resolve(ModelSpec(vocab_size=128), VOCABULARY)

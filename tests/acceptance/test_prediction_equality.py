"""What the proof of equal predictions passes, counts and refuses."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from t5train.inference.model_folder import ModelFolder
from t5train.inference.predict.predictions import Prediction
from t5train.inference.text.decoding import Decoder, GenerationSpec
from t5train.records.stage_records import MANIFEST
from t5train.release.export import export
from tests.acceptance.prediction_equality import BEAMS, Plain
from tests.support.synthetic_models import make_trained

MOST = 6
SOURCES = [f"reverse: {'the value of ' * count}names" for count in range(1, 7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model without a manifest, so that its weights can be changed."""
    folder = tmp_path_factory.mktemp("model")
    exported = export(*make_trained(folder, "pairs"), folder / "exported").path
    (exported / MANIFEST).unlink()
    return exported


def predicted(model: Path, num_beams: int) -> list[Prediction]:
    found = Decoder(ModelFolder.open(model), "cpu").decode(SOURCES, GenerationSpec(MOST, num_beams))
    return [
        Prediction(
            id="1",
            task=None,
            source=source,
            reference=None,
            hypothesis=each.text,
            tokens=each.tokens,
            ended=each.ended,
        )
        for source, each in zip(SOURCES, found, strict=True)
    ]


@pytest.mark.parametrize("num_beams", BEAMS)
def test_predictions_of_a_batch_are_the_plain_ones_and_another_text_is_a_difference(
    model: Path, num_beams: int
) -> None:
    plain, found = Plain(model), predicted(model, num_beams)
    assert list(plain.differences(found, num_beams, MOST)) == []
    changed = [found[0].model_copy(update={"hypothesis": f"{found[0].hypothesis} names"}), *found[1:]]
    (difference,) = plain.differences(changed, num_beams, MOST)
    assert not difference.near_tie
    assert difference.source == SOURCES[0]


def test_a_token_with_the_same_logit_is_a_near_tie(model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model, tmp_path / "model")
    found = predicted(model, 1)
    tokenizer = ModelFolder.open(model).load_tokenizer()
    written = tokenizer(found[0].hypothesis, add_special_tokens=False).input_ids
    twin = next(each for each in range(250, 300) if each not in written)
    weights = load_file(model / "model.safetensors")
    for name in ("lm_head.weight", "shared.weight"):
        weights[name][twin] = weights[name][written[-1]]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    other = tokenizer.decode([*written[:-1], twin])
    (difference,) = Plain(model).differences([found[0].model_copy(update={"hypothesis": other})], 1, MOST)
    assert difference.near_tie

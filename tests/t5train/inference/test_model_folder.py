"""Which folders are accepted, and what is said of others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from t5train.errors import DigestMismatch, InputError, SpecError, T5TrainError
from t5train.inference.model_folder import ModelFolder, chosen_device
from t5train.inference.text.evaluation import evaluate
from t5train.inference.text.generation import generate
from tests.support.changed_weights import change_weights

MakeModel = Callable[..., Path]


def _change_config(folder: Path, **changes: Any) -> None:
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _of_a_run(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "run-folder/export")
    shutil.rmtree(folder)
    (folder.parent / "run-folder").rename(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"^PATH is .*, which is not a folder on this machine. Correct the path"),
        (_without("config.json"), r"is missing, or is not a file. Set PATH to the folder of a complete"),
        (lambda folder: _change_config(folder, model_type="bart"), "PATH: model_type is 'bart' in .*Choose a model of"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model\.bin, which can run code .* save_pretrained to another folder, and set PATH to that",
        ),
        (_without("model.safetensors"), r"neither model.safetensors nor .*Set PATH to the"),
        (_without("spiece.model", "tokenizer.json"), r"neither spiece\.model nor tokenizer\.json. Copy the vocabulary"),
        (_of_a_run, r"the folder of a run. Set PATH to its model: .*/export$"),
    ],
)
def test_an_unusable_folder_is_refused_before_it_is_loaded(
    make_model: MakeModel, damage: Callable[[Path], Any], message: str
) -> None:
    folder = make_model()
    damage(folder)
    with pytest.raises(T5TrainError, match=message):
        ModelFolder.open(folder)


def test_missing_tensors_are_an_error_and_not_initialised_at_random(make_model: MakeModel) -> None:
    folder = make_model()
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.final_layer_norm.weight"]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"missing keys encoder\.final_layer_norm\.weight. Copy the model again"):
        ModelFolder.open(folder).load("cpu")


def test_an_export_says_how_it_was_trained_and_others_are_taken_for_t5(
    make_model: MakeModel, make_published: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = make_published()
    assert ModelFolder.open(theirs).run.settings == {}
    assert ModelFolder.open(theirs).trained_tokens == 512
    ours = theirs.parent / "model"
    assert ModelFolder.open(ours).run.settings["optimizer"]["seed"] == 5
    assert ModelFolder.open(ours).trained_tokens == 32
    (ours / "manifest.json").unlink()
    (ours / "README.md").write_text("---\nlicense: mit\n---\n\n## Settings\n\n```json\n{}\n```\n")
    assert ModelFolder.open(ours).run.settings == {}
    assert "does not record" not in caplog.text
    (ours / "certificate.json").write_text("{}")
    ModelFolder.open(ours)
    assert f"{ours / 'README.md'} does not record how this model was trained" in caplog.text


def _flip(name: str) -> Callable[[Path], None]:
    def flip(content: bytes) -> bytes:
        return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]

    return _rewrite(name, flip)


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).unlink()  # the file may have a second name elsewhere
        (folder / name).write_bytes(change(content))

    return rewrite


def _add(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text("{}")


def _nest(_: bytes) -> bytes:
    return b"[" * 100_000


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_flip("tokenizer.json"), r"tokenizer\.json has sha256 \w{64}, but sha256"),
        (_flip("spiece.model"), r"spiece\.model has sha256 \w{64}, but sha256"),
        (_flip("generation_config.json"), r"generation_config\.json has sha256 \w{64}, but sha256"),
        (_flip("model.safetensors"), r"model\.safetensors has sha256 \w{64}, but sha256"),
        (_without("special_tokens_map.json"), r"special_tokens_map\.json is missing"),
        (_add("adapter_config.json"), r"adapter_config\.json was added after the digests .* were recorded"),
        (_rewrite("manifest.json", lambda content: content[:300]), r"manifest\.json is damaged, or not a manifest"),
        (_flip("manifest.json"), r"manifest\.json "),
        (_rewrite("manifest.json", _nest), r"manifest\.json is damaged"),
        (_rewrite("config.json", _nest), r"config\.json "),
    ],
)
def test_a_folder_that_is_not_as_its_manifest_records_is_refused_by_generate_and_evaluate(
    make_model: MakeModel, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    folder = make_model()
    damage(folder)
    (tmp_path / "text.txt").write_text("Some text to evaluate on. " * 200)
    with pytest.raises(T5TrainError, match=named):
        list(generate(folder, ["Some <extra_id_0> text"]))
    with pytest.raises(T5TrainError, match=named):
        evaluate(folder, str(tmp_path / "text.txt"), root=tmp_path)


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (_flip("README.md"), "README.md has sha256"),
        (_without("loss_curve.png"), "loss_curve.png is missing"),
        (_add("trainer_state.json"), None),
    ],
)
def test_files_that_transformers_does_not_read_may_differ_from_the_manifest(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None], warning: str | None
) -> None:
    folder = make_model()
    change(folder)
    ModelFolder.open(folder)
    warnings = [message for message in caplog.messages if "The model is used all the same" in message]
    assert len(warnings) == (warning is not None)
    assert all(f"{folder}/{warning}" in message for message in warnings)


def test_a_folder_with_a_manifest_of_another_program_is_used(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model()
    (folder / "manifest.json").write_text('{"name": "a web application"}')
    ModelFolder.open(folder).load("cpu")
    assert "is not of this project, so the files in" in caplog.text


def test_files_of_two_models_are_not_mixed(make_published: MakeModel) -> None:
    folder = make_published()
    opened = ModelFolder.open(folder)
    opened.load("cpu")
    changed = change_weights(folder)
    with pytest.raises(DigestMismatch, match=rf"{changed} was changed while the model was loaded"):
        opened.load("cpu")
    opened = ModelFolder.open(folder)
    _add("generation_config.json")(folder)
    with pytest.raises(DigestMismatch, match=r"generation_config\.json was changed while the model was loaded"):
        opened.load("cpu")


def test_files_may_be_linked_and_get_other_permissions_while_a_model_with_digests_is_loaded(
    make_published: MakeModel, tmp_path: Path
) -> None:
    folder = make_published()
    opened = ModelFolder.open(folder).digested()
    for name in opened.recorded:
        (tmp_path / name).hardlink_to(folder / name)
        (folder / name).chmod(0o400)
    opened.load("cpu")
    (folder / "config.json").chmod(0o600)
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(DigestMismatch, match=r"config\.json was changed while the model was loaded"):
        opened.load("cpu")


def test_the_digests_of_a_model_are_those_of_all_its_weights(make_published: MakeModel) -> None:
    folder = make_published()
    weights = {each.name for each in folder.glob("*.safetensors")}
    assert len(weights) > 1
    digested = ModelFolder.open(folder).digested()
    assert digested.recorded.keys() >= weights | {"config.json", "spiece.model"}
    digested.load("cpu")
    changed = change_weights(folder)
    with pytest.raises(DigestMismatch, match=rf"{changed} has sha256 of pieces \w{{64}}, but"):
        ModelFolder.open(folder, digested.recorded).load("cpu")


def test_a_vocabulary_with_more_ids_than_the_model_is_refused(make_model: MakeModel) -> None:
    folder = make_model()
    _change_config(folder, vocab_size=128)
    with pytest.raises(InputError, match=r"has a vocabulary of 400 ids, but config\.json says that the model has 128"):
        ModelFolder.open(folder).vocabulary()


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_and_the_cpu_can_always_be_chosen(device: str) -> None:
    with pytest.raises(SpecError, match=rf"device is '{device}', but it must be .*cpu"):
        chosen_device(device)
    assert chosen_device("cpu") == "cpu"
    assert chosen_device(None)

"""Which folders a run may continue from, and how others are refused before anything starts."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from t5train.data.vocabulary.tokenizer import Tokenizer, given_proto
from t5train.errors import DigestMismatch, InputError, SpecError, T5TrainError
from t5train.model.model_shape import resolve
from t5train.model.starting_model import require_fit, require_pieces, require_vocabulary, start_fingerprint, tensors_of
from t5train.model.tensor_files import StoredTensors, list_tensors
from t5train.records.stage_records import Export
from t5train.spec import ModelSpec
from tests.support.generated_text import DataChain

SIZES = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
IDS = 110  # ids of the tokenizer; the embedding has 128 rows
V10: dict[str, Any] = {"version": "v1.0", **SIZES}
V11: dict[str, Any] = {"version": "v1.1", **SIZES}
SWITCH: dict[str, Any] = V10 | {"moe": {"num_experts": 3, "every_n_layers": 2}}
SHARED = "shared.weight"


def _t5(folder: Path, **changes: Any) -> T5ForConditionalGeneration:
    torch.manual_seed(1)
    model = T5ForConditionalGeneration(T5Config(**{"vocab_size": 128, **SIZES, **changes}))
    if model.config.is_gated_act:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(folder)
    return model


def _gated(folder: Path) -> T5ForConditionalGeneration:
    return _t5(folder, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def _switch(folder: Path) -> SwitchTransformersForConditionalGeneration:
    sparse = {"num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = SwitchTransformersConfig(vocab_size=128, **SIZES, **sparse)
    model = SwitchTransformersForConditionalGeneration(config)
    model.save_pretrained(folder)
    return model


def _spec(folder: Path, values: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate({**values, "start_from": str(folder)})


def _values(spec: ModelSpec, ids: int = IDS) -> dict[str, torch.Tensor]:
    locations = tensors_of(spec, resolve(spec, ids))
    assert locations is not None
    stored = StoredTensors(locations)
    return {name: stored.whole(name) for name in locations}


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _mt5(folder: Path) -> MT5ForConditionalGeneration:
    model = MT5ForConditionalGeneration(MT5Config(vocab_size=128, **SIZES))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("make", "values"), [(_t5, V10), (_gated, V11), (_mt5, V11), (_switch, SWITCH)])
def test_weights_saved_by_transformers_are_read_unchanged(
    tmp_path: Path, make: Callable[[Path], Any], values: dict[str, Any]
) -> None:
    model, spec = make(tmp_path), _spec(tmp_path, values)
    require_fit(spec, IDS)
    found, expected = _values(spec), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_16_bit_weights_in_several_files_are_read_as_fp32(tmp_path: Path) -> None:
    model = _gated(tmp_path / "one").bfloat16()
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 1
    found = _values(_spec(tmp_path / "several", V11))
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in model.named_parameters())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_a_range_read_from_a_tensor_equals_that_range_of_the_whole(tmp_path: Path) -> None:
    save_file({"x": torch.arange(35).reshape(5, 7).half()}, tmp_path / "model.safetensors")
    stored = StoredTensors(list_tensors([tmp_path / "model.safetensors"]))
    whole = stored.whole("x").flatten()
    for start in range(35):
        for stop in range(start + 1, 36):
            assert torch.equal(stored.stretch("x", start, stop), whole[start:stop])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_non_finite_value_is_refused_with_the_name_of_its_tensor(tmp_path: Path, number: float) -> None:
    save_file({"sound": torch.ones(3), "spoilt": torch.tensor([1.0, number])}, tmp_path / "model.safetensors")
    stored = StoredTensors(list_tensors([tmp_path / "model.safetensors"]))
    assert torch.equal(stored.whole("sound"), torch.ones(3))
    with pytest.raises(InputError, match=r"model\.safetensors: spoilt holds a number that is not finite"):
        stored.whole("spoilt")


def test_redundant_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    _t5(tmp_path)

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 2)
        for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
            tensors[copy] = tensors[SHARED]

    before = _values(_spec(tmp_path, V10))
    _rewrite(tmp_path, as_published)
    after = _values(_spec(tmp_path, V10))
    assert before.keys() == after.keys()
    assert torch.equal(before[SHARED], after[SHARED])
    _rewrite(tmp_path, lambda tensors: tensors.pop(SHARED))
    assert torch.equal(_values(_spec(tmp_path, V10))[SHARED], before[SHARED])


def test_a_missing_output_weight_is_taken_from_the_embedding(tmp_path: Path) -> None:
    _gated(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    found = _values(_spec(tmp_path, V11))
    assert torch.equal(found["lm_head.weight"], found[SHARED])


@pytest.mark.parametrize(
    ("make", "values", "differs", "remedy"),
    [
        (_t5, V10 | {"d_model": 32, "d_ff": 64}, "d_ff: 64 -> 32; d_model: 32 -> 16", "model.d_model=16 model.d_kv=4"),
        (_t5, V11, "scale_decoder_outputs: false -> true", "model.version=v1.0"),
        (_t5, SWITCH, 'model_type: "switch_transformers" -> "t5"', "model.moe.num_experts=0"),
        (_t5, V10 | {"vocab_size": 256}, "vocab_size: 256 -> 128", "set model.vocab_size=128"),
        (_switch, V10, "num_experts", "model.moe.num_experts=3 model.moe.every_n_layers=2"),
    ],
)
def test_a_model_that_differs_from_the_settings_is_refused_with_the_settings_to_use(
    tmp_path: Path, make: Callable[[Path], Any], values: dict[str, Any], differs: str, remedy: str
) -> None:
    make(tmp_path)
    with pytest.raises(SpecError) as refused:
        require_fit(_spec(tmp_path, values), IDS)
    assert differs in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("sparse", [(3, 1), (1, 3), (2, 1)])
def test_no_settings_are_named_for_experts_that_none_describe(tmp_path: Path, sparse: tuple[int, int]) -> None:
    _switch(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    counts = dict(zip(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), sparse, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config | counts))
    with pytest.raises(SpecError, match=r"describes another model .* No settings describe such a model"):
        require_fit(_spec(tmp_path, SWITCH), IDS)


def test_the_refusal_of_a_published_model_names_its_preset(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_heads=8, num_layers=6).to_dict()
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for left_out in ("scale_decoder_outputs", "relative_attention_max_distance", "num_decoder_layers"):
        del config[left_out]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"set model\.version=v1\.0 model\.preset=small$"):
        require_fit(_spec(tmp_path, {"preset": "base"}), 32100)
    with pytest.raises(InputError, match=r"shared\.weight.* and more are missing; x do not belong to this model"):
        require_fit(_spec(tmp_path, {"preset": "small", "version": "v1.0"}), 32100)


def _truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _with_index(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {SHARED: file}}))

    return change


def _with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Put what a change makes of the embedding into the file."""
    return lambda folder: _rewrite(folder, lambda tensors: tensors.update({name: change(tensors[SHARED])}))


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _with_config(**values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            shutil.rmtree,
            "is not a folder on this machine. Correct the path, or write hf://OWNER/NAME for a model on the Hub",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing, or is not a file"),
        (_instead("config.json", os.mkfifo), r"config\.json is missing, or is not a file"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model\.bin, which can run code .* save_pretrained",
        ),
        (_truncated, "cannot be read as safetensors"),
        (_instead("config.json", Path.mkdir), r"config\.json is missing, or is not a file"),
        (_with_index("../other.safetensors"), "names '../other.safetensors', which is not the plain name"),
        (_with_index("manifest.json"), "names the weight file 'manifest.json', but only safetensors are read"),
        (
            _with_tensor(SHARED, lambda values: values.to(torch.int8)),
            r"shared\.weight are not 16-bit or 32-bit floating-point numbers",
        ),
        (_with_tensor(SHARED, lambda values: values[:64]), r"shared\.weight have another shape"),
        (
            _with_tensor("lm_head.weight", lambda values: values + 1),
            r"lm_head\.weight is tied to shared\.weight, but the files hold different values",
        ),
        (_with_config(model_type="bart"), "model.start_from: model_type is 'bart'"),
        (_with_config(model_type=["t5"]), r"model_type is \['t5'\] .* of type t5 or mt5"),
        (_with_config(model_type="umt5"), "model_type is 'umt5' .* of type t5 or mt5"),
        (_with_config(pad_token_id=3), r"pad_token_id is 3 in .*config\.json, but 0 in the vocabularies of T5"),
        (_with_config(eos_token_id=2), r"eos_token_id is 2 in .*, but 1 .* Correct the file"),
        (_with_config(decoder_start_token_id=1), "decoder_start_token_id is 1 in .*, but 0 "),
        (_with_config(layer_norm_epsilon=0.1), "No settings describe such a model"),
    ],
)
def test_an_unusable_starting_model_is_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    _t5(tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(T5TrainError, match=message):
        require_fit(_spec(tmp_path / "model", V10), IDS)


def test_weights_that_may_not_be_read_are_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    _t5(tmp_path / "model")
    monkeypatch.setattr("t5train.model.tensor_files.open", forbid, raising=False)
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read: Permission denied; give this user"):
        require_fit(_spec(tmp_path / "model", V10), IDS)


def test_a_tokenizer_with_more_ids_or_another_vocabulary_is_refused(tmp_path: Path) -> None:
    _t5(tmp_path)
    with pytest.raises(SpecError, match=r"with a vocabulary of 128, but the tokenizer has 600 ids\. Set tokenizer"):
        require_fit(_spec(tmp_path, V10), 600)
    (tmp_path / "spiece.model").write_bytes(b"pieces")
    with pytest.raises(SpecError, match=f"Set tokenizer.path={tmp_path}"):
        require_vocabulary(_spec(tmp_path, V10), "0" * 64)


@pytest.mark.parametrize("change", ["none", "other pieces", "fewer pieces", "not JSON"])
def test_a_starting_model_with_only_a_tokenizer_json_must_have_the_runs_pieces(
    data_chain: DataChain, tmp_path: Path, change: str
) -> None:
    document = json.loads((data_chain.tokenizer.path / "tokenizer.json").read_text())
    pieces, tokenizer = document["model"]["vocab"], Tokenizer.load(data_chain.tokenizer.path)
    if change == "other pieces":
        pieces[10], pieces[11] = pieces[11], pieces[10]
    elif change == "fewer pieces":
        del pieces[200:]
    (tmp_path / "tokenizer.json").write_text("no" if change == "not JSON" else json.dumps(document))
    if change == "none":
        require_pieces(_spec(tmp_path, V10), tokenizer)
        return
    with pytest.raises(T5TrainError, match=r"another vocabulary than the run: id \d+ is|is not a unigram tokenizer"):
        require_pieces(_spec(tmp_path, V10), tokenizer)


def test_a_starting_model_whose_tokenizer_json_is_not_of_its_spiece_model_is_refused(
    data_chain: DataChain, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(data_chain.tokenizer.path)
    document = json.loads((data_chain.tokenizer.path / "tokenizer.json").read_text())
    shutil.copy(data_chain.tokenizer.path / "spiece.model", tmp_path)
    require_pieces(_spec(tmp_path, V10), tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    require_pieces(_spec(tmp_path, V10), tokenizer)
    document["model"]["vocab"][10:12] = document["model"]["vocab"][11:9:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"id 10 is .* in tokenizer\.path\. Its spiece\.model has .* Copy both files"):
        require_pieces(_spec(tmp_path, V10), tokenizer)


def test_a_starting_model_without_a_vocabulary_is_used_with_a_warning(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_pieces(_spec(tmp_path, V10), Tokenizer.load(data_chain.tokenizer.path))
    assert "has neither spiece.model nor tokenizer.json" in caplog.text


def test_a_starting_model_is_identified_by_its_content_and_not_its_path(tmp_path: Path) -> None:
    _t5(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here, there = (_spec(tmp_path / name, V10) for name in ("here", "there"))
    first = start_fingerprint(here)
    assert first == start_fingerprint(there)
    _rewrite(tmp_path / "there", lambda tensors: tensors.update({SHARED: tensors[SHARED] + 1}))
    assert start_fingerprint(there) != first
    assert start_fingerprint(ModelSpec()) is None


@pytest.mark.parametrize(("version", "values"), [("v1.1", V11), ("v1.0", V10), ("switch", SWITCH)])
def test_an_export_of_this_project_can_be_started_from_and_is_verified_against_its_manifest(
    make_export: Callable[..., Export], version: str, values: dict[str, Any]
) -> None:
    folder = make_export(version, certified=False).path
    spec, ids = _spec(folder, values), json.loads((folder / "config.json").read_text())["vocab_size"]
    require_fit(spec, ids)
    assert _values(spec, ids).keys() == load_file(folder / "model.safetensors").keys()
    assert start_fingerprint(spec)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    with pytest.raises(DigestMismatch, match="was recorded"):
        start_fingerprint(spec)


def test_a_configuration_or_a_vocabulary_that_differs_from_its_manifest_is_refused(
    make_export: Callable[..., Export],
) -> None:
    folder = make_export(certified=False).path
    for name in ("config.json", "spiece.model"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content + b"\n")
    with pytest.raises(DigestMismatch, match=r"config\.json has "):
        start_fingerprint(_spec(folder, V11))
    with pytest.raises(DigestMismatch, match=r"spiece\.model has "):
        given_proto(folder)

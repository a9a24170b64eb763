"""Exports: plain transformers loads what was trained, and what does not belong together is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.errors import DigestMismatch, InputError, SpecError
from t5train.records.digests import FileDigest, digest_files
from t5train.records.witness import Witness
from t5train.release.export import export
from tests.support import synthetic_models

MakeTrained = Callable[..., Any]


@pytest.mark.parametrize(("version", "num_files"), [("v1.0", 3), ("v1.1", 1), ("v1.1", 3), ("switch", 3)])
def test_plain_transformers_loads_every_tensor_and_nothing_else(
    make_trained: MakeTrained, tmp_path: Path, version: str, num_files: int
) -> None:
    trained = make_trained(version, num_files)
    exported = export(*trained, tmp_path / "out")
    model, loading = AutoModelForSeq2SeqLM.from_pretrained(exported.path, output_loading_info=True)
    assert not any(loading.values()), loading
    parameters = dict(model.named_parameters())
    names = {name for file in trained.weights.path.glob("*.safetensors") for name in load_file(file)}
    assert parameters.keys() == names
    for file in trained.weights.path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(parameters[name], tensor), name


def test_optimizer_moments_are_not_exported(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained("v1.1", 3)
    folder = trained.weights.path
    for name in ("exp_avg.safetensors", "exp_avg_sq-00001-of-00002.safetensors", "exp_avg_sq.safetensors.index.json"):
        (folder / name).write_bytes(b"moments")
    files = trained.weights.files | digest_files(folder, [p.name for p in folder.glob("exp_avg*")])
    weights = trained.weights.model_copy(update={"files": files}).commit()
    exported = export(weights, *trained[1:], tmp_path / "out")
    assert not any("exp_avg" in name for name in exported.files)
    AutoModelForSeq2SeqLM.from_pretrained(exported.path)


@pytest.mark.parametrize(("version", "scaled"), [("v1.0", True), ("v1.1", False)])
def test_the_configuration_records_the_tying_and_scaling_of_the_version(
    make_trained: MakeTrained, tmp_path: Path, version: str, scaled: bool
) -> None:
    folder = export(*make_trained(version), tmp_path / "out").path
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.config.scale_decoder_outputs is scaled
    assert (model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()) is scaled
    # Older versions of transformers know only this key, which decides both.
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is scaled


def test_experts_are_exported_as_switch_transformers_that_drop_no_token(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    config = json.loads((export(*make_trained("switch"), tmp_path / "out").path / "config.json").read_text())
    assert config["architectures"] == ["SwitchTransformersForConditionalGeneration"]
    assert config["num_experts"] == 3
    assert config["expert_capacity"] == 1 << 30


def test_a_model_with_top_2_routing_is_not_exported(make_trained: MakeTrained, tmp_path: Path) -> None:
    *trained, spec = make_trained("switch")
    with pytest.raises(SpecError, match=r"model\.moe\.top_k is 2, .*Set model\.moe\.top_k=1"):
        export(*trained, spec.with_settings({"model.moe.top_k": 2}), tmp_path / "out")


def test_a_vocabulary_that_the_published_tokenizer_uses_otherwise_is_not_exported(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    spiece = trained.tokenizer.path / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
    model.normalizer_spec.precompiled_charsmap = b""  # an earlier version trained with such vocabularies
    spiece.write_bytes(model.SerializeToString())
    files = trained.tokenizer.files | digest_files(spiece.parent, ["spiece.model"])
    trained.change_witness(inputs=Witness.load(trained.witness).inputs | {"vocabulary": files["spiece.model"].sha256})
    changed = trained._replace(tokenizer=trained.tokenizer.model_copy(update={"files": files}))
    with pytest.raises(
        SpecError, match=r"begun by an earlier version.* begin a new run .*, or finish it with the version"
    ):
        export(*changed, tmp_path / "out")


def test_a_vocabulary_that_the_model_was_not_trained_with_is_refused(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    trained.change_witness(inputs={"vocabulary": "a" * 64})
    with pytest.raises(InputError, match="does not have the vocabulary that the model was trained with"):
        export(*trained, tmp_path / "out")
    right = {"spiece.model": FileDigest(size=1, sha256="a" * 64)}  # which is recorded, but the file differs
    tokenizer = trained.tokenizer.model_copy(update={"files": right})
    with pytest.raises(InputError, match=r"spiece\.model has [\d,]+ bytes, but 1 were recorded"):
        export(*trained._replace(tokenizer=tokenizer), tmp_path / "out")


@pytest.mark.parametrize("changed", [{"inputs": {"run": "9" * 64}}, {"counts": {"step": 3}}])
def test_weights_that_the_witness_does_not_describe_are_refused(
    make_trained: MakeTrained, tmp_path: Path, changed: dict[str, Any]
) -> None:
    trained = make_trained()
    weights = trained.weights.model_copy(update=changed)
    with pytest.raises(InputError, match="but the witness is of run 333333333333 at step 7"):
        export(*trained._replace(weights=weights), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (trained.witness / "witness.json").write_text('{"schema_version": 2}')
    with pytest.raises(InputError, match="not a witness"):
        export(*trained, tmp_path / "out")


def test_damaged_weights_are_named_and_leave_nothing_behind(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    with open(trained.weights.path / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        export(*trained, tmp_path / "there/out")
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("input_tokens", [64, 128])
def test_the_tokenizers_longest_input_is_that_of_training(
    make_trained: MakeTrained, tmp_path: Path, input_tokens: int
) -> None:
    trained = make_trained()
    recorded = Witness.load(trained.witness).trained.model_dump(mode="json")
    recorded["settings"]["objective"]["input_tokens"] = input_tokens
    trained.change_witness(trained=recorded)
    tokenizer = AutoTokenizer.from_pretrained(export(*trained, tmp_path / "out").path)
    assert tokenizer.model_max_length == input_tokens
    assert len(tokenizer("word " * 500, truncation=True)["input_ids"]) == input_tokens


def test_sentinels_are_additional_special_tokens_in_every_file_that_lists_them(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    folder = export(*make_trained(), tmp_path / "out").path
    sentinels = [f"<extra_id_{index}>" for index in range(100)]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        listed = json.loads((folder / name).read_text())
        assert listed["additional_special_tokens"] == sentinels
        assert "extra_special_tokens" not in listed  # version 4 of transformers fails if this is a list
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {each["content"] for each in added if each["special"]} == {"<pad>", "</s>", "<unk>", *sentinels}


@pytest.mark.slow
def test_plain_transformers_loads_exports_without_any_warning_but_the_one_that_the_card_explains(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    versions = ("v1.0", "v1.1", "switch")
    trained = [synthetic_models.make_trained(tmp_path / version, version) for version in versions]
    folders = [str(export(*each, each.weights.path.with_name("export")).path) for each in trained]
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "from transformers.utils.logging import disable_progress_bar; disable_progress_bar()\n"
        "for folder in sys.argv[1:]:\n"
        "    print(folder, file=sys.stderr, flush=True)\n"
        "    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))\n"
        "    model.generate(**tokenizer('The <extra_id_0>', return_tensors='pt'), max_new_tokens=2)\n"
    )
    loaded = run_python(code, *folders)
    assert loaded.returncode == 0, loaded.stderr
    first, second, remark, third = loaded.stderr.splitlines()
    assert [first, second, third] == folders, "only v1.1 has weights that look as if they were to be tied"
    assert "so we will NOT tie them" in remark

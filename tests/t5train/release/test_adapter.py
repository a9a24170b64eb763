"""A run with LoRA is published merged, and as an adapter that PEFT loads. The certificate covers both."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5ForConditionalGeneration

from t5train.errors import CertificationError, InputError
from t5train.model.tensor_files import StoredTensors, list_tensors
from t5train.progress import silent
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.certificate import Certificate
from t5train.release.certification import certify, certify_in_fresh_process
from t5train.release.export import ADAPTER_WEIGHTS, adapter_config, export
from t5train.release.model_comparison import differing_adapter
from tests.support.synthetic_models import Trained

MakeTrained = Callable[..., Trained]
MakeExport = Callable[..., Export]
FILES = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


def load(folder: Path) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration.from_pretrained(folder)


def change(path: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    how(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def start(tmp_path: Path) -> str:
    return str(tmp_path / "start")


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "run/witness"


@pytest.mark.parametrize(("version", "num_files"), [("lora", 1), ("lora v1.0", 3)])
def test_peft_merges_the_adapter_to_the_published_model_within_rounding(
    make_trained: MakeTrained, tmp_path: Path, start: str, version: str, num_files: int
) -> None:
    from peft import PeftModel

    trained = make_trained(version, num_files)
    folder = export(*trained, tmp_path / "export").path
    of_start = {name: each.detach().clone() for name, each in load(Path(start)).named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, which are as in the start model
        merged = PeftModel.from_pretrained(load(Path(start)), folder / "adapter").merge_and_unload()
    factors, published = load_file(folder / ADAPTER_WEIGHTS), dict(load(folder).named_parameters())
    found = dict(merged.named_parameters())
    assert found.keys() == published.keys()
    lora = trained.spec.finetune.lora
    num_adapters = 0
    for name, weight in published.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if (a := factors.get(f"{module}.lora_A.weight")) is None:
            assert torch.equal(found[name], weight), "not a target"
            continue
        terms = lora.scaling * factors[f"{module}.lora_B.weight"].abs() @ a.abs()
        rounding = torch.finfo(torch.float32).eps * ((a.shape[0] + 1) * terms + of_start[name].abs() + weight.abs())
        assert ((found[name] - weight).abs() <= rounding).all()
        assert not torch.equal(of_start[name], weight)
        num_adapters += 1
    assert num_adapters == len(factors) / 2 == {"lora": 20, "lora v1.0": 10}[version]


def test_the_certificate_covers_the_adapter_and_says_what_was_merged(
    make_export: MakeExport, witness: Path, start: str
) -> None:
    exported = make_export("lora")
    certificate = Certificate.parse((exported.path / "certificate.json").read_bytes(), "certificate.json")
    assert certificate.files.keys() >= FILES
    assert exported.files.keys() >= FILES
    assert "adapter/adapter_config.json" in certificate.documents
    assert certificate.adapter is not None
    assert (certificate.adapter.tensors_merged, certificate.adapter.tensors_unchanged) == (20, 32)
    assert certificate.adapter.start_from == Witness.load(witness).inputs["start_from"]


def test_a_changed_bit_of_a_factor_and_a_changed_start_model_are_found(
    make_export: MakeExport, witness: Path, start: str
) -> None:
    exported, file = make_export("lora"), Path(start) / "model.safetensors"
    factor = "base_model.model.encoder.block.1.layer.1.DenseReluDense.wo.lora_A.weight"
    change(exported.path / ADAPTER_WEIGHTS, lambda tensors: tensors[factor].view(torch.int32)[0, 0].bitwise_xor_(1))
    for name in ("encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"):
        change(file, lambda tensors, name=name: tensors[name][0, 0].add_(1))
    found = differing_adapter(exported.path, StoredTensors(list_tensors([file])), Witness.load(witness), silent)
    of_adapter, of_start = found
    assert of_adapter.startswith("1 tensor of adapter/adapter_model.safetensors unlike the recorded fp32 masters: ")
    assert re.search(
        r"unlike the start model with its adapter: .*shared\.weight, .*0\.SelfAttention\.q\.weight", of_start
    )


def test_another_configuration_of_the_adapter_is_refused_even_with_a_matching_manifest(
    make_export: MakeExport, witness: Path, start: str
) -> None:
    exported, name = make_export("lora", certified=False), "adapter/adapter_config.json"
    path = exported.path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "somebody/model"}))
    exported.model_copy(update={"files": exported.files | digest_files(exported.path, [name])}).commit()
    with pytest.raises(CertificationError, match="base_model_name_or_path is 'somebody/model' instead of None"):
        certify(exported.path, witness, start_from=start)


@pytest.mark.parametrize(
    ("other", "found"), [(None, "Name its folder"), ("mine", "mine is not the model that run made started from: its")]
)
def test_an_adapter_is_not_certified_without_its_start_model(
    make_export: MakeExport, witness: Path, tmp_path: Path, start: str, other: str | None, found: str
) -> None:
    exported = make_export("lora", certified=False)
    if other is not None:
        copytree(start, tmp_path / other)
        change(tmp_path / other / "model.safetensors", lambda tensors: tensors["shared.weight"].mul_(2))
    with pytest.raises(InputError, match=found):
        certify(exported.path, witness, start_from=other and str(tmp_path / other))


def test_a_certificate_is_not_reused_for_another_start_model_than_that_of_the_run(
    make_export: MakeExport, witness: Path, tmp_path: Path, start: str
) -> None:
    exported = make_export("lora")
    assert certify_in_fresh_process(exported, witness, start_from=start).reused
    change(Path(start) / "model.safetensors", lambda tensors: tensors["shared.weight"].mul_(2))
    for other, found in ((start, "not the model that run made started from"), (str(tmp_path / "no"), "not a folder")):
        with pytest.raises(InputError, match=found):
            certify_in_fresh_process(exported, witness, start_from=other)


def test_the_start_model_of_an_adapter_is_certified_from_its_copy(make_export: MakeExport, witness: Path) -> None:
    exported = make_export("lora", certified=False)
    with pytest.raises(InputError, match=r"s3://bucket/t5, but must be a folder .* which is below starts in the root"):
        certify(exported.path, witness, start_from="s3://bucket/t5")


def test_weights_without_the_adapter_are_not_exported(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained("lora")
    files = {name: digest for name, digest in trained.weights.files.items() if name != "adapters.safetensors"}
    weights = trained.weights.model_copy(update={"files": files})
    with pytest.raises(InputError, match=r"holds no adapters\.safetensors\. Consolidate the checkpoint again"):
        export(weights, trained.tokenizer, trained.witness, trained.spec, tmp_path / "export")


def test_no_path_of_this_machine_is_published(make_export: MakeExport, tmp_path: Path) -> None:
    exported = make_export("lora")
    for name in {*exported.files} - {"certificate.json"}:
        assert str(tmp_path.parent).encode() not in (exported.path / name).read_bytes(), name
    config = json.loads((exported.path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def test_a_start_on_the_hub_is_named_with_its_commit(make_export: MakeExport, witness: Path) -> None:
    make_export("lora")
    trained = Witness.load(witness).trained.model_copy(update={"start_from": f"google/t5-v1_1-base@{'0a' * 20}"})
    config = adapter_config(trained)
    assert (config["base_model_name_or_path"], config["revision"]) == ("google/t5-v1_1-base", "0a" * 20)


def test_the_card_says_what_the_adapter_is_and_how_to_load_it(make_export: MakeExport, witness: Path) -> None:
    card = (make_export("lora").path / "README.md").read_text("utf-8")
    for stated in (
        "adapters of rank 3 beside `q`, `o`, `wi_0`, `wo`, with dropout 0",
        "plus 8 / 3 times the product",
        "starting from the weights of `start` (`start_from` under Lineage)",
        'from_pretrained("path/to/start", dtype="float32")',
        'PeftModel.from_pretrained(start, "path/to/this/folder/adapter")',
        f"| start_from | `{Witness.load(witness).inputs['start_from']}` |",
    ):
        assert stated in card

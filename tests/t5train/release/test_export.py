"""Exports: Hugging Face folders."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.errors import DigestMismatch, InputError, SpecError, StorageError
from t5train.locations import shareable_source
from t5train.records.digests import FileDigest, digest_files
from t5train.records.kept_files import changed_files
from t5train.records.stage_records import Export, set_damaged_aside
from t5train.records.witness import Witness
from t5train.release.card_sections import MEANINGS
from t5train.release.export import export
from t5train.release.loss_curve import loss_curve
from t5train.release.model_card import read_front_matter

MakeTrained = Callable[..., Any]


def _change_witness(trained: Any, **changes: Any) -> None:
    path = trained.witness / "witness.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("version", ["v1.0", "v1.1", "switch"])
@pytest.mark.parametrize("num_files", [1, 3])
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


def test_transformers_tokenises_and_generates_with_the_exported_folder(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    folder = export(*make_trained(), tmp_path / "out").path
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generated = model.generate(**tokenizer("the <extra_id_0>", return_tensors="pt"), max_new_tokens=3)
    assert generated[0, 0] == tokenizer.pad_token_id


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


def test_a_vocabulary_that_the_model_was_not_trained_with_is_refused(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    _change_witness(trained, inputs={"vocabulary": "a" * 64})
    with pytest.raises(InputError, match="does not have the vocabulary that the model was trained with"):
        export(*trained, tmp_path / "out")
    right = FileDigest(size=1, sha256="a" * 64)
    tokenizer = trained.tokenizer.model_copy(update={"files": {"spiece.model": right}})
    with pytest.raises(
        InputError, match=r"spiece\.model has \d+ bytes, but 1 were recorded"
    ):  # the right vocabulary is recorded, but its file differs
        export(*trained._replace(tokenizer=tokenizer), tmp_path / "out")


def test_an_export_is_reused_while_its_inputs_are_the_same(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    assert not made.reused
    assert Export.load(tmp_path / "out") == made
    assert str(tmp_path / "out") in (tmp_path / "out/manifest.json").read_text()
    assert export(*trained, tmp_path / "out").reused


def test_a_damaged_export_is_made_again(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    config = export(*trained, tmp_path / "out").path / "config.json"
    config.write_text("{}")
    again = export(*trained, tmp_path / "out")
    assert not again.reused
    again.verify()


def test_an_export_with_the_card_of_another_version_is_made_again_unless_it_is_certified(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    card = made.path / "README.md"
    card.write_text(card.read_text().replace("## Verify", "## Check"))
    older = made.model_copy(update={"files": made.files | digest_files(made.path, ["README.md"])}).commit()
    (made.path / "certificate.json").write_text("{}")
    older.model_copy(update={"files": older.files | digest_files(made.path, ["certificate.json"])}).commit()
    assert export(*trained, tmp_path / "out").reused
    older.commit()
    (made.path / "certificate.json").unlink()
    assert not export(*trained, tmp_path / "out").reused
    assert "## Verify" in card.read_text()


def test_an_export_of_other_weights_replaces_the_old_one(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    old = export(*trained, tmp_path / "out")
    changed = trained._replace(weights=trained.weights.model_copy(update={"fingerprint": "f" * 64}))
    assert export(*changed, tmp_path / "out").fingerprint != old.fingerprint
    assert Export.load(tmp_path / "out").inputs["weights"] == "f" * 64


@pytest.mark.parametrize("name", ["evaluation.json", "README.md", "results/mmlu.json"])
def test_files_that_somebody_added_or_edited_are_never_removed(
    make_trained: MakeTrained, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    trained = make_trained()
    out = export(*trained, tmp_path / "out").path
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    changed = trained._replace(weights=trained.weights.model_copy(update={"fingerprint": "f" * 64}))
    export(*changed, out).verify()
    assert (tmp_path / "out.aside-1" / name).read_text() == "mine"
    moved = f"was moved to {tmp_path / 'out.aside-1'}, because files in the folder were added or changed: {name}"
    assert moved in caplog.text
    assert not changed_files(Export.load(out))


def test_folders_that_were_moved_aside_are_not_overwritten(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    for number in (1, 2):
        (export(*trained, tmp_path / "out").path / "config.json").write_text(str(number))
    export(*trained, tmp_path / "out")
    assert [(tmp_path / f"out.aside-{number}/config.json").read_text() for number in (1, 2)] == ["1", "2"]


def test_an_export_without_a_readable_manifest_is_moved_aside_whole(make_trained: MakeTrained, tmp_path: Path) -> None:
    out = export(*make_trained(), tmp_path / "out").path
    (out / "notes.txt").write_text("mine")
    (out / "manifest.json").write_text("{")
    set_damaged_aside(out)
    assert (tmp_path / "out.aside-1/notes.txt").read_text() == "mine"
    assert not out.exists()


def test_an_export_of_another_run_is_left_alone_and_both_runs_are_named(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    theirs = export(*trained, tmp_path / "out")
    _change_witness(trained, run_fingerprint="9" * 64)
    weights = trained.weights.model_copy(update={"inputs": {"run": "9" * 64}})
    with pytest.raises(StorageError, match=r"of run 333333333333 .*the new export is of run 999999999999"):
        export(*trained._replace(weights=weights), tmp_path / "out")
    assert Export.load(tmp_path / "out") == theirs
    theirs.verify()
    export(*trained._replace(weights=weights), tmp_path / "other")


@pytest.mark.parametrize("changed", [{"inputs": {"run": "9" * 64}}, {"counts": {"step": 3}}])
def test_weights_that_the_witness_does_not_describe_are_refused(
    make_trained: MakeTrained, tmp_path: Path, changed: dict[str, Any]
) -> None:
    trained = make_trained()
    weights = trained.weights.model_copy(update=changed)
    with pytest.raises(InputError, match="but the witness is of run 333333333333 at step 7"):
        export(*trained._replace(weights=weights), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_killed_removal_does_not_block_a_new_export(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    made.path.rename(tmp_path / ".out.discarded")  # what a killed removal leaves
    export(*trained, tmp_path / "out")
    changed = trained._replace(weights=trained.weights.model_copy(update={"fingerprint": "f" * 64}))
    export(*changed, tmp_path / "out").verify()
    assert not (tmp_path / ".out.discarded").exists()


def test_a_folder_that_is_not_an_export_is_left_alone(make_trained: MakeTrained, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="in the way"):
        export(*make_trained(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_damaged_weights_are_named_and_leave_nothing_behind(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    with open(trained.weights.path / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        export(*trained, tmp_path / "there/out")
    assert not list((tmp_path / "there").iterdir())


def test_a_file_that_is_not_a_witness_is_refused(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    (trained.witness / "witness.json").write_text('{"schema_version": 2}')
    with pytest.raises(InputError, match="not a witness"):
        export(*trained, tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("sftp://somebody@host/text/*.txt", "sftp://host/text/*.txt"),
        ("/home/someone/private/text.jsonl", "text.jsonl"),
    ],
)
def test_a_shared_corpus_source_omits_users_and_local_folders(source: str, shown: str) -> None:
    assert shareable_source(source) == shown


def test_the_card_states_the_measurements_and_the_lineage(make_trained: MakeTrained, tmp_path: Path) -> None:
    card = (export(*make_trained(), tmp_path / "out").path / "README.md").read_text()
    assert "Trained on `pydocs`" in card
    assert "| validation_loss | 4.5678 |" in card
    assert all(f"| `{digit * 64}` |" in card for digit in "01234")


@pytest.mark.parametrize("loss", [4.5678, 1e-05, 3.0, 1.5e22])
def test_the_front_matter_of_the_card_has_the_recorded_facts(
    make_trained: MakeTrained, tmp_path: Path, loss: float
) -> None:
    trained = make_trained()
    _change_witness(trained, validation={"validation_loss": loss, "unigram_content_loss": None})
    exported = export(*trained, tmp_path / "out")
    front_matter = read_front_matter((exported.path / "README.md").read_text())
    facts = front_matter["t5_pretrain"]
    assert facts["held_out"] == {"validation_loss": loss, "unigram_content_loss": None}
    assert (facts["step"], facts["run"], facts["lineage"]) == (7, "3" * 64, exported.inputs)
    assert facts["sha256"] == {name: digest.sha256 for name, digest in exported.files.items() if name != "README.md"}


def test_the_card_names_the_starting_model(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    witness = trained.witness / "witness.json"
    document = json.loads(witness.read_text())
    document["trained"]["start_from"] = "t5-base"
    witness.write_text(json.dumps(document | {"inputs": document["inputs"] | {"start_from": "7" * 64}}))
    exported = export(*trained, tmp_path / "out")
    card = (exported.path / "README.md").read_text()
    assert "pre-trained starting from the weights of `t5-base` " in card
    assert f"| start_from | `{'7' * 64}` |" in card
    assert exported.inputs["start_from"] == "7" * 64


def _card(exported: Export) -> str:
    return (exported.path / "README.md").read_text("utf-8")


def test_the_card_states_data_training_licence_and_languages(make_trained: MakeTrained, tmp_path: Path) -> None:
    exported = export(*make_trained("v1.1"), tmp_path / "out")
    card = _card(exported)
    for line in (
        "| train | 900 | 900 |",
        "Training took 448 sequences: 2.00 epochs over the 224 sequences of the training split.",
        "Languages: en, el.",
        "text has the licence `cc-by-4.0`",
        "| batch | 64 sequences a step |",
        "| layout at the last step | ranks: 2, ZeRO stage: 1, offload: none, ",
        "weight decay 0, gradient norm clipped to 1 |",
        "| learning rate | 0.02 after 40 steps of warm-up, then cosine to 0.001 |",
        "| precision | fp32, with fp32 masters |",
        "![Loss against optimizer steps](loss_curve.png)",
    ):
        assert line in card, line
    front_matter = read_front_matter(card)
    assert (front_matter["license"], front_matter["language"]) == ("cc-by-4.0", ["en", "el"])


def test_every_measurement_of_the_card_is_explained(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained("switch")
    _change_witness(trained, validation=dict.fromkeys(MEANINGS, 1.5))
    card = _card(export(*trained, tmp_path / "out"))
    rows = [line for line in card.splitlines() if line.split(" | ")[0].removeprefix("| ") in MEANINGS]
    assert len(rows) == len(MEANINGS)
    assert all(row.rstrip(" |").endswith(".") for row in rows)


@pytest.mark.parametrize(("loss", "is_worse"), [(6.4, False), (6.5, True), (7.0, True)])
def test_the_card_says_if_the_model_is_no_better_than_word_frequencies(
    make_trained: MakeTrained, tmp_path: Path, loss: float, is_worse: bool
) -> None:
    trained = make_trained()
    _change_witness(trained, validation={"validation_content_loss": loss, "unigram_content_loss": 6.5})
    card = _card(export(*trained, tmp_path / "out"))
    assert ("This model predicts no better than word frequencies." in card) is is_worse


@pytest.mark.parametrize(("version", "noted"), [("v1.1", True), ("v1.0", False), ("switch", False)])
def test_only_the_card_of_a_v11_notes_that_weights_are_not_tied(
    make_trained: MakeTrained, tmp_path: Path, version: str, noted: bool
) -> None:
    assert ("are not tied" in _card(export(*make_trained(version), tmp_path / "out"))) is noted


def test_a_run_of_an_earlier_version_is_exported_without_what_it_did_not_record(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    exported = export(*make_trained("v1.0"), tmp_path / "out")
    assert "loss_curve.png" not in exported.files
    card = _card(exported)
    assert "loss_curve.png" not in card
    assert "epochs" not in card
    assert "The licence of this model follows from the licence of that text" in card
    assert read_front_matter(card)["license"] == "unknown"


def test_the_code_of_the_card_runs(make_trained: MakeTrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(*make_trained(), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", _card(exported), re.DOTALL))
    result: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(exported.path)), result)  # noqa: S102 - the card's own code
    tuned = AutoModelForSeq2SeqLM.from_pretrained("fine-tuned")
    assert torch.equal(tuned.lm_head.weight, result["model"].lm_head.weight)
    assert not torch.equal(tuned.lm_head.weight, AutoModelForSeq2SeqLM.from_pretrained(exported.path).lm_head.weight)
    assert AutoTokenizer.from_pretrained("fine-tuned")("a <extra_id_0>") == result["tokenizer"]("a <extra_id_0>")


def test_the_loss_curve_is_the_same_whatever_matplotlib_is_configured_to(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    import matplotlib as mpl

    exported = export(*make_trained(), tmp_path / "out")
    drawn = (exported.path / "loss_curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert len(drawn) < 100_000
    with mpl.rc_context({"lines.linewidth": 9, "font.size": 20, "axes.facecolor": "red"}):
        assert loss_curve(Witness.load(tmp_path / "run/witness")) == drawn
    assert read_front_matter(_card(exported))["t5_pretrain"]["sha256"]["loss_curve.png"]


@pytest.mark.parametrize("input_tokens", [64, 128])
def test_the_tokenizers_longest_input_is_that_of_training(
    make_trained: MakeTrained, tmp_path: Path, input_tokens: int
) -> None:
    trained = make_trained()
    document = json.loads((trained.witness / "witness.json").read_text())
    document["trained"]["settings"]["objective"]["input_tokens"] = input_tokens
    (trained.witness / "witness.json").write_text(json.dumps(document))
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


@pytest.mark.parametrize("version", ["v1.0", "v1.1", "switch"])
def test_plain_transformers_loads_an_export_without_any_warning_but_the_one_that_the_card_explains(
    make_trained: MakeTrained, tmp_path: Path, run_python: Callable[..., Any], version: str
) -> None:
    folder = export(*make_trained(version), tmp_path / "out").path
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "from transformers.utils.logging import disable_progress_bar; disable_progress_bar()\n"
        "model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))\n"
        "model.generate(**tokenizer('The <extra_id_0>', return_tensors='pt'), max_new_tokens=2)\n"
    )
    loaded = run_python(code, str(folder))
    assert loaded.returncode == 0, loaded.stderr
    remarks = loaded.stderr.splitlines()
    assert len(remarks) == (version == "v1.1"), loaded.stderr
    assert all("so we will NOT tie them" in each for each in remarks)


def test_a_licence_that_the_run_did_not_record_is_not_silently_ignored(
    make_trained: MakeTrained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = make_trained()
    export(*trained, tmp_path / "out")
    recorded = {"corpus.license": "cc-by-4.0", "corpus.languages": "en,el"}
    export(*trained._replace(spec=trained.spec.with_settings(recorded)), tmp_path / "out")
    assert "corpus.license" not in caplog.text
    export(*trained._replace(spec=trained.spec.with_settings({"corpus.license": "mit"})), tmp_path / "out")
    assert "corpus.license is 'mit' and corpus.languages '', but the run recorded 'cc-by-4.0'" in caplog.text

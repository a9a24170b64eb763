"""The model card: what it states is what the run recorded, and its code runs."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.records.locations import shareable_source
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.card_sections import MEANINGS, hub_licence
from t5train.release.export import export
from t5train.release.model_card import loss_curve, read_front_matter

MakeTrained = Callable[..., Any]


@pytest.mark.parametrize(
    ("source", "shown"),
    [("sftp://somebody@host/text/*.txt", "sftp://host/text/*.txt"), ("/home/someone/private/text.jsonl", "text.jsonl")],
)
def test_a_shared_corpus_source_omits_users_and_local_folders(source: str, shown: str) -> None:
    assert shareable_source(source) == shown


def _card(exported: Export) -> str:
    return (exported.path / "README.md").read_text("utf-8")


@pytest.mark.parametrize("loss", [4.5678, 1e-05, 3.0, 1.5e22])
def test_the_front_matter_of_the_card_has_the_recorded_facts(
    make_trained: MakeTrained, tmp_path: Path, loss: float
) -> None:
    trained = make_trained()
    trained.change_witness(validation={"validation_loss": loss, "unigram_content_loss": None})
    exported = export(*trained, tmp_path / "out")
    facts = read_front_matter(_card(exported))["t5_pretrain"]
    assert facts["held_out"] == {"validation_loss": loss, "unigram_content_loss": None}
    assert (facts["step"], facts["run"], facts["lineage"]) == (7, "3" * 64, exported.inputs)
    assert facts["sha256"] == {name: digest.sha256 for name, digest in exported.files.items() if name != "README.md"}


def test_the_card_names_the_starting_model(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    recorded = Witness.load(trained.witness)
    started = recorded.trained.model_copy(update={"start_from": "t5-base"}).model_dump(mode="json")
    trained.change_witness(trained=started, inputs=recorded.inputs | {"start_from": "7" * 64})
    exported = export(*trained, tmp_path / "out")
    card = _card(exported)
    assert "pre-trained starting from the weights of `t5-base` " in card
    assert f"| start_from | `{'7' * 64}` |" in card
    assert exported.inputs["start_from"] == "7" * 64


def test_the_card_states_data_measurements_lineage_training_licence_and_languages(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    card = _card(export(*make_trained("v1.1"), tmp_path / "out"))
    for line in (
        "Trained on `pydocs`",
        "| validation_loss | 4.5678 |",
        *(f"| `{digit * 64}` |" for digit in "01234"),
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


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, {"license": "unknown"}),
        ("CC BY-SA 4.0", {"license": "cc-by-sa-4.0"}),
        ("GPL-3.0+", {"license": "other", "license_name": "gpl-3.0-or-later"}),
        ("Our own, 2026", {"license": "other", "license_name": "our-own-2026"}),
    ],
)
def test_a_licence_that_the_hub_does_not_know_is_stated_as_another_one(
    stated: str | None, expected: dict[str, str]
) -> None:
    assert hub_licence(stated) == expected


def test_every_measurement_of_the_card_is_explained(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained("switch")
    trained.change_witness(validation=dict.fromkeys(MEANINGS, 1.5))
    card = _card(export(*trained, tmp_path / "out"))
    rows = [line for line in card.splitlines() if line.split(" | ")[0].removeprefix("| ") in MEANINGS]
    assert len(rows) == len(MEANINGS)
    assert all(row.rstrip(" |").endswith(".") for row in rows)


NO_BETTER, TOO_SHORT = (
    "This model predicts no better than the unigram baseline.",
    "A trial of 50 optimizer steps is too short",
)


@pytest.mark.parametrize(
    ("loss", "step", "remarks"),
    [(6.4, 7, []), (6.5, 7, [NO_BETTER]), (7.0, 7, [NO_BETTER]), (7.0, 50, [NO_BETTER, TOO_SHORT])],
)
def test_the_card_says_if_the_model_is_no_better_than_word_frequencies_and_if_a_trial_is_too_short(
    make_trained: MakeTrained, tmp_path: Path, loss: float, step: int, remarks: list[str]
) -> None:
    trained = make_trained()
    trained.change_witness(validation={"validation_content_loss": loss, "unigram_content_loss": 6.5}, step=step)
    card = _card(export(*trained, tmp_path / "out"))
    assert [remark for remark in (NO_BETTER, TOO_SHORT) if remark in card] == remarks


@pytest.mark.parametrize(("unknown", "is_warned"), [(9, False), (10, True)])
def test_the_card_warns_of_many_unknown_pieces_and_names_the_characters(
    make_trained: MakeTrained, tmp_path: Path, unknown: int, is_warned: bool
) -> None:
    trained = make_trained("v1.1")
    recorded = Witness.load(trained.witness).trained
    data = {**recorded.data, "unknown_pieces": unknown, "lacked_character_U+003C": 40, "lacked_character_U+4E2D": 50}
    trained.change_witness(trained=recorded.model_copy(update={"data": data}).model_dump(mode="json"))
    card = _card(export(*trained, tmp_path / "out"))
    assert ("of the training split are the unknown piece (10 of 900)" in card) is is_warned
    assert ("'\u4e2d' (U+4E2D) 50 times, '<' (U+003C) 40 times" in card.replace("\\", "")) is is_warned


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
    assert "The licence of this model follows from the one that the text has" in card
    assert read_front_matter(card)["license"] == "unknown"


@pytest.mark.parametrize("version", ["v1.1", "deep decoder"])
def test_the_code_of_the_card_runs(
    make_trained: MakeTrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    exported = export(*make_trained(version), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", _card(exported), re.DOTALL))
    (tmp_path / "card.py").write_text(code.replace("path/to/this/folder", str(exported.path)))
    result = runpy.run_path(str(tmp_path / "card.py"))
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

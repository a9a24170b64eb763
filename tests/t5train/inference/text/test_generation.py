"""Generation equals that of plain transformers."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.inference.model_folder import ModelFolder
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import generate

MakeModel = Callable[..., Path]
TEXT = "The <extra_id_0> of a list is <extra_id_1>."


def _reference(folder: Path, text: str, seed: int = 0, **options: Any) -> str:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    ids = model.generate(**tokenizer(text, return_tensors="pt"), **options)[0]
    pieces: list[str] = tokenizer.convert_ids_to_tokens(ids)
    pieces = [piece for piece in pieces if piece not in ("<pad>", "</s>", None)]
    return str(tokenizer.convert_tokens_to_string(pieces)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1.0", "v1.1", "switch"])
def test_greedy_generation_equals_that_of_transformers(make_model: MakeModel, version: str) -> None:
    folder = make_model(version)
    (result,) = generate(folder, [TEXT], GenerationSpec(max_new_tokens=9))
    assert result.generated == _reference(folder, TEXT, max_new_tokens=9)
    assert (result.text, list(result.spans), result.remarks) == (TEXT, ["<extra_id_0>", "<extra_id_1>"], ())
    assert 1 <= result.new_tokens <= 9


@pytest.mark.parametrize("vocabulary", ["spiece.model", "tokenizer.json"])
def test_the_folders_of_others_are_read_in_several_files_and_with_either_vocabulary(
    make_published: MakeModel, vocabulary: str
) -> None:
    folder = make_published("v1.1", vocabulary)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    (result,) = generate(folder, [TEXT], GenerationSpec(max_new_tokens=9, num_beams=2))
    assert result.generated == _reference(folder, TEXT, max_new_tokens=9, num_beams=2)


def test_sampling_equals_that_of_transformers_with_the_same_seed_for_each_text(make_model: MakeModel) -> None:
    folder = make_model()
    spec = GenerationSpec(max_new_tokens=12, sample=True, temperature=1.5, top_p=0.9, seed=7)
    before = torch.get_rng_state()
    first, second = generate(folder, [TEXT, TEXT], spec)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0}
    assert first.generated == _reference(folder, TEXT, 7, **options)
    (other,) = generate(folder, [TEXT], spec._replace(seed=8))
    assert other.generated != first.generated


def _scripted(monkeypatch: pytest.MonkeyPatch, *preferred: list[str]) -> None:
    """Let the model prefer these pieces at each place, the first one most."""
    load = ModelFolder.load

    def loaded(folder: ModelFolder, *given: Any) -> Any:
        model, tokenizer, places = load(folder, *given), folder.load_tokenizer(), list[list[str]]()

        def begin(*_: object) -> None:
            places[:] = preferred

        def prefer(_module: object, _inputs: object, logits: torch.Tensor) -> None:
            for rank, piece in enumerate(places.pop(0) if places else ["</s>"]):
                logits[..., tokenizer.convert_tokens_to_ids(piece)] = 1e4 - rank

        model.get_encoder().register_forward_hook(begin)
        model.lm_head.register_forward_hook(prefer)
        return model

    monkeypatch.setattr(ModelFolder, "load", loaded)


def test_a_document_end_within_a_gap_does_not_end_the_filling(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets of training hold </s> before their end where a span reaches from one document into the next."""
    _scripted(monkeypatch, ["<extra_id_0>"], ["s"], ["</s>", "<extra_id_1>"], ["t"], ["</s>"])
    (result,) = generate(make_model("v1.1"), [TEXT])
    assert (result.spans, result.generated) == (
        {"<extra_id_0>": "s", "<extra_id_1>": "t"},
        "<extra_id_0>s<extra_id_1>t",
    )
    assert result.remarks == (
        "the model wrote </s>, the end of a document, before the last gap (<extra_id_1>): the text was generated again "
        "without it",
    )


def test_an_output_that_is_cut_has_not_ended(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _scripted(monkeypatch, ["<extra_id_0>"], ["s"], ["</s>"])
    folder = make_model("v1.1")
    for most, ended in ((3, True), (2, False)):
        (result,) = generate(folder, ["a <extra_id_0>"], GenerationSpec(max_new_tokens=most))
        assert (result.new_tokens, result.ended) == (most, ended)


def test_a_gap_that_the_model_never_comes_to_is_remarked(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted(monkeypatch, ["<extra_id_0>"], ["s"], ["</s>", "t"])
    (result,) = generate(make_model("v1.1"), [TEXT], GenerationSpec(max_new_tokens=4))
    assert result.spans == {"<extra_id_0>": "s", "<extra_id_1>": None}
    assert any("the last gap (<extra_id_1>): gaps stay unfilled, also without it" in each for each in result.remarks)


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("no gap", "the text has no <extra_id_0>: a pre-trained T5 fills in gaps"),
        ("a <extra_id_1>", "has the sentinels <extra_id_1>, but the model was trained with <extra_id_0>"),
        ("word " * 40 + "<extra_id_0>", "but the model was trained with at most 32: the result may be poor"),
    ],
)
def test_what_explains_a_poor_result_is_remarked(make_model: MakeModel, text: str, remark: str) -> None:
    (result,) = generate(make_model(), [text], GenerationSpec(max_new_tokens=2))
    assert any(remark in each for each in result.remarks)


def test_texts_are_taken_one_at_a_time(make_model: MakeModel) -> None:
    taken: list[int] = []

    def texts() -> Any:
        for number in range(3):
            taken.append(number)
            yield TEXT

    results = generate(make_model(), texts(), GenerationSpec(max_new_tokens=1))
    next(results)
    assert taken == [0]


def test_loading_is_silent_and_restores_the_settings_of_transformers(
    make_model: MakeModel, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    level = logging.getLogger("transformers").level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(generate(make_model("v1.1"), ["word " * 600], GenerationSpec(max_new_tokens=1)))
    assert "tied weights" not in capfd.readouterr().err
    assert not caplog.records
    assert logging.getLogger("transformers").level == level

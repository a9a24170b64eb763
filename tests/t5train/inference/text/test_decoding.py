"""A batch is decoded as plain transformers decodes its sources one by one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from t5train.inference.model_folder import ModelFolder
from t5train.inference.text.decoding import Decoder, GenerationSpec, Hypothesis

MOST = 12
NEAR_TIE = 1e-5
"""Where two scores are this close, a batch may choose otherwise than a source alone: it is rounded otherwise."""
SOURCES = [" ".join(text.split()[: 3 + number % 17]) for number, text in enumerate(list(topics.values())[:40])]


class Plain:
    """The script that people write: one source at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def generate(self, source: str, num_beams: int) -> tuple[str, float]:
        """Return the text, and how close the best alternative came: of a token if greedy, else of the whole."""
        inputs = self._tokenizer(source, return_tensors="pt")
        options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": MOST}
        found = self._model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
        scores = torch.cat(found.scores) if num_beams == 1 else found.sequences_scores[None]
        best = scores.topk(2).values
        gap = (best[:, 0] - best[:, 1]) / scores.abs().amax(1)
        return str(self._tokenizer.decode(found.sequences[0], skip_special_tokens=True)), float(gap.min())


@pytest.mark.parametrize(
    ("num_beams", "sources"), [(1, SOURCES[:20]), pytest.param(4, SOURCES, marks=pytest.mark.slow)]
)
def test_a_batch_is_decoded_as_plain_transformers_decodes_each_source_alone(
    model: Path, num_beams: int, sources: list[str], record_property: Callable[[str, object], None]
) -> None:
    plain = Plain(model)
    found = Decoder(ModelFolder.open(model), "cpu").decode(sources, GenerationSpec(MOST, num_beams=num_beams))
    alone = [plain.generate(source, num_beams) for source in sources]
    differing = {ours.text: theirs for ours, theirs in zip(found, alone, strict=True) if ours.text != theirs[0]}
    record_property("near ties", f"{len(differing)} of {len(sources)}")
    assert not {text: theirs for text, theirs in differing.items() if theirs[1] > NEAR_TIE}
    assert len(differing) <= 1
    assert {each.ended for each in found} == {True, False}
    assert all(each.tokens == MOST for each in found if not each.ended)


def test_tokens_count_eos_and_not_the_padding_after_it(model: Path) -> None:
    decoder = Decoder(ModelFolder.open(model), "cpu")
    ended = next(each for each in decoder.decode(SOURCES, GenerationSpec(MOST)) if each.ended and each.tokens < MOST)
    source = SOURCES[decoder.decode(SOURCES, GenerationSpec(MOST)).index(ended)]
    assert decoder.decode([source], GenerationSpec(ended.tokens)) == [ended]
    (cut,) = decoder.decode([source], GenerationSpec(ended.tokens - 1))
    assert cut == Hypothesis(ended.text, ended.tokens - 1, ended=False)


def test_sampling_a_batch_again_gives_the_same_and_another_seed_does_not(model: Path) -> None:
    decoder, spec = Decoder(ModelFolder.open(model), "cpu"), GenerationSpec(MOST, sample=True, temperature=2.0, seed=3)
    first = decoder.decode(SOURCES[:4], spec)
    assert decoder.decode(SOURCES[:4], spec) == first
    assert decoder.decode(SOURCES[:4], spec._replace(seed=4)) != first


@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_decoder_may_have_more_layers_than_the_encoder(model: Path, tmp_path: Path, num_beams: int) -> None:
    folder = tmp_path / "deep"
    shutil.copytree(model, folder)
    config = AutoConfig.from_pretrained(folder, num_layers=1, num_decoder_layers=3)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    found = Decoder(ModelFolder.open(folder), "cpu").outputs(SOURCES[:4], GenerationSpec(3, num_beams=num_beams))
    plain: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(SOURCES[:4], return_tensors="pt", padding=True)
    without_cache = plain.generate(**inputs, max_new_tokens=3, num_beams=num_beams, use_cache=False)
    assert [each.ids for each in found] == without_cache[:, 1:].tolist()


@pytest.fixture
def ending(model: Path, tmp_path: Path) -> Path:
    """The same model, most of whose hypotheses end before the most tokens."""
    folder = tmp_path / "ending"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][1] *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _decoded(folder: Path) -> tuple[list[Hypothesis], list[int]]:
    """Return the hypotheses of a batch, and how many rows each step of the decoder computed."""
    decoder, rows = Decoder(ModelFolder.open(folder), "cpu"), list[int]()
    layers: Any = decoder._model.decoder
    layers.register_forward_hook(lambda _, __, found: rows.append(len(found.last_hidden_state)))
    return decoder.decode(SOURCES, GenerationSpec(MOST)), rows


def test_rows_that_ended_leave_their_batch_once_they_are_half_of_it(ending: Path) -> None:
    found, rows = _decoded(ending)
    ends = sorted(each.tokens for each in found)
    half, three_quarters = ends[len(ends) // 2 - 1], ends[len(ends) * 3 // 4 - 1]
    going = len([each for each in ends if each > half])
    assert rows[: half + 1] == [len(SOURCES)] * half + [going]
    assert rows[three_quarters] <= going // 2
    plain = Plain(ending)
    assert [each.text for each in found] == [plain.generate(source, 1)[0] for source in SOURCES]


@pytest.mark.parametrize("setting", [{"min_new_tokens": 2}, {"begin_suppress_tokens": [5]}, {"use_cache": False}])
def test_a_batch_is_not_stopped_where_settings_of_its_model_count_from_its_start(
    ending: Path, setting: dict[str, object]
) -> None:
    config = json.loads((ending / "generation_config.json").read_text())
    (ending / "generation_config.json").write_text(json.dumps(config | setting))
    assert {*_decoded(ending)[1]} == {len(SOURCES)}

"""The comparisons of a certificate: each one detects its difference by itself."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.model_comparison import (
    compare_generation,
    compare_logits,
    differing_probes,
    differing_settings,
    differing_ties,
    differing_tokenizer,
)

MakeExport = Callable[..., Export]


def test_logits_must_be_bit_equal_unless_a_tolerance_is_given_and_always_finite() -> None:
    logits = torch.linspace(-5, 5, 24).reshape(1, 4, 6)
    near = {"probe": compare_logits(logits * (1 + 1e-6), logits)}
    assert differing_probes(near, 0.0)
    assert not differing_probes(near, 1e-3)
    assert differing_probes({"probe": compare_logits(torch.zeros(1, 1, 2), -torch.zeros(1, 1, 2))}, 0.0)
    for other in (logits + 1, logits * torch.nan, logits[:, :2]):
        assert differing_probes({"probe": compare_logits(other, logits)}, 1e-3)
    for value in (torch.nan, torch.inf):
        reproduced = compare_logits(torch.full((1, 2, 3), value), torch.full((1, 2, 3), value))
        assert reproduced.bit_equal
        (found,) = differing_probes({"probe": reproduced}, 0.0)
        assert "not finite" in found


def test_missing_and_unwanted_ties_are_reported_separately(make_export: MakeExport) -> None:
    exported = make_export("v1.1", certified=False)
    witness = Witness.load(exported.path.parent / "witness")
    model = AutoModelForSeq2SeqLM.from_pretrained(exported.path)
    assert not differing_ties(model, witness)
    model.decoder.embed_tokens.weight = torch.nn.Parameter(model.shared.weight.clone())
    model.lm_head.weight = model.shared.weight
    assert differing_ties(model, witness) == [
        "decoder.embed_tokens.weight is not tied to shared.weight",
        "lm_head.weight is tied to shared.weight, but must not be",
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda document: (document["model"]["vocab"].pop(), document["added_tokens"].pop()),
            "the tokenizer has 399 ids",
        ),
        (lambda document: document.update(post_processor=None), "does not end a text with a single </s>"),
        (lambda document: document["pre_tokenizer"].update(type="Whitespace"), "held-out passages have other ids"),
        (lambda document: document.update(normalizer={"type": "Lowercase"}), "held-out passages have other ids"),
        (lambda document: document["decoder"].update(replacement="_"), "are decoded to another text"),
    ],
)
def test_a_changed_tokenizer_is_detected_by_its_ids_and_text_alone(
    make_export: MakeExport, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    exported = make_export(certified=False)
    path = exported.path / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.unlink()
    path.write_text(json.dumps(document))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    witness = Witness.load(exported.path.parent / "witness")
    assert re.search(complaint, "; ".join(differing_tokenizer(tokenizer, exported.path / "spiece.model", witness)))


@pytest.mark.parametrize("version", ["v1.1", "switch"])
@pytest.mark.parametrize(
    "changes", [{"decoder_start_token_id": 5}, {"forced_bos_token_id": 7}, {"suppress_tokens": "the first"}]
)
def test_settings_that_change_the_generated_text_are_detected_by_generating(
    make_export: MakeExport, version: str, changes: dict[str, Any]
) -> None:
    exported = make_export(version, certified=False)
    folder = exported.path.parent / "witness"
    witness, model = Witness.load(folder), AutoModelForSeq2SeqLM.from_pretrained(exported.path)
    comparison, found = compare_generation(model, witness, folder, "cpu", 1e-5)
    assert not found
    assert comparison.tokens_compared
    if "suppress_tokens" in changes:
        first = load_file(folder / "witness.safetensors")["heldout.generated"][:, 1]
        changes = {"suppress_tokens": sorted(set(first.tolist()))}
    model.generation_config.update(**changes)
    (difference,) = compare_generation(model, witness, folder, "cpu", 1e-5)[1]
    assert difference.startswith("generated differently: ")
    assert any("generation configuration differs" in each for each in differing_settings(model, witness))


def test_text_of_a_decoder_with_more_layers_than_the_encoder_is_compared(make_export: MakeExport) -> None:
    exported = make_export("deep decoder", certified=False)
    folder = exported.path.parent / "witness"
    model = AutoModelForSeq2SeqLM.from_pretrained(exported.path)
    comparison, found = compare_generation(model, Witness.load(folder), folder, "cpu", 1e-5)
    assert not found
    assert comparison.tokens_compared


def test_a_generated_token_may_differ_only_where_the_margin_is_tiny(make_export: MakeExport) -> None:
    exported = make_export(certified=False)
    folder = exported.path.parent / "witness"
    witness, model = Witness.load(folder), AutoModelForSeq2SeqLM.from_pretrained(exported.path)
    tensors = load_file(folder / "witness.safetensors")
    tensors["heldout.generated"][0, 3] += 1
    for margin, differs in [(1e-6, False), (1e-3, True)]:
        tensors["heldout.margins"][0, 2] = margin
        save_file(tensors, folder / "witness.safetensors")
        assert bool(compare_generation(model, witness, folder, "cpu", 0.0)[1]) is differs

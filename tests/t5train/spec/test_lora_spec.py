"""LoRA is refused where it has no model, no pairs or no optimizer that fits; projections are named."""

import re
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import SpecError
from t5train.spec.recipes import recipe, smoke

PAGE = Path(__file__).parents[3] / "docs/how-to/pairs.md"
LORA: dict[str, Any] = {
    "pairs.train": ["a.jsonl"],
    "model.start_from": "/models/t5",
    "optimizer.kind": "adamw",
    "finetune.lora.rank": 8,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pairs.train": []}, "LoRA is for fine-tuning: name pairs to train on"),
        ({"model.start_from": None}, "model.start_from is not set: set it"),
        ({"optimizer.kind": "adamw-rms"}, "set optimizer.kind=adamw"),
        ({"finetune.lora.targets": "q,wi_2"}, "has 'wi_2': name projections of a T5, .*did you mean 'wi_"),
        ({"finetune.lora.targets": "q,q"}, "has 'q' more than once"),
        ({"finetune.lora.targets": "q,wi"}, "has 'wi', but this model has wi_0 and wi_1"),
        ({"finetune.lora.targets": "wi_1", "model.version": "v1.0"}, "has 'wi_1', but this model has wi in"),
        ({"finetune.lora.rank": None, "finetune.lora.alpha": 32}, "finetune.lora.rank is not: set it"),
    ],
)
def test_what_lora_cannot_do_is_refused_with_a_remedy(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        smoke().with_settings(LORA | changed)


def test_the_settings_of_the_pages_command_are_possible() -> None:
    command = re.search(r"finetune (\S+) --root .*\n.*finetune\.lora\.rank.*", PAGE.read_text())
    assert command
    settings = dict(re.findall(r"--set (\S+?)=(\S+)", command[0]))
    assert recipe(command[1]).with_settings(settings | {"pairs.train": ["a.jsonl"]}).finetune.lora.rank == 16


def test_targets_may_be_one_text() -> None:
    spec = smoke().with_settings(LORA | {"finetune.lora.targets": "q, k,wo"})
    assert spec.finetune.lora.targets == ("q", "k", "wo")
    assert spec.finetune.lora.scaling == 2


@pytest.mark.parametrize("name", ["lora_rank", "lora.rank"])
def test_settings_are_found_by_their_names_elsewhere(name: str) -> None:
    with pytest.raises(SpecError, match=r"did you mean 'finetune\.lora\.rank'"):
        smoke().with_settings({name: 8})

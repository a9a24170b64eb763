"""Deployed runs that start from a model on the Hub: an mT5 in several files, with a vocabulary like mT5's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MT5Config, MT5ForConditionalGeneration

from tests.support.hub_models import START, model_hub, prepared_site, printed_by
from tests.support.hub_server import Hub
from tests.support.mt5_vocabulary import write_mt5_vocabulary

SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
ROWS = 512
SETTLE = """
import json, sys
from pathlib import Path

from flows.run_parameters import RunParameters
from infra.head.preflight.remote_starts import complete_start
from t5train.errors import T5TrainError
from t5train.model.model_shape import resolve as resolve_shape
from t5train.records.start_copy import origin
from t5train.model.starting_model import start_fingerprint, start_name, tensors_of
from t5train.progress import silent

recipe, settings, root = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
try:
    spec = RunParameters(recipe=recipe, root=root, deployed_settings=settings).spec_for_this_machine()
    folder = Path(spec.model.start_from)
    before = sorted(path.name for path in folder.glob("*.safetensors"))
    complete_start(spec, silent)
    found = {
        "is_vocabulary": spec.tokenizer.path == str(folder),
        "before": before,
        "name": start_name(spec.model),
        "origin": origin(folder),
        "fingerprint": start_fingerprint(spec.model),
        "tensors": len(tensors_of(spec.model, resolve_shape(spec.model, 512))),
    }
except T5TrainError as error:
    found = {"error": str(error)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def mt5(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("mt5")
    torch.manual_seed(0)
    model = MT5ForConditionalGeneration(MT5Config(vocab_size=ROWS, **SIZES))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.save_pretrained(folder, max_shard_size="60KB")
    write_mt5_vocabulary(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, mt5: dict[str, bytes]) -> Iterator[Hub]:
    modules = ["flows.run_parameters", "infra.head.preflight.remote_starts"]
    with (
        prepared_site(tmp_path_factory.mktemp("python"), modules) as (site, python),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "executable", python)
        with site.serving(model_hub(mt5)) as hub:
            yield hub


def settled(hub: Hub, root: Path, recipe: str = "reverse_and_sort", **changes: object) -> dict[str, object]:
    model = {f"model.{name}": size for name, size in SIZES.items()} | {"model.version": "v1.1"}
    settings = json.dumps(model | {"model.start_from": START} | changes)
    found: dict[str, object] = json.loads(printed_by(SETTLE, hub, root, recipe, settings, str(root)))
    return found


@pytest.mark.parametrize("recipe", ["reverse_and_sort", "smoke"])
def test_an_mt5_of_the_hub_gives_its_vocabulary_and_its_weights_come_after_the_checks(
    hub: Hub, tmp_path: Path, recipe: str
) -> None:
    found = settled(hub, tmp_path, recipe)
    assert "error" not in found, found
    assert found["is_vocabulary"]
    assert found["before"] == []
    assert (found["name"], found["origin"]) == (f"someone/t5@{hub.main}", f"{START}@{hub.main}")
    assert found["tensors"] == len(MT5ForConditionalGeneration(MT5Config(vocab_size=ROWS, **SIZES)).state_dict()) - 2


def test_settings_of_another_model_are_refused_before_weights_are_copied(hub: Hub, tmp_path: Path) -> None:
    said = str(settled(hub, tmp_path, **{"model.d_ff": 64})["error"])
    assert "d_ff: 64 -> 32" in said
    assert "model.d_ff=32" in said
    assert not list(tmp_path.rglob("*.safetensors"))

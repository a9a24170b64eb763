"""The public functions of t5train, as docs/reference/stages.md shows them."""

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import t5train
from t5train.inference.text.evaluation import EvaluationSpec
from t5train.records.witness import Witness

STAGES = Path(__file__).parents[2] / "docs/reference/stages.md"
SMALLER = {
    "tokenizer.vocab_size": 300,
    "shards.shard_tokens": 10_000,
    "model.d_model": 32,
    "model.d_ff": 64,
    "objective.input_tokens": 32,
    "optimizer.num_steps": 20,
    "optimizer.warmup_steps": 5,
    "optimizer.global_batch_sequences": 8,
    "layout.micro_batch_sequences": 4,
    "storage.checkpoint_every_steps": 10,
    "storage.validate_every_steps": 10,
    "storage.validate_sequences": 16,
    "cluster.ranks": 1,
}


def test_importing_the_api_does_not_import_torch_or_pydantic(run_python: Callable[..., CompletedProcess[str]]) -> None:
    loaded = run_python("import sys, t5train; print(*sys.modules); print(dir(t5train))").stdout
    assert not {"torch", "pydantic", "fsspec", "t5train.errors"} & set(loaded.split())
    assert "'build_corpus'" in loaded


@pytest.mark.parametrize("name", [name for name in t5train.__all__ if name != "T5TrainError"])
def test_every_public_function_documents_its_parameters_result_and_errors(name: str) -> None:
    found: Any = getattr(t5train, name)
    described = inspect.getdoc(found) or ""
    for parameter in inspect.signature(found).parameters:
        assert re.search(rf"^    {parameter}: ", described, re.MULTILINE), parameter
    assert "\nReturns:\n" in described
    assert "\nRaises:\n" in described


def test_an_unknown_name_of_the_api_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'build_model'"):
        _ = t5train.build_model  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_documented_example_publishes_a_model(tmp_path: Path, quick_workers: None) -> None:
    """Run the example as it is written, except for a smaller model on one rank and other paths."""
    (tmp_path / "notes.txt").write_text("".join(f"The note {n} is about {n * n} things.\n" for n in range(2000)))
    _, _, section = STAGES.read_text("utf-8").partition("## From Python")
    code = section.partition("```python\n")[2].partition("```")[0]
    code = code.replace('"/data/', f'"{tmp_path}/').replace(
        't5train.recipe("smoke", {', f't5train.recipe("smoke", {SMALLER} | {{'
    )
    (tmp_path / "example.py").write_text(code)
    result = runpy.run_path(str(tmp_path / "example.py"))
    assert t5train.verify(tmp_path / "published").fingerprint == result["publication"].fingerprint
    assert t5train.load_run_spec(result["run_folder"]) == result["spec"]
    recorded = Witness.load(result["run_folder"] / "witness").validation
    for split in ("validation", "test"):
        asked = EvaluationSpec(split=split, max_sequences=recorded[f"{split}_sequences"])
        found = t5train.evaluate(tmp_path / "published", str(tmp_path / "notes.txt"), asked)
        assert found.split_as_trained
        assert found.loss == pytest.approx(recorded[f"{split}_content_loss"], rel=1e-5)
        assert found.all_targets_loss == pytest.approx(recorded[f"{split}_loss"], rel=1e-5)
    (tmp_path / "notes.txt").rename(tmp_path / "other name.txt")
    asked = EvaluationSpec(split="test", max_sequences=1)
    assert not t5train.evaluate(tmp_path / "published", str(tmp_path / "other name.txt"), asked).split_as_trained
    (filled,) = t5train.generate(tmp_path / "published", ["The note <extra_id_0> is about 4 things."])
    assert filled.spans.keys() == {"<extra_id_0>"}

"""An export of a random model, and pairs of its two tasks to evaluate it on."""

import json
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from t5train.evaluation.export_evaluation import evaluate_export
from t5train.records.stage_records import Export, Pairs
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.made_pairs import made_pairs
from tests.support.synthetic_models import OF_PAIRS, Trained, make_trained

SETTINGS = {"evaluate.max_pairs": 6, "evaluate.max_new_tokens": 5}
NUM_PAIRS = {"validation": 5, "test": 4}


class Evaluable(NamedTuple):
    """What ``evaluate_export`` takes."""

    export: Export
    pairs: Pairs
    spec: RunSpec
    witness: Path

    def evaluate(self, **settings: object) -> Export:
        """Evaluate the export as it is in its folder."""
        changed = self.spec.with_settings({f"evaluate.{name}": value for name, value in settings.items()})
        return evaluate_export(Export.load(self.export.path), self.pairs, changed, self.witness)


def held_out_pairs(folder: Path) -> Pairs:
    random = Random(0)

    def pairs(prefix: str, count: int) -> list[tuple[str, str]]:
        words = (" ".join(random.choices(["name", "list", "of", "the", "value", "漢"], k=4)) for _ in range(count))
        return [(prefix + text, text[::-1]) for text in words]

    tasks = {each["task"]: each["prefix"] for each in OF_PAIRS["tasks"]}
    made = {task: {split: pairs(prefix, n) for split, n in NUM_PAIRS.items()} for task, prefix in tasks.items()}
    found = made_pairs(folder, made)
    (folder / "tasks.json").write_text(json.dumps(OF_PAIRS["tasks"]))
    return found.model_copy(update={"counts": {f"{split}_pairs": 2 * n for split, n in NUM_PAIRS.items()}})


def evaluable(folder: Path, version: str = "pairs") -> Evaluable:
    trained: Trained = make_trained(folder, version)
    spec = trained.spec.with_settings({"storage.root": str(folder / "root"), **SETTINGS})
    made = export(trained.weights, trained.tokenizer, trained.witness, trained.spec, folder / "run/export")
    return Evaluable(made, held_out_pairs(folder / "pairs"), spec, trained.witness)


@pytest.fixture
def of_pairs(tmp_path: Path) -> Evaluable:
    """An export of a run on pairs, not yet evaluated."""
    return evaluable(tmp_path)

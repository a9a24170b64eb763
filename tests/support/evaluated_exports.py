"""Exports of a random model, and pairs of its two tasks to evaluate it on."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from t5train.data.worker_processes import Advance, Json
from t5train.inference.evaluation.export_evaluation import evaluate_export
from t5train.inference.predict.prediction_worker import predict_parts
from t5train.records.stage_records import Export, Pairs
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.made_pairs import made_pairs
from tests.support.synthetic_models import OF_PAIRS, make_trained

SETTINGS = {"evaluate.max_pairs": 6, "evaluate.max_new_tokens": 5}
NUM_PAIRS = {"validation": 5, "test": 4}
TASKS = list(OF_PAIRS["tasks"])


class Evaluable(NamedTuple):
    """What ``evaluate_export`` takes."""

    folder: Path
    pairs: Pairs
    spec: RunSpec
    run: Path

    @property
    def export(self) -> Export:
        """The export as it is in its folder now."""
        return Export.load(self.folder)

    def evaluate(self, **settings: Any) -> Export:
        """Evaluate the export, with other settings of evaluate if any are given."""
        changed = self.spec.with_settings({f"evaluate.{name}": value for name, value in settings.items()})
        return evaluate_export(self.export, self.pairs, changed, self.run)


def held_out_pairs(folder: Path) -> Pairs:
    random = Random(0)

    def pairs(prefix: str, count: int) -> list[tuple[str, str]]:
        texts = [" ".join(random.choices(["name", "list", "of", "the", "value", "漢"], k=4)) for _ in range(count)]
        return [(prefix + text, text[::-1]) for text in texts]

    made = {each["task"]: {split: pairs(each["prefix"], n) for split, n in NUM_PAIRS.items()} for each in TASKS}
    found = made_pairs(folder, made)
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    return found.model_copy(update={"counts": {f"{split}_pairs": 2 * n for split, n in NUM_PAIRS.items()}})


def predict_here(_: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
    """Predict in this process, which has imported everything already."""
    for job in jobs:
        yield predict_parts(job, advance)


def evaluable(folder: Path, version: str = "pairs") -> Evaluable:
    """Make an export below a folder."""
    trained = make_trained(folder, version)
    export(trained.weights, trained.tokenizer, trained.witness, trained.spec, folder / "run/export")
    return evaluable_in(folder, trained.spec, held_out_pairs(folder / "pairs"))


def evaluable_in(folder: Path, spec: RunSpec, pairs: Pairs) -> Evaluable:
    changed = spec.with_settings({"storage.root": str(folder / "root"), **SETTINGS})
    return Evaluable(
        folder / "run/export", pairs.model_copy(update={"path": folder / "pairs"}), changed, folder / "run"
    )

"""An export predicts held-out pairs, and gets the predictions, their metrics, and a card that states them."""

import json

from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from t5train.predict.predictions import read_predictions
from t5train.records.stage_records import Export
from t5train.release.model_card import read_front_matter
from tests.t5train.evaluation.conftest import Evaluable

FILES = {"evaluation/metrics.json", "evaluation/predictions.jsonl"}
PREDICTIONS = "evaluation/predictions.jsonl"


def metrics_of(exported: Export) -> dict:
    return json.loads((exported.path / "evaluation/metrics.json").read_text())


def test_predictions_of_each_split_and_task_are_in_the_export_and_its_manifest(of_pairs: Evaluable) -> None:
    made = of_pairs.evaluate()
    assert made.files.keys() - of_pairs.export.files.keys() == FILES
    assert Export.load(made.path) == made
    made.verify()
    rows = list(read_predictions(made.path / PREDICTIONS))
    found = [row.id.rpartition("/")[0] for row in rows]
    assert found == [
        f"{split}/{task}"
        for split in ("validation", "test")
        for task in ("reverse_digits", "sort_digits")
        for _ in range(3)
    ]
    assert all(row.source.startswith("order: ") == (row.task == "sort_digits") for row in rows)


def test_the_card_has_metrics_that_the_hub_accepts(of_pairs: Evaluable) -> None:
    made = of_pairs.evaluate()
    card = (made.path / "README.md").read_text("utf-8")
    name, results = model_index_to_eval_results(read_front_matter(card)["model-index"])
    assert name == "made"
    assert {(each.dataset_type, each.dataset_split) for each in results} == {
        (task, split) for task in ("reverse_digits", "sort_digits") for split in ("validation", "test")
    }
    groups = {(each["task"], each["split"]): each["systems"]["model"] for each in metrics_of(made)["groups"]}
    assert {each.metric_type for each in results} == {"exact_match", "chrf", "bleu", "rouge"}
    for each in results:
        metric = "rougeL" if each.metric_type == "rouge" else each.metric_type
        assert each.metric_value == groups[each.dataset_type, each.dataset_split][metric]["value"]
    assert ModelCard(card).data.eval_results == results
    assert "6 of the 10 pairs of the validation split and 6 of the 8 pairs of the test split" in card

"""Metrics of predictions stand beside those of baselines, and what limits them is counted."""

import pytest

from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.inference.evaluation.held_out_metrics import EXAMPLES, measure
from t5train.inference.predict.predictions import Prediction
from t5train.progress import silent
from t5train.records.evaluation_metrics import GroupMetrics
from tests.support.synthetic_models import _tokenizer

PREFIXES = {"echo": "echo: ", "next": "next: "}
PAIRS = {"echo": [("a", "a"), ("b", "b"), ("c", "x"), ("d", "d")], "next": [("a", "b"), ("c", "d")]}


def predictions(split: str, hypotheses: str, tasks: tuple[str, ...] = ("echo", "next")) -> list[Prediction]:
    """Predictions for PAIRS; the hypotheses are single letters."""
    pairs = [(task, source, target) for task in tasks for source, target in PAIRS[task]]
    return [
        Prediction(
            id=f"{split}/{task}/{number}",
            task=task,
            source=PREFIXES[task] + source,
            reference=target,
            hypothesis=hypothesis,
            tokens=1,
            ended=hypothesis != "a",
        )
        for number, ((task, source, target), hypothesis) in enumerate(zip(pairs, hypotheses, strict=True))
    ]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(_tokenizer(tmp_path_factory.mktemp("vocabulary")).path)


def exact_matches(group: GroupMetrics) -> dict[str, float]:
    return {system: metrics["exact_match"].value for system, metrics in group.systems.items()}


def test_baselines_are_those_of_a_copied_source_and_of_another_pairs_prediction(vocabulary: Tokenizer) -> None:
    model, start = predictions("test", "bbxdbd"), predictions("test", "aaaabd")
    whole, echo, following = measure(model, start, PREFIXES, vocabulary, only_exact=True).groups
    assert [each.task for each in (whole, echo, following)] == [None, "echo", "next"]
    assert exact_matches(echo) == {"model": 75.0, "start": 25.0, "copy": 75.0, "shuffled": 0.0}
    assert exact_matches(following) == {"model": 100.0, "start": 100.0, "copy": 0.0, "shuffled": 0.0}
    assert exact_matches(whole) == {"model": 83.3333, "start": 50.0, "copy": 50.0, "shuffled": 0.0}


def test_splits_are_measured_apart_and_a_single_task_is_not_repeated_as_all(vocabulary: Tokenizer) -> None:
    rows = predictions("validation", "abxd", ("echo",)) + predictions("test", "bbbb", ("echo",))
    found = measure(rows, [], PREFIXES, vocabulary)
    assert [(each.split, each.task, each.systems["model"]["exact_match"].value) for each in found.groups] == [
        ("validation", "echo", 100.0),
        ("test", "echo", 25.0),
    ]
    assert found.signatures["bleu"].startswith("nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp")
    for metrics in found.groups[1].systems.values():
        for metric in metrics.values():
            assert 0 <= (metric.low or 0) <= (metric.high or 0) <= 100


def test_cut_off_predictions_and_references_with_unknown_pieces_are_counted(vocabulary: Tokenizer) -> None:
    rows = predictions("test", "aaxd", ("echo",))
    rows[0] = rows[0].model_copy(update={"reference": "\u6f22\u5b57\u8a9e"})
    (group,) = measure(rows, [], PREFIXES, vocabulary, only_exact=True).groups
    assert (group.pairs, group.not_ended, group.unknown) == (4, 2, 1)


def test_examples_are_of_the_test_split_and_of_each_task_in_turn(vocabulary: Tokenizer) -> None:
    rows = predictions("validation", "aaaaaa") + predictions("test", "bbbbbb")
    examples = measure(rows, [], PREFIXES, vocabulary, only_exact=True).examples
    assert {each.split for each in examples} == {"test"}
    assert [each.task for each in examples] == ["echo", "next", "echo", "next", "echo", "echo"]
    many = [row.model_copy(update={"hypothesis": "b" * 1000}) for row in rows * 4]
    shown = measure(many, [], PREFIXES, vocabulary, only_exact=True, progress=silent).examples
    assert len(shown) == EXAMPLES
    assert {len(each.hypothesis) for each in shown} == {300}

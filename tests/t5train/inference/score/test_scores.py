"""Scores are those of the command lines of sacrebleu and rouge-score, and the bootstrap is sacrebleu's."""

import csv
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5train.errors import InputError
from t5train.inference.predict.predictions import Prediction
from t5train.inference.score import resampling
from t5train.inference.score.scores import Scores, ScoreSpec, compare, score

MakeRows = Callable[..., list[Prediction]]
QUICK = ScoreSpec(resamples=10)
WORDS = "the cat sat on a mat today \u2013 Größe ändern jetzt ! (don't) 猫 座った 3.5% , . „yes“ it is fine ¿no? x̂"


def prediction(number: int, hypothesis: str, reference: str | None, task: str | None = None) -> Prediction:
    texts = {"source": f"s {number}", "reference": reference, "hypothesis": hypothesis}
    return Prediction(id=str(number), task=task, **texts, tokens=1, ended=True)


@pytest.fixture
def make_rows() -> MakeRows:
    """``make_rows(kept)``: rows of two tasks, whose hypotheses keep this share of the words of the same references.

    Some hypotheses are empty.
    """

    def make(kept: float) -> list[Prediction]:
        words, errors = random.Random(1), random.Random(kept)
        made = []
        for number in range(40):
            reference = words.choices(WORDS.split(), k=words.randint(4, 14))
            hypothesis = [each if errors.random() < kept else errors.choice(WORDS.split()) for each in reference]
            task = "en-de" if number % 3 else "en-ja"
            made.append(prediction(number, " ".join(hypothesis) * (number % 17 != 7), " ".join(reference), task))
        return made

    return make


def of_task(rows: Sequence[Prediction], task: str | None) -> list[Prediction]:
    return [row for row in rows if task is None or row.task == task]


def found(scores: Scores, metric: str, task: str | None = None) -> Any:
    (each,) = (each for each in scores.scores if (each.metric, each.task) == (metric, task))
    return each


def run_module(*words: str) -> str:
    environment = os.environ | {"PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=True, env=environment, encoding="utf-8"
    ).stdout


def write_lines(path: Path, lines: Sequence[str | None], end: str = "\n") -> str:
    path.write_text("".join(f"{line}{end}" for line in lines), "utf-8", newline="")
    return str(path)


@pytest.mark.parametrize(("task", "tokenizer"), [(None, "13a"), (None, "intl"), ("en-ja", "13a")])
def test_bleu_and_chrf_and_their_intervals_and_signatures_are_those_of_sacrebleus_command_line(
    make_rows: MakeRows, tmp_path: Path, task: str | None, tokenizer: str
) -> None:
    rows = make_rows(0.8)
    scores = score(rows)
    references = write_lines(tmp_path / "references", [row.reference for row in of_task(rows, task)])
    hypotheses = write_lines(tmp_path / "hypotheses", [row.hypothesis for row in of_task(rows, task)])
    options = ("-m", "bleu", "chrf", "--confidence", "-tok", tokenizer, "-w", "8", "-f", "json")
    expected = json.loads(run_module("sacrebleu", references, "-i", hypotheses, *options))
    for name, theirs in zip(("bleu" if tokenizer == "13a" else "bleu_intl", "chrf"), expected, strict=True):
        ours = found(scores, name, task)
        assert ours.score == pytest.approx(theirs["score"], abs=1e-7)
        assert ours.mean == pytest.approx(theirs["confidence_mean"], rel=1e-6)
        assert ours.half_interval == pytest.approx(theirs["confidence_var"], rel=1e-5)
        assert ours.signature == theirs["signature"]


def test_p_values_are_those_of_sacrebleus_paired_bootstrap(make_rows: MakeRows, tmp_path: Path) -> None:
    systems = make_rows(0.8), make_rows(0.7)
    found = compare(*systems)
    references = write_lines(tmp_path / "references", [row.reference for row in systems[0]])
    files = [
        write_lines(tmp_path / f"system{number}", [row.hypothesis for row in rows])
        for number, rows in enumerate(systems)
    ]
    printed = run_module("sacrebleu", references, "-i", *files, "-m", "bleu", "chrf", "-pbs", "-f", "text", "-q", "-nc")
    expected = [float(each) for each in re.findall(r"\(p = ([\d.]+)\)", printed)]
    tests = {each.metric: each for each in found.tests if each.task is None}
    assert [round(tests[name].p_value, 4) for name in ("bleu", "chrf")] == expected
    assert 0.0011 < expected[0] < 0.9
    other = {each.metric: each for each in found.other.scores if each.task is None}
    for name, test in tests.items():
        assert test.difference == pytest.approx(other[name].score - test.baseline)


def test_rouge_is_that_of_rouge_scores_command_line_also_of_several_lines(make_rows: MakeRows, tmp_path: Path) -> None:
    several = [
        ("a cat sat\nit was red", "it was\n\na red cat sat"),
        ("b\na", "a\nb"),
        ("one", "one\ntwo"),
        ("", "x\ny"),
        ("two cats", "two cat"),  # equal for rouge-score if it stemmed words
    ]
    rows = [*make_rows(0.8), *(prediction(1000 + n, *texts) for n, texts in enumerate(several))]
    scores = score(rows, QUICK)
    options = {
        "target_filepattern": write_lines(tmp_path / "references", [row.reference for row in rows], "\x1e"),
        "prediction_filepattern": write_lines(tmp_path / "hypotheses", [row.hypothesis for row in rows], "\x1e"),
        "output_filename": str(tmp_path / "scores.csv"),
        "rouge_types": "rouge1,rouge2,rougeL,rougeLsum",
        "delimiter": "\x1e",
    }
    run_module("rouge_score.rouge", "--noaggregate", *(f"--{name}={value}" for name, value in options.items()))
    with open(tmp_path / "scores.csv", encoding="utf-8") as file:
        theirs = list(csv.DictReader(file))
    assert len(theirs) == len(rows)
    for name in options["rouge_types"].split(","):
        expected = 100 * np.mean([float(row[f"{name}-F"]) for row in theirs])
        assert found(scores, name).score == pytest.approx(expected, abs=1e-4)
    assert found(scores, "rougeLsum").score > found(scores, "rougeL").score + 0.1


@pytest.mark.parametrize(
    ("hypothesis", "reference", "exact", "f1"),
    [
        (" The cat.\n", "The cat.", 100, 100),
        ("The Cat.", "The cat.", 0, 100),
        ("the cat", "cat", 0, 100),
        ("cat dog dog", "dog, a cat an dog bird", 0, 100 * 6 / 7),
        ("", "the", 0, 100),
        ("", "cat", 0, 0),
        ("the theory", "theory", 0, 100),
        ("don't", "dont", 0, 100),
        ("größe", "Größe \u2013", 0, 100 * 2 / 3),
    ],
)
def test_exact_match_and_token_f1_of_a_row(hypothesis: str, reference: str, exact: float, f1: float) -> None:
    scores = score([prediction(0, hypothesis, reference)], QUICK)
    assert found(scores, "exact_match").score == exact
    assert found(scores, "token_f1").score == pytest.approx(f1)
    assert found(scores, "token_f1").half_interval == 0


def test_classes_are_the_few_references_of_a_task_that_repeat(make_rows: MakeRows) -> None:
    labels = [("yes", "yes"), ("no", "yes"), (" no", "no "), ("maybe", "no"), ("yes", "yes")] * 2
    rows = [prediction(100 + n, *each, task="verdict") for n, each in enumerate(labels)]
    scores = score([*rows, *make_rows(0.8)], QUICK)
    assert [each.model_dump() for each in scores.classes] == [
        {"task": "verdict", "label": "yes", "rows": 6, "predicted": 4, "accuracy": pytest.approx(100 * 4 / 6)},
        {"task": "verdict", "label": "no", "rows": 4, "predicted": 4, "accuracy": 50},
    ]
    assert score(rows[:9], QUICK).classes == []  # fewer than five rows for each
    assert score(rows, QUICK._replace(classes=1)).classes == []


def test_rows_empty_and_cut_hypotheses_are_counted_for_all_rows_and_each_of_several_tasks(make_rows: MakeRows) -> None:
    rows = [*make_rows(0.9), prediction(50, " ", "x").model_copy(update={"ended": False})]
    counted = [(each.task, each.rows, each.empty, each.cut) for each in score(rows, QUICK).groups]
    assert counted == [(None, 41, 3, 1), ("en-ja", 14, 1, 0), ("en-de", 26, 1, 0)]
    assert [each.task for each in score(of_task(rows, "en-ja"), QUICK).groups] == [None]


def test_the_same_predictions_and_seed_give_the_same_scores_and_another_seed_other_intervals(
    make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(0.8)
    scores = score(rows, QUICK)
    monkeypatch.setattr(resampling, "_DRAWN_AT_ONCE", 100)
    assert score(iter(rows), QUICK) == scores
    other = score(rows, QUICK._replace(seed=1))
    assert found(other, "bleu").score == found(scores, "bleu").score
    assert found(other, "bleu").mean != found(scores, "bleu").mean


def test_a_file_does_not_differ_from_itself(make_rows: MakeRows) -> None:
    assert {(each.difference, each.p_value) for each in compare(make_rows(0.8), make_rows(0.8), QUICK).tests} == {
        (0, 1)
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"id": "seven"}, "in row 3, id is '2' in the first, but 'seven' in the second"),
        ({"source": "x" * 99}, f"in row 3, source is 's 2' in the first, but '{'x' * 60}...' in the second"),
        ({"reference": None}, "but None in the second"),
        ({"task": "en-fr"}, "task is 'en-de' in the first, but 'en-fr' in the second"),
    ],
)
def test_files_of_other_rows_are_refused_with_the_first_difference(
    make_rows: MakeRows, changed: dict[str, Any], said: str
) -> None:
    rows, other = make_rows(0.8), make_rows(0.8)
    other[2] = other[2].model_copy(update=changed)
    other[3] = other[3].model_copy(update={"id": "later"})
    with pytest.raises(InputError, match=re.escape(said)):
        compare(rows, other, QUICK)


def test_files_of_different_lengths_and_rows_that_cannot_be_scored_are_refused(make_rows: MakeRows) -> None:
    rows = make_rows(0.8)
    with pytest.raises(InputError, match="the first file has 40 rows, but the second 39"):
        compare(rows, rows[:-1], QUICK)
    with pytest.raises(InputError, match=r"row 41 \(id '50'\) has no reference, so it cannot be scored"):
        score([*rows, prediction(50, "x", None)], QUICK)
    with pytest.raises(InputError, match=r"rows 3 and 41 have the same id \('2'\), but each row is scored once"):
        score([*rows, rows[2]], QUICK)

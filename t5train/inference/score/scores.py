"""Scores of a file of predictions, and whether those of another one are better by more than chance."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from t5train.errors import InputError
from t5train.inference.predict.predictions import Prediction
from t5train.inference.score.resampling import p_value, resampled_sums, spread_of
from t5train.inference.score.row_statistics import Metric, metrics_of, scores_of, statistics_of
from t5train.progress import Progress, silent

_ROWS_A_CLASS = 5
_SHOWN = 60  # characters of a text in an error


class ScoreSpec(NamedTuple):
    """How to score. The references of a task are classes if they are few distinct texts.

    ``classes`` is the most of them, and each must occur five times on average: labels repeat, and texts do not.
    """

    resamples: int = 1000
    seed: int = 12345
    """Of the bootstrap; the default is sacrebleu's."""
    classes: int = 20


_USUAL = ScoreSpec()


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Group(_Result):
    """The rows of a task, or all rows if ``task`` is None.

    ``empty`` counts hypotheses without text, and ``cut`` those that did not end at the most tokens allowed.
    """

    task: str | None
    rows: int
    empty: int
    cut: int


class Score(_Result):
    """A score from 0 to 100 of all rows (``task`` None) or those of a task.

    ``mean`` and ``half_interval`` are of the resamples: with a confidence of 95%, the score is ``mean`` plus or minus
    ``half_interval``.
    """

    task: str | None
    metric: str
    score: float
    mean: float
    half_interval: float
    signature: str


class ClassAccuracy(_Result):
    """Of the rows whose reference is ``label``, the percentage with this hypothesis; it is the recall of the class.

    ``predicted`` counts the rows with this hypothesis, whatever their reference.
    """

    task: str | None
    label: str
    rows: int
    predicted: int
    accuracy: float


class Scores(_Result):
    """Scores of predictions: of all rows first, then of each task if there are several.

    Rows without a task count in all rows only.
    """

    resamples: int
    seed: int
    groups: list[Group]
    scores: list[Score]
    classes: list[ClassAccuracy]


class PairedTest(_Result):
    """A score of both files, how much higher that of the other file is, and whether chance explains that.

    The p-value is that of sacrebleu's paired bootstrap test, for all metrics.
    """

    task: str | None
    metric: str
    baseline: float
    other: float
    difference: float
    p_value: float


class Comparison(_Result):
    """Scores of two files of predictions for the same rows, and tests of their differences."""

    baseline: Scores
    other: Scores
    tests: list[PairedTest]


class _Resampled(NamedTuple):
    """The scores of one group of rows of one file.

    ``scores`` has one for each name of a metric, and ``resampled`` is float64 [resamples, names].
    """

    task: str | None
    scores: list[float]
    resampled: np.ndarray


def score(predictions: Iterable[Prediction], spec: ScoreSpec = _USUAL, progress: Progress = silent) -> Scores:
    """Score predictions. The same predictions and spec give the same result.

    Args:
        predictions: The rows; each needs a reference.
        spec: How often to resample, with which seed, and what counts as classes.
        progress: Called with rows compared and resamples drawn.

    Returns:
        All scores, with intervals.

    Raises:
        InputError: A row has no reference, two have the same id, there is no row, or a package is not installed.

    """
    metrics = metrics_of(spec.resamples, spec.seed)
    rows = _with_references(predictions)
    (found,) = _resampled([rows], metrics, spec, progress)
    return _scores(rows, found, metrics, spec)


def compare(
    baseline: Iterable[Prediction], other: Iterable[Prediction], spec: ScoreSpec = _USUAL, progress: Progress = silent
) -> Comparison:
    """Score two files of predictions for the same rows, and test whether their scores differ by more than chance.

    Both are resampled with the same rows.

    Args:
        baseline: The rows of the first file; each needs a reference.
        other: Those of the second, with the same ids, tasks, sources and references in the same order.
        spec: How often to resample, with which seed, and what counts as classes.
        progress: Called with rows compared and resamples drawn.

    Returns:
        The scores of both, and a test for each score.

    Raises:
        InputError: The rows are not the same, one has no reference, there is none, or a package is not installed.

    """
    metrics = metrics_of(spec.resamples, spec.seed)
    systems = [_with_references(baseline), list(other)]
    _require_same_rows(*systems)
    one, two = _resampled(systems, metrics, spec, progress)
    return Comparison(
        baseline=_scores(systems[0], one, metrics, spec),
        other=_scores(systems[1], two, metrics, spec),
        tests=list(_tests(one, two, metrics)),
    )


def _with_references(predictions: Iterable[Prediction]) -> list[Prediction]:
    rows = list(predictions)
    of_id = dict[str, int]()
    for number, row in enumerate(rows, start=1):
        if (first := of_id.setdefault(row.id, number)) != number:
            raise InputError(
                f"rows {first:,} and {number:,} have the same id ({_shown(row.id)}), but each row is scored once. "
                "Remove one of them, or predict again"
            )
        if row.reference is None:
            raise InputError(
                f"row {number:,} (id {_shown(row.id)}) has no reference, so it cannot be scored. Predict from a file "
                "whose rows all have a target"
            )
    return rows


def _require_same_rows(baseline: Sequence[Prediction], other: Sequence[Prediction]) -> None:
    for number, (one, two) in enumerate(zip_longest(baseline, other), start=1):
        if one is None or two is None:
            what = f"the first file has {len(baseline):,} rows, but the second {len(other):,}"
            raise InputError(f"{what}, so they cannot be compared. Predict both from the same file")
        for name in ("id", "task", "source", "reference"):
            if getattr(one, name) != getattr(two, name):
                raise InputError(
                    f"the two files are not of the same rows: in row {number:,}, {name} is "
                    f"{_shown(getattr(one, name))} in the first, but {_shown(getattr(two, name))} in the second. "
                    "Predict both from the same file, with the same prefix"
                )


def _shown(text: str | None) -> str:
    return repr(text if text is None or len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _groups(rows: Sequence[Prediction]) -> dict[str | None, list[int]]:
    """Return the numbers of the rows of each group, in the order of their first rows."""
    tasks: dict[str | None, list[int]] = {}
    for number, row in enumerate(rows):
        tasks.setdefault(row.task, []).append(number)
    several = {task: numbers for task, numbers in tasks.items() if task is not None} if len(tasks) > 1 else {}
    return {None: list(range(len(rows)))} | several


def _resampled(
    systems: Sequence[Sequence[Prediction]], metrics: Sequence[Metric], spec: ScoreSpec, progress: Progress
) -> list[list[_Resampled]]:
    """Return the scores of each system's groups. All systems are resampled at once, so with the same rows."""
    references = [str(row.reference) for row in systems[0]]
    hypotheses = [[row.hypothesis for row in rows] for rows in systems]
    statistics = np.hstack([statistics_of(metrics, each, references, progress) for each in hypotheses])
    found: list[list[_Resampled]] = [[] for _ in systems]
    for task, numbers in _groups(systems[0]).items():
        of_group = statistics[numbers]
        sums = resampled_sums(of_group, spec.resamples, spec.seed, progress)
        parts = zip(*(np.split(each, len(systems), axis=-1) for each in (of_group.sum(axis=0), sums)), strict=True)
        for system, (whole, drawn) in zip(found, parts, strict=True):
            resampled = np.array([scores_of(metrics, each, len(numbers)) for each in drawn])
            system.append(_Resampled(task, scores_of(metrics, whole, len(numbers)), resampled))
    return found


def _scores(
    rows: Sequence[Prediction], found: Sequence[_Resampled], metrics: Sequence[Metric], spec: ScoreSpec
) -> Scores:
    groups = {task: [rows[number] for number in numbers] for task, numbers in _groups(rows).items()}
    smallest = {task: each for task, each in groups.items() if task is not None} or groups
    return Scores(
        resamples=spec.resamples,
        seed=spec.seed,
        groups=[_group(task, each) for task, each in groups.items()],
        scores=[each for group in found for each in _of_group(group, metrics)],
        classes=[each for task, of_task in smallest.items() for each in _classes(task, of_task, spec.classes)],
    )


def _of_group(group: _Resampled, metrics: Sequence[Metric]) -> Iterator[Score]:
    signatures = [(name, metric.signature) for metric in metrics for name in metric.names]
    for (name, signature), value, drawn in zip(signatures, group.scores, group.resampled.T, strict=True):
        mean, half = spread_of(drawn)
        yield Score(task=group.task, metric=name, score=value, mean=mean, half_interval=half, signature=signature)


def _group(task: str | None, rows: Sequence[Prediction]) -> Group:
    empty = sum(not row.hypothesis.strip() for row in rows)
    return Group(task=task, rows=len(rows), empty=empty, cut=sum(not row.ended for row in rows))


def _classes(task: str | None, rows: Sequence[Prediction], most: int) -> Iterator[ClassAccuracy]:
    """Yield the accuracy of each class, the most frequent first; nothing if the references are not classes."""
    labels = Counter(str(row.reference).strip() for row in rows)
    if not 1 < len(labels) <= min(most, len(rows) // _ROWS_A_CLASS):
        return
    predicted = Counter(row.hypothesis.strip() for row in rows)
    right = Counter(row.hypothesis.strip() for row in rows if row.hypothesis.strip() == str(row.reference).strip())
    for label, count in sorted(labels.items(), key=lambda each: (-each[1], each[0])):
        accuracy = 100 * right[label] / count
        yield ClassAccuracy(task=task, label=label, rows=count, predicted=predicted[label], accuracy=accuracy)


def _tests(one: Sequence[_Resampled], other: Sequence[_Resampled], metrics: Sequence[Metric]) -> Iterator[PairedTest]:
    names = [name for metric in metrics for name in metric.names]
    for before, after in zip(one, other, strict=True):
        for place, (name, low, high) in enumerate(zip(names, before.scores, after.scores, strict=True)):
            chance = p_value(before.resampled[:, place], after.resampled[:, place], high - low)
            yield PairedTest(
                task=before.task, metric=name, baseline=low, other=high, difference=high - low, p_value=chance
            )

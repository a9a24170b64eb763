"""The metrics of predictions of held-out pairs, and of what a model has to be better than.

They follow from the predictions and the vocabulary alone, so that certification can compute them again.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from t5train.data.vocabulary.sentencepiece_model import UNK_ID
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.inference.predict.predictions import Prediction
from t5train.inference.score.row_statistics import EXACT_MATCH, EXACT_SIGNATURE
from t5train.inference.score.scores import score
from t5train.progress import Progress, silent
from t5train.records.evaluation_metrics import Example, GroupMetrics, Metric

EXAMPLES = 20
_DECIMALS = 4
_SHOWN_CHARACTERS = 300
"""Of each text of an example."""
_SPLITS = ("validation", "test")
_Metrics = dict[str, Metric]


class Measured(NamedTuple):
    """What follows from predictions; see ``EvaluationMetrics``."""

    signatures: dict[str, str]
    groups: tuple[GroupMetrics, ...]
    examples: tuple[Example, ...]


def can_score() -> bool:
    """Whether the packages of the extra ``score`` are installed."""
    return all(importlib.util.find_spec(name) for name in ("sacrebleu", "rouge_score"))


def measure(
    predicted: Sequence[Prediction],
    by_start: Sequence[Prediction],
    prefixes: Mapping[str, str],
    vocabulary: Tokenizer,
    *,
    only_exact: bool = False,
    progress: Progress = silent,
) -> Measured:
    """Measure predictions.

    Args:
        predicted: Those of the model. Ids are ``SPLIT/TASK/NUMBER``.
        by_start: Those of the start model for the same pairs; empty without one.
        prefixes: The prefix of each task, by name.
        vocabulary: That of the model.
        only_exact: Whether only exact match is measured, which needs no package.
        progress: Called with the number of systems that were measured.

    Raises:
        InputError: A package of the extra ``score`` is missing, though ``only_exact`` is false.

    """
    signatures, groups = dict[str, str](), list[GroupMetrics]()
    splits = {split: rows for split in _SPLITS if (rows := [row for row in predicted if split_of(row) == split])}
    systems = {
        (split, system): rows
        for split, model in splits.items()
        for system, rows in _systems(model, [row for row in by_start if split_of(row) == split], prefixes).items()
    }
    found = dict[tuple[str, str], dict[str | None, _Metrics]]()
    for done, (key, rows) in enumerate(systems.items()):
        progress("sets of predictions measured", done, len(systems))
        found[key], stated = _exact_matches(rows) if only_exact else _scores(rows)
        signatures |= stated
    progress("sets of predictions measured", len(systems), len(systems))
    for split, model in splits.items():
        for task, rows in _groups(model).items():
            groups.append(
                GroupMetrics(
                    split=split,
                    task=task,
                    pairs=len(rows),
                    not_ended=sum(not row.ended for row in rows),
                    unknown=_with_unknown(rows, vocabulary),
                    systems={system: each[task] for (of, system), each in found.items() if of == split},
                )
            )
    return Measured(signatures, tuple(groups), tuple(_examples(splits.get("test") or predicted)))


def split_of(row: Prediction) -> str:
    """Return the split of a predicted pair."""
    return row.id.partition("/")[0]


def _systems(
    model: Sequence[Prediction], start: Sequence[Prediction], prefixes: Mapping[str, str]
) -> dict[str, list[Prediction]]:
    """Return the predictions of each system for the pairs of a split."""
    tasks = _by_task(model)
    copied = [row.model_copy(update={"hypothesis": row.source.removeprefix(prefixes[str(row.task)])}) for row in model]
    shuffled = [
        row.model_copy(update={"hypothesis": other.hypothesis})
        for rows in tasks.values()
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    can_shuffle = all(len(rows) > 1 for rows in tasks.values())
    found = {"model": list(model), "start": list(start), "copy": copied, "shuffled": shuffled if can_shuffle else []}
    return {system: rows for system, rows in found.items() if rows}


def _by_task(rows: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    tasks = dict[str, list[Prediction]]()
    for row in rows:
        tasks.setdefault(str(row.task), []).append(row)
    return tasks


def _groups(rows: Sequence[Prediction]) -> dict[str | None, list[Prediction]]:
    """Return the rows of each task and, of several, all rows first."""
    tasks = _by_task(rows)
    found: dict[str | None, list[Prediction]] = {None: list(rows)} if len(tasks) > 1 else {}
    found.update(tasks.items())
    return found


def _exact_matches(rows: Sequence[Prediction]) -> tuple[dict[str | None, _Metrics], dict[str, str]]:
    found: dict[str | None, _Metrics] = {}
    for task, group in _groups(rows).items():
        right = sum(row.hypothesis.strip() == str(row.reference).strip() for row in group)
        found[task] = {EXACT_MATCH: Metric(value=_rounded(100 * right / len(group)))}
    return found, {EXACT_MATCH: EXACT_SIGNATURE}


def _scores(rows: Sequence[Prediction]) -> tuple[dict[str | None, _Metrics], dict[str, str]]:
    scored, (*_, last) = score(rows), _groups(rows)
    found = dict[str | None, _Metrics]()
    for each in scored.scores:
        task = each.task if len(scored.groups) > 1 else last  # of a single task, all rows are its own
        low, high = max(0.0, each.mean - each.half_interval), min(100.0, each.mean + each.half_interval)
        metric = Metric(value=_rounded(each.score), low=_rounded(low), high=_rounded(high))
        found.setdefault(task, {})[each.metric] = metric
    return found, {each.metric: each.signature for each in scored.scores}


def _rounded(value: float) -> float:
    return round(value, _DECIMALS)


def _with_unknown(rows: Sequence[Prediction], vocabulary: Tokenizer) -> int:
    ids = vocabulary.encode([str(row.reference) for row in rows], add_eos=False)
    return sum(bool((each == UNK_ID).any()) for each in ids)


def _examples(rows: Sequence[Prediction]) -> Iterator[Example]:
    """Yield the first predictions, of each task in turn."""
    in_turn = chain.from_iterable(zip_longest(*_by_task(rows).values()))
    for row in islice(filter(None, in_turn), EXAMPLES):
        yield Example(
            split=split_of(row),
            task=str(row.task),
            source=row.source[:_SHOWN_CHARACTERS],
            reference=str(row.reference)[:_SHOWN_CHARACTERS],
            hypothesis=row.hypothesis[:_SHOWN_CHARACTERS],
        )

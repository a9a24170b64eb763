"""How much of each task is trained on, and whether there are enough pairs.

Rates are those of ``t5train.data.samples.mixture``, and are meant in pairs. Samples are rows, so a task whose rows hold
more pairs has fewer of them: its rate of rows is its rate of pairs, divided by the pairs of a row.
"""

from fractions import Fraction
from typing import NamedTuple

from t5train.data.pairs.pair_shards import task_names
from t5train.data.samples.mixture import rates
from t5train.data.vocabulary.held_out import read_held_out
from t5train.errors import InputError, SpecError
from t5train.quantities import quantity
from t5train.records.stage_records import PairShards
from t5train.spec import MixingSpec, PairsSpec, RunSpec


class TaskShare(NamedTuple):
    """What a run trains on of a task. ``rate`` is its share of the pairs, ``epochs`` how often each pair is used."""

    task: str
    pairs: int
    rows: int
    rate: float
    epochs: float


def task_shares(shards: PairShards, spec: RunSpec) -> list[TaskShare]:
    """Return what the whole run trains on of each task."""
    samples = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences
    pairs, rows = _of_tasks(shards, "pairs"), _of_tasks(shards, "rows")
    of_pairs, of_rows = rates(pairs, spec.pairs), rates_of_rows(shards, spec.pairs)
    return [
        TaskShare(name, pairs[task], rows[task], float(of_pairs[task]), float(samples * of_rows[task] / rows[task]))
        for task, name in enumerate(task_names(shards))
    ]


def rates_of_rows(shards: PairShards, mixing: MixingSpec) -> list[Fraction]:
    """Return the share of each task in the rows that are trained on. They sum to 1."""
    pairs, rows = _of_tasks(shards, "pairs"), _of_tasks(shards, "rows")
    parts = [
        rate * of_rows / of_pairs for rate, of_rows, of_pairs in zip(rates(pairs, mixing), rows, pairs, strict=True)
    ]
    total = sum(parts)
    return [part / total for part in parts]


def _of_tasks(shards: PairShards, what: str) -> list[int]:
    return [shards.counts[f"train_{what}_of_task_{task}"] for task in range(shards.counts["num_shards"])]


def require_enough_pairs(spec: RunSpec, shards: PairShards) -> None:
    """Raise InputError unless the shards have a batch to train on, a pair to validate on, and a held-out text.

    Raises SpecError if their rows or tasks are not those of the spec.
    """
    _require_made_for(spec.pairs, shards)
    rows, batch = shards.counts["train_rows"], spec.optimizer.global_batch_sequences
    if rows < batch:
        remedy = (
            ", set pairs.pack=false, or lower pairs.input_tokens and pairs.target_tokens" if spec.pairs.pack else ""
        )
        raise InputError(
            f"the train split has {quantity(shards.counts['train_pairs'], 'pair')} in {quantity(rows, 'row')}, but a "
            f"step takes optimizer.global_batch_sequences ({batch}) rows. Add pairs, lower "
            f"optimizer.global_batch_sequences{remedy}"
        )
    if not shards.counts["validation_pairs"]:
        raise InputError(
            "there is no pair to validate on. Give some (pairs.validation), or give validation a larger share "
            "(pairs.split)"
        )
    read_held_out(shards.path)


def _require_made_for(spec: PairsSpec, shards: PairShards) -> None:
    made = (shards.counts["input_tokens"], shards.counts["target_tokens"], ", ".join(task_names(shards)))
    asked = (spec.input_tokens, spec.target_tokens, ", ".join(task.task for task in spec.tasks()))
    if made != asked:
        raise SpecError(
            f"the pair shards in {shards.path} have rows of {made[0]} and {made[1]} tokens of the tasks {made[2]}, but "
            f"pairs.input_tokens and pairs.target_tokens are {asked[0]} and {asked[1]}, and the tasks of pairs.train "
            f"are {asked[2]}: set those of the shards, or make shards of these"
        )

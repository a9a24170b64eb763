"""Measure how training speed grows with the number of accelerators of this machine, in one run.

::

    python -m benchmarks.training_scaling base --root DIR --ranks 4 [--repeats 3] [--steps 20] [--until-seconds 570]
        [--set layout.expert_parallel_size=4] [--into benchmarks/results/NAME.json]

Every accelerator has as many sequences per step as in the recipe, unless optimizer.global_batch_sequences is set. The
same is measured on one of them, without pipeline stages and with all experts there. Repeats take turns. Finished
measurements and --until-seconds are as in benchmarks.training_peers, and so are exit codes. Expected, until a machine
has its own durations: 150 s for each of the two measurements of a repeat.
"""

import argparse
import sys

from benchmarks.comparison import Comparison, add, compare, parser, result, speed_notes
from benchmarks.measured_result import Figure, spread
from benchmarks.peer_outcomes import ALONE, OURS, Outcomes, Tuning, speed_and_memory
from benchmarks.time_budget import NOT_FINISHED, OutOfTime
from t5train.errors import SpecError, T5TrainError
from t5train.spec.recipes import recipe

_BATCH = "optimizer.global_batch_sequences"


def main() -> int:
    """Measure what is not yet measured, and print the table. Return 1 if a measurement failed, 3 if time ran out."""
    given = _arguments()
    comparison = compare(given)
    if comparison.subject.ranks < 2:
        raise SystemExit("one rank cannot be compared with itself: give --ranks")
    outcomes = Outcomes(comparison.root / "outcomes.jsonl", comparison.subject)
    code = _measure_all(comparison, outcomes, given.repeats)
    what = f"Training {comparison.subject.recipe} on several accelerators, next to one"
    notes, found = speed_notes(comparison), rows(outcomes, comparison.subject.ranks)
    result(comparison, what, _name(comparison), notes, found).show(given.into)
    return code


def _name(comparison: Comparison) -> str:
    return comparison.name("benchmarks.training_scaling")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, steps=20)
    made.add_argument("--repeats", type=int, default=3)
    given = made.parse_args()
    if given.ranks and not any(change.startswith(f"{_BATCH}=") for change in given.set):
        given.set = [*given.set, f"{_BATCH}={_batch(given.recipe, given.ranks)}"]
    return given


def _batch(name: str, ranks: int) -> int:
    """Return the sequences of a step if every rank has as many as in the recipe."""
    try:
        spec = recipe(name)
    except SpecError as error:
        raise SystemExit(str(error)) from None
    return spec.optimizer.global_batch_sequences * ranks // spec.cluster.ranks


def _measure_all(comparison: Comparison, outcomes: Outcomes, repeats: int) -> int:
    """Measure what is not yet measured, as far as time allows. Return the exit code."""
    tuning = Tuning(comparison.spec.layout.micro_batch_sequences)
    try:
        for repeat in range(1, repeats + 1):
            for contender in (OURS, ALONE):
                if not outcomes.has(contender, repeat, tuning):
                    add(comparison, outcomes, contender, repeat, tuning)
    except OutOfTime as error:
        print(f"stopped: {error}. The same command continues", flush=True)
        return NOT_FINISHED
    except T5TrainError as error:
        print(f"failed: {error}", flush=True)
        return 1
    finally:
        comparison.budget.close()
    return 0


def rows(outcomes: Outcomes, ranks: int) -> list[dict[str, Figure]]:
    """Return what was measured on one accelerator and on all: medians of the repeats, with their range."""
    together, alone = (
        [each for each in outcomes.of(contender) if not each.out_of_memory] for contender in (OURS, ALONE)
    )
    by_repeat = {each.repeat: each.tokens_per_second for each in alone}
    linear = [
        each.tokens_per_second / (ranks * by_repeat[each.repeat]) for each in together if each.repeat in by_repeat
    ]
    return [
        {
            "accelerators": number,
            **speed_and_memory(measured),
            "of linear": spread(share, 2) if share else None,
            "sequences a pass": measured[-1].tuning.micro_batch_sequences,
        }
        for number, measured, share in ((1, alone, []), (ranks, together, linear))
        if measured
    ]


if __name__ == "__main__":
    sys.exit(main())

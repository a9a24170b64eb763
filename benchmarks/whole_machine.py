"""Measure this project's layouts on all accelerators of a machine, each next to one of them, in one run.

::

    python -m benchmarks.whole_machine --root DIR --ranks 8 [--only base,moe] [--steps 20] [--loss-steps 200]
        [--until-seconds 540] [--into benchmarks/results/NAME.json] [--tiny]

Two things are measured of each layout. Speed: every accelerator has as many sequences a step as the recipe has on one,
and one of them takes the same share alone, without stages and with all experts; models with experts are also measured
without them. Losses: a step has the recipe's batch, and the same steps are taken by all accelerators and by one.

Finished measurements, --until-seconds and exit codes are as in benchmarks.training_peers: the same command continues,
on the same machine. One layout is finished after the other, in the order of the table. A measurement that fails is
reported, one that does not fit into the time is left to the next command, and both are followed by the others. Expected
on GPUs, until a machine has its own durations: 150 s for each speed, 180 s for losses of all accelerators, and three
times as long as these for losses of one. --tiny tries the command with small models on the CPU.
"""

import argparse
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.comparison import Comparison, add, add_common_arguments, compare, parameters_of, result
from benchmarks.finished_rows import FinishedRows
from benchmarks.loss_curves import ALONE as LOSSES_ALONE
from benchmarks.loss_curves import TOGETHER, Curve, curve
from benchmarks.measured_result import Figure
from benchmarks.peer_outcomes import ALONE, DENSE, OURS, Outcome, Outcomes, Tuning
from benchmarks.time_budget import NOT_FINISHED, OutOfTime, TimeBudget
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.errors import T5TrainError
from t5train.model.model_shape import resolve
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe

_TINY = {
    "model.preset": "smoke",
    "model.compile": False,
    "objective.input_tokens": 64,
    "layout.micro_batch_sequences": 2,
    "cluster.accelerator": "cpu",
}
_LOSS_PASS = 16
"""Sequences of a pass when losses are measured: the same in all layouts, as samples are drawn by the pass."""


class Layout(NamedTuple):
    """What is measured: a recipe, and the settings that it changes."""

    name: str
    recipe: str
    settings: Mapping[str, Any]
    alone: str | None = None
    """The layout whose measurements on one rank and without experts it is compared with; None for its own."""


class Measured(NamedTuple):
    """A layout's comparisons, and what is measured of them."""

    layout: Layout
    speed: Comparison
    outcomes: Outcomes
    losses: Comparison
    curves: FinishedRows[Curve]


def layouts(ranks: int) -> tuple[Layout, ...]:
    """Return what is measured on 2, 4 or 8 ranks.

    In "moe-divided", ranks divide the experts; in "pipeline-4x2", two models are divided into four stages each. On one
    rank, the former is the same as "moe" and the latter a slower "base", as ZeRO-3 is a slower "t5_3b".
    """
    stages = 4 if ranks == 8 else 2
    return (
        Layout("base", "base", {}),
        Layout("moe", "moe", {}),
        Layout("moe-divided", "moe", {"layout.expert_parallel_size": ranks}, alone="moe"),
        Layout("t5_3b", "t5_3b", {}),
        Layout(f"pipeline-{stages}x{ranks // stages}", "pipeline", {"layout.pipeline_stages": stages}, alone="base"),
        Layout("large", "large", {}),
        Layout("t5_3b-zero3", "t5_3b", {"layout.zero_stage": 3, "model.compile": False}, alone="t5_3b"),
    )


def main() -> int:
    """Measure what is not yet measured, and print the tables. Return 1 if something failed, 3 if time ran out."""
    given = _arguments()
    budget = TimeBudget(given.until_seconds)
    found = {layout.name: _measured(given, layout, budget) for layout in layouts(given.ranks)}
    code = _measure_all([each for name, each in found.items() if name in given.only])
    budget.close()
    what = f"Layouts on {given.ranks} accelerators, next to one"
    result(found["base"].speed, what, _name(given), _notes(given), rows(found, given.only)).show(given.into)
    return code


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, required=True, choices=(2, 4, 8), help="number of accelerators")
    made.add_argument("--only", help="comma-separated layouts; all if left out")
    made.add_argument("--steps", type=int, default=20, help="measured steps after warm-up; 20 by default")
    made.add_argument("--loss-steps", type=int, default=200, help="steps of each run of losses; 200 by default")
    made.add_argument("--tiny", action="store_true", help="try this command with small models on the CPU")
    add_common_arguments(made)
    given = made.parse_args()
    names = [layout.name for layout in layouts(given.ranks)]
    given.only = set(given.only.split(",")) if given.only else set(names)
    if unknown := given.only.difference(names):
        made.error(f"--only names {sorted(unknown)}: choose from {', '.join(names)}")
    return given


def _name(given: argparse.Namespace) -> str:
    names = [layout.name for layout in layouts(given.ranks)]
    only = "" if given.only == set(names) else f" --only {','.join(name for name in names if name in given.only)}"
    steps = f" --steps {given.steps} --loss-steps {given.loss_steps}"
    return f"benchmarks.whole_machine --ranks {given.ranks}{only}{steps}{' --tiny' if given.tiny else ''}"


def _measured(given: argparse.Namespace, layout: Layout, budget: TimeBudget) -> Measured:
    speed = compare(_asked(given, layout, speed_settings(layout, given.ranks, given.tiny), given.steps), budget)
    losses = compare(_asked(given, layout, loss_settings(layout, given.ranks, given.tiny), given.loss_steps), budget)
    outcomes = Outcomes(speed.root / "outcomes.jsonl", speed.subject)
    return Measured(layout, speed, outcomes, losses, FinishedRows(losses.root / "losses.jsonl", Curve, losses.subject))


def _asked(given: argparse.Namespace, layout: Layout, settings: Mapping[str, Any], steps: int) -> argparse.Namespace:
    """Return what the command of a single comparison would be given."""
    values = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    asked = {"recipe": layout.recipe, "set": values, "ranks": given.ranks, "steps": steps, "commit": given.commit}
    return argparse.Namespace(root=given.root / layout.name, **asked)


def speed_settings(layout: Layout, ranks: int, tiny: bool) -> dict[str, Any]:
    """Return the settings with which every accelerator has as many sequences as in the recipe."""
    spec = recipe(layout.recipe)
    share = 4 if tiny else spec.optimizer.global_batch_sequences // spec.cluster.ranks
    return {**layout.settings, **(_TINY if tiny else {}), "optimizer.global_batch_sequences": share * ranks}


def loss_settings(layout: Layout, ranks: int, tiny: bool) -> dict[str, Any]:
    """Return the settings with which all accelerators together have the recipe's batch."""
    spec = recipe(layout.recipe)
    models = ranks // int(layout.settings.get("layout.pipeline_stages", 1))
    batch = 2 * ranks if tiny else spec.optimizer.global_batch_sequences
    micro = min(batch // models, 2 if tiny else _LOSS_PASS)
    of_batch = {"optimizer.global_batch_sequences": batch, "layout.micro_batch_sequences": micro}
    return {**layout.settings, **(_TINY if tiny else {}), **of_batch}


def _measure_all(chosen: Sequence[Measured]) -> int:
    """Measure what is not yet measured, as far as time allows. Return the exit code."""
    code = 0
    for measured in chosen:
        for number, (what, measure) in enumerate(_measurements(measured)):
            if number == 0:
                print(f"{measured.layout.name}:", flush=True)
            try:
                measure()
            except OutOfTime as error:
                print(f"{measured.layout.name}: not measured: {error}", flush=True)
                code = NOT_FINISHED
                if measured.speed.budget.left <= 0:
                    print("stopped: the time is over. The same command continues", flush=True)
                    return code
            except T5TrainError as error:
                print(f"{measured.layout.name}, {what}, failed: {error}", flush=True)
                code = code or 1
    return code


def _measurements(measured: Measured) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what there is to measure of a layout, unless it is measured."""
    spec, tuning, is_compared = measured.speed.spec, _tuning(measured.speed.spec), measured.layout.alone is None
    others = [ALONE, *([DENSE] if spec.model.moe.num_experts else [])] if is_compared else []
    for contender in (OURS, *others):
        if not measured.outcomes.has(contender, 1, tuning):
            yield contender, partial(add, measured.speed, measured.outcomes, contender, 1, tuning)
    for variant in (TOGETHER, *([LOSSES_ALONE] if is_compared else [])):
        if all(row.variant != variant for row in measured.curves.finished):
            yield f"losses, {variant}", partial(curve, measured.losses, measured.curves, variant)


def _tuning(spec: RunSpec) -> Tuning:
    return Tuning(spec.layout.micro_batch_sequences)


def rows(found: Mapping[str, Measured], shown: Container[str]) -> list[dict[str, Figure]]:
    """Return speed, memory and losses of each layout; what is not measured is None."""
    pairs = {name: (each, found[each.layout.alone or name]) for name, each in found.items() if name in shown}
    return [{"layout": name, **_speed(*pair), **_losses(*pair)} for name, pair in pairs.items()]


def _speed(measured: Measured, single: Measured) -> dict[str, Figure]:
    """Return speed and memory; ``single`` is what was measured on one rank and without experts.

    MFU is that of all accelerators, memory what torch has reserved on the first one.
    """
    spec, ranks = measured.speed.spec, measured.speed.subject.ranks
    together, alone = _finished(measured.outcomes, OURS), _finished(single.outcomes, ALONE)
    dense = _finished(single.outcomes, DENSE)
    rate = together.tokens_per_second if together else None
    return {
        "parameters": parameters_of(spec),
        "tokens/s": _rate(measured.outcomes, OURS),
        "tokens/s of one": _rate(single.outcomes, ALONE),
        "of linear": round(rate / (ranks * alone.tokens_per_second), 2) if rate and alone else None,
        "of dense": round(rate / dense.tokens_per_second, 2) if rate and dense else None,
        "MFU": _mfu(measured.speed, together) if together else None,
        "reserved, GiB": round(together.reserved_bytes / 2**30, 1) if together else None,
        "sequences a pass": _tuning(spec).micro_batch_sequences,
    }


def _losses(measured: Measured, single: Measured) -> dict[str, Figure]:
    of_all = {row.variant: row.measured.losses for row in measured.curves.finished}
    of_one = {row.variant: row.measured.losses for row in single.curves.finished}
    together, alone = of_all.get(TOGETHER), of_one.get(LOSSES_ALONE)
    differences = [abs(one - other) for one, other in zip(together or (), alone or (), strict=False)]
    return {
        "last loss": round(together[-1], 4) if together else None,
        "last loss of one": round(alone[-1], 4) if alone else None,
        "largest difference": round(max(differences), 4) if differences else None,
        "at step": differences.index(max(differences)) + 1 if differences else None,
        "mean difference": round(sum(differences) / len(differences), 4) if differences else None,
    }


def _finished(outcomes: Outcomes, contender: str) -> Outcome | None:
    return next((each for each in outcomes.of(contender) if not each.out_of_memory), None)


def _rate(outcomes: Outcomes, contender: str) -> Figure:
    if found := _finished(outcomes, contender):
        return round(found.tokens_per_second)
    return "out of memory" if outcomes.of(contender) else None


def _mfu(comparison: Comparison, outcome: Outcome) -> Figure:
    """Return the share of the peak in the data sheet; None for a device whose peak is not known."""
    from t5train.train.peak_flops import peak_flops, utilization  # imports torch, before the time begins

    spec, shape = comparison.spec, resolve(comparison.spec.model, expected_vocab_size(comparison.spec.tokenizer))
    used = utilization(spec, shape, outcome.seconds, peak_flops(comparison.subject.device, spec.optimizer.precision))
    return None if used is None else round(used, 3)


def _notes(given: argparse.Namespace) -> str:
    return (
        f"Medians of {given.steps} steps on random tokens, each step's loss read. Linear is {given.ranks} times the "
        "rate of one rank, which has the same share of the batch, no stages, and all experts; that of a pipeline is "
        "base. Dense is the same model without experts. MFU is relative to the data sheet's peak. Memory is what torch "
        f"reserved on rank 0. Losses: {given.loss_steps} steps of the recipe's batch, in passes of at most "
        f"{_LOSS_PASS} sequences whose targets repeat the first inputs, on all ranks and on one. Tokens that an expert "
        "has no room for are dropped at random."
    )


if __name__ == "__main__":
    sys.exit(main())

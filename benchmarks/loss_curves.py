"""Train a recipe with this project's kernels and twice without them, and compare the losses step by step.

::

    python -m benchmarks.loss_curves base --root DIR [--ranks N] [--steps 200] [--set model.preset=small]
        [--until-seconds 570] [--into benchmarks/results/NAME.json]

All runs start from the same weights and see the same samples: random tokens, of which the targets repeat the first
ones. The learning rate passes through its whole schedule in the given number of steps, a quarter of them warm-up at
most. The second run without kernels shows how much rounding alone changes losses: it takes half of the micro-batch at a
time, so that sums are made in another order. Where there are no kernels, the first two runs are the same.

A finished run is appended to DIR/losses.jsonl, and is not repeated by the next command with the same root, unless code,
versions, machine or number of steps have changed: it says which runs it does not use. With --until-seconds, no run is
started that would take longer than what is left. Expected for base on one GPU, 200 steps: 90 to 120 s a run. The exit
code is 3 if time ran out.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from pydantic import BaseModel

from benchmarks.comparison import ON_ONE_RANK, Comparison, compare, parser, result
from benchmarks.finished_rows import FinishedRow, FinishedRows
from benchmarks.measured_result import Figure
from benchmarks.time_budget import NOT_FINISHED, OutOfTime
from flows.cli.terminal import progress_display
from infra.head.benchmark_run import steps_taken
from infra.head.plain_ranks import run_ranks
from infra.head.progress_report import before_first_step
from t5train.data.samples.loader import Batch
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.errors import NonFiniteLoss, T5TrainError
from t5train.files.atomic import write_json
from t5train.spec import RunSpec
from t5train.train.step_benchmark import STEPS_FILE, BenchmarkJob, random_batch

SHOWN_STEPS = (1, 2, 5, 10, 20, 50, 100, 150, 200)
FIRST_GUESS_SECONDS = 180.0
"""How long a run is expected to take before any has ended."""
TOGETHER: Literal["kernels"] = "kernels"
ALONE: Literal["one rank"] = "one rank"
Variant = Literal["kernels", "none", "none again", "one rank"]
VARIANTS: tuple[Variant, ...] = ("kernels", "none", "none again")


class CurveJob(BaseModel):
    """One training run."""

    spec: RunSpec
    vocab_size: int
    with_kernels: bool
    drawn_sequences: int
    """How many sequences are drawn at a time; the micro-batch is this or half of it."""


class Losses(BaseModel):
    """The result of a run: the mean loss of all ranks' samples at each step."""

    has_kernels: bool
    """Whether kernels could run there."""
    losses: list[float]


class Curve(FinishedRow):
    """A finished run."""

    variant: Variant
    measured: Losses


def main() -> int:
    """Train what is not yet trained, and print the table; with --job, be a rank. Return 3 if time ran out."""
    if sys.argv[1:2] == ["--job"]:
        _run_rank(Path(sys.argv[2]))
        return 0
    given = _arguments()
    comparison = compare(given)
    rows = FinishedRows(comparison.root / "losses.jsonl", Curve, comparison.subject)
    if ignored := rows.ignored():
        print(ignored, flush=True)
    try:
        curves = [curve(comparison, rows, variant).measured for variant in VARIANTS]
    except OutOfTime as error:
        print(f"stopped: {error}. The same command continues", flush=True)
        return NOT_FINISHED
    except T5TrainError as error:
        raise SystemExit(str(error)) from None
    finally:
        comparison.budget.close()
    what = f"Losses of {comparison.subject.recipe} with kernels, without them, and without them in other passes"
    result(comparison, what, _name(comparison), _notes(*curves), differences_by_step(*curves)).show(given.into)
    return 0


def _arguments() -> argparse.Namespace:
    return parser(__doc__, steps=200).parse_args()


def _name(comparison: Comparison) -> str:
    return comparison.name("benchmarks.loss_curves") + f" --steps {comparison.subject.steps}"


def curve(comparison: Comparison, rows: FinishedRows[Curve], variant: Variant) -> Curve:
    """Return a finished run, or train it: the comparison's spec or, as ALONE, the same steps on a single rank.

    Raises OutOfTime if that would not end in time, or a rank's error.
    """
    if found := next((row for row in rows.finished if row.variant == variant), None):
        return found
    comparison.budget.require(f"the run {variant!r}", _expected_seconds(comparison, rows, variant))
    started = time.monotonic()
    trained = _trained(comparison, variant)
    seconds = time.monotonic() - started
    finished = Curve(**comparison.facts(), duration_seconds=seconds, variant=variant, measured=trained)
    rows.add(finished)
    print(f"{variant}: last loss {trained.losses[-1]:.4f}, after {seconds:.0f} s", flush=True)
    return finished


def _expected_seconds(comparison: Comparison, rows: FinishedRows[Curve], variant: Variant) -> float:
    """Return how long a run will take: as long as one like it, and on one rank three times as long as on several."""
    like = [row for row in rows.like() if row.subject.steps == comparison.subject.steps]
    of_one = [row.duration_seconds for row in like if row.variant == ALONE]
    of_all = [row.duration_seconds for row in like if row.variant != ALONE]
    if variant == ALONE:
        return max(of_one) if of_one else 3 * max(of_all, default=FIRST_GUESS_SECONDS)
    return max(of_all, default=FIRST_GUESS_SECONDS)


def _trained(comparison: Comparison, variant: Variant) -> Losses:
    """Run the ranks of one training run. Raises NonFiniteLoss if a loss is not finite."""
    spec, steps = comparison.spec, comparison.subject.steps
    size = spec.layout.micro_batch_sequences
    halved = size // 2 if variant == "none again" and size % 2 == 0 else size
    settings = {
        "optimizer.num_steps": steps,
        "optimizer.warmup_steps": min(spec.optimizer.warmup_steps, steps // 4),
        "layout.micro_batch_sequences": halved,
    }
    if variant == ALONE:
        settings |= ON_ONE_RANK
    folder = comparison.root / "logs" / f"losses-{variant.replace(' ', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    job = CurveJob(
        spec=spec.with_settings(settings),
        vocab_size=expected_vocab_size(spec.tokenizer),
        with_kernels=variant in {TOGETHER, ALONE},
        drawn_sequences=size,
    )
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), "utf-8")
    _run_all_ranks(job.spec, path)
    trained = Losses.model_validate_json(path.with_name("losses.json").read_text("utf-8"))
    if wrong := [step for step, loss in enumerate(trained.losses, 1) if not isfinite(loss)]:
        raise NonFiniteLoss(f"the loss of step {wrong[0]} is {trained.losses[wrong[0] - 1]} ({variant})")
    return trained


def _run_all_ranks(spec: RunSpec, job_file: Path) -> None:
    """Train, and show how many steps have been taken."""
    steps_file, cluster = job_file.with_name(STEPS_FILE), spec.cluster
    steps_file.unlink(missing_ok=True)
    command = "-m", "benchmarks.loss_curves", "--job", str(job_file)
    with progress_display() as progress:

        def tell() -> None:
            taken = steps_taken(steps_file)
            progress("steps" if taken else f"steps, {before_first_step(spec)}", taken, spec.optimizer.num_steps)

        run_ranks(command, cluster.ranks, cluster.accelerator, job_file.parent, on_tick=tell)


def _run_rank(path: Path) -> None:
    """Train as one rank. Rank 0 writes ``losses.json`` beside the job."""
    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed()
    losses = _train(CurveJob.model_validate_json(path.read_text("utf-8")), path.with_name(STEPS_FILE))
    if comm.get_rank() == 0:
        write_json(path.with_name("losses.json"), losses.model_dump())
    comm.barrier()
    comm.destroy_process_group()


def _train(job: CurveJob, steps_file: Path) -> Losses:
    """Train from the spec's seed; rank 0 writes the number of steps taken to a file. A collective of all ranks."""
    from t5train.engine import engine as engine_module
    from t5train.engine.collectives import gather_floats, rank
    from t5train.engine.expert_routing import Routing
    from t5train.engine.forward_backward import passes_of
    from t5train.model.initialization import initialise
    from t5train.model.model_shape import resolve
    from t5train.train.learning_rate import learning_rate

    spec, shape = job.spec, resolve(job.spec.model, job.vocab_size)
    has_kernels = engine_module._has_kernels()
    fill = partial(initialise, shape=shape, seed=spec.optimizer.seed)
    switched_off: AbstractContextManager[object] = patch.object(engine_module, "_has_kernels", return_value=False)
    with nullcontext() if job.with_kernels else switched_off:
        engine = engine_module.build_engine(spec, shape, 0, fill, node_local=False)
    routing = Routing(engine_module.model_of(engine))
    passes, losses = passes_of(engine, spec, routing), []
    for step in range(1, spec.optimizer.num_steps + 1):
        engine_module.set_learning_rate(engine, learning_rate(spec.optimizer, step))
        result = passes.step(_batches(job, step))
        routing.of_step(result.router_loss)
        of_ranks = [loss for (loss,) in gather_floats([result.loss])]
        losses.append(sum(of_ranks) / len(of_ranks))
        if rank() == 0:
            steps_file.write_text(str(step), "utf-8")
    return Losses(has_kernels=has_kernels, losses=losses)


def _batches(job: CurveJob, step: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches of a step. Every step has new ones. The ranks of a pipeline draw alike."""
    from t5train.engine.collectives import data_rank

    spec, targets = job.spec, geometry(job.spec.objective).target_tokens
    size = spec.layout.micro_batch_sequences
    drawn_spec = spec.with_settings({"layout.micro_batch_sequences": job.drawn_sequences})
    own = BenchmarkJob(spec=drawn_spec, vocab_size=job.vocab_size, steps=1)
    first = (step * spec.data_parallel_size + data_rank(spec)) * drawn_spec.gradient_accumulation
    for number in range(drawn_spec.gradient_accumulation):
        drawn = random_batch(own, seed=first + number)
        for start in range(0, job.drawn_sequences, size):
            ids, epochs, inputs, _ = (each[start : start + size] for each in drawn[:4])
            yield Batch(ids, epochs, inputs, inputs[:, :targets])


def differences_by_step(kernels: Losses, none: Losses, again: Losses) -> list[dict[str, Figure]]:
    """Return the losses and differences of some steps, and the largest and the mean difference of all steps."""
    by_kernels, by_rounding = _differences(kernels, none), _differences(again, none)
    losses: dict[str, list[float]] = {"with kernels": kernels.losses, "without": none.losses}
    differences = {"difference": by_kernels, "difference by rounding alone": by_rounding}
    made: list[dict[str, Figure]] = [
        {"step": step, **{name: round(values[step - 1], 4) for name, values in (losses | differences).items()}}
        for step in SHOWN_STEPS
        if step <= len(by_kernels)
    ]
    for name, of_all in (("largest", max), ("mean", _mean)):
        made.append({"step": name, **{column: round(of_all(values), 4) for column, values in differences.items()}})
    return made


def _notes(kernels: Losses, none: Losses, again: Losses) -> str:
    changes = [abs(after - before) for before, after in zip(none.losses, none.losses[1:], strict=False)]
    remark = "" if kernels.has_kernels else "There are no kernels for this device, so the first two runs are the same. "
    return (
        f"{remark}The difference with kernels is largest at step {_largest(kernels, none)}, and by rounding alone at "
        f"step {_largest(again, none)}. From one step to the next, the loss changes by {_mean(changes):.4f} on average."
    )


def _differences(one: Losses, other: Losses) -> list[float]:
    return [abs(first - second) for first, second in zip(one.losses, other.losses, strict=True)]


def _largest(one: Losses, other: Losses) -> int:
    """Return the step with the largest difference."""
    differences = _differences(one, other)
    return differences.index(max(differences)) + 1


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    sys.exit(main())

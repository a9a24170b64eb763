"""Train a recipe twice, with this project's kernels and without them, and compare the losses step by step.

::

    python -m benchmarks.loss_curves base --root DIR [--ranks N] [--steps 200] [--set model.preset=small]
        [--into docs/measurements.md]

Both runs start from the same weights and see the same batches: random tokens, of which the targets repeat the first
ones. The learning rate passes through its whole schedule in the given number of steps, a quarter of them warm-up at
most. A finished run is appended to DIR/losses.jsonl, and is not repeated by the next command with the same root. Where
there are no kernels, both runs are the same.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

from pydantic import BaseModel

from benchmarks.peer_outcomes import Subject, write_section
from benchmarks.rank_processes import run_ranks
from benchmarks.training_peers import Comparison, compare
from t5train.data.loader import Batch
from t5train.data.span_corruption import geometry
from t5train.data.tokenizer import expected_vocab_size
from t5train.errors import T5TrainError
from t5train.files.atomic import write_json
from t5train.spec import RunSpec
from t5train.train.step_benchmark import BenchmarkJob, random_batch

SHOWN_STEPS = (1, 2, 5, 10, 20, 50, 100, 150, 200)


class CurveJob(BaseModel):
    """One training run."""

    spec: RunSpec
    vocab_size: int
    with_kernels: bool


class Losses(BaseModel):
    """The result of a run: the mean loss of all ranks' samples at each step."""

    has_kernels: bool
    """Whether kernels could run there."""
    losses: list[float]


class Curve(BaseModel):
    """A finished run."""

    subject: Subject
    with_kernels: bool
    measured: Losses


def main() -> int:
    """Train what is not yet trained, and print the table; with --job, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="base")
    parser.add_argument("--root", type=Path, default=Path("work"), help="folder for finished runs and logs")
    parser.add_argument("--ranks", type=int, help="the recipe's if left out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting to change")
    parser.add_argument("--into", type=Path, help="document in which to replace this comparison, or to append it")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        _run_rank(given.job)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended, too
    comparison = compare(given.recipe, given.set, given.ranks, given.root, given.steps)
    try:
        on, off = (_curve(comparison, with_kernels).measured for with_kernels in (True, False))
    except T5TrainError as error:
        raise SystemExit(str(error)) from None
    text = _text(comparison, on, off)
    print(text)
    if given.into:
        write_section(given.into, _name(comparison), text)
    return 0


def _name(comparison: Comparison) -> str:
    return comparison.name("benchmarks.loss_curves") + f" --steps {comparison.steps}"


def _curve(comparison: Comparison, with_kernels: bool) -> Curve:
    """Return a finished run, or train it."""
    path = comparison.root / "losses.jsonl"
    for curve in _finished(path):
        of_it = curve.subject == comparison.subject and curve.with_kernels == with_kernels
        if of_it and len(curve.measured.losses) == comparison.steps:
            return curve
    trained = _trained(comparison, with_kernels)
    curve = Curve(subject=comparison.subject, with_kernels=with_kernels, measured=trained)
    with open(path, "a", encoding="utf-8") as file:
        file.write(curve.model_dump_json() + "\n")
    print(f"{'with' if with_kernels else 'without'} kernels: last loss {trained.losses[-1]:.4f}", flush=True)
    return curve


def _finished(path: Path) -> Iterator[Curve]:
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        yield Curve.model_validate_json(line)


def _trained(comparison: Comparison, with_kernels: bool) -> Losses:
    """Run the ranks of one training run."""
    spec, steps = comparison.spec, comparison.steps
    schedule = {
        "optimizer.num_steps": steps,
        "optimizer.warmup_steps": min(spec.optimizer.warmup_steps, steps // 4),
    }
    folder = comparison.root / "logs" / f"losses-{'with' if with_kernels else 'without'}-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    path, vocab_size = folder / "job.json", expected_vocab_size(spec.tokenizer)
    job = CurveJob(spec=spec.with_settings(schedule), vocab_size=vocab_size, with_kernels=with_kernels)
    path.write_text(job.model_dump_json(), "utf-8")
    cluster = spec.cluster
    run_ranks(("-m", "benchmarks.loss_curves", "--job", str(path)), cluster.ranks, cluster.accelerator, folder)
    return Losses.model_validate_json(path.with_name("losses.json").read_text("utf-8"))


def _run_rank(path: Path) -> None:
    """Train as one rank. Rank 0 writes ``losses.json`` beside the job."""
    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed()
    losses = _train(CurveJob.model_validate_json(path.read_text("utf-8")))
    if comm.get_rank() == 0:
        write_json(path.with_name("losses.json"), losses.model_dump())
    comm.barrier()
    comm.destroy_process_group()


def _train(job: CurveJob) -> Losses:
    """Train from the spec's seed. A collective of all ranks."""
    from t5train.engine import engine as engine_module
    from t5train.engine.collectives import gather_floats
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
    return Losses(has_kernels=has_kernels, losses=losses)


def _batches(job: CurveJob, step: int) -> Iterator[Batch]:
    """Draw this rank's micro-batches of a step. Every step has new ones. The ranks of a pipeline draw alike."""
    from t5train.engine.collectives import data_rank

    spec, targets = job.spec, geometry(job.spec.objective).target_tokens
    own = BenchmarkJob(spec=spec, vocab_size=job.vocab_size, steps=1)
    first = (step * spec.data_parallel_size + data_rank(spec)) * spec.gradient_accumulation
    for number in range(spec.gradient_accumulation):
        drawn = random_batch(own, seed=first + number)
        yield drawn._replace(targets=drawn.inputs[:, :targets])


def _text(comparison: Comparison, on: Losses, off: Losses) -> str:
    """Return what was compared, the table, and the largest difference."""
    differences = [abs(one - other) for one, other in zip(on.losses, off.losses, strict=True)]
    largest = max(differences)
    changes = [abs(after - before) for before, after in zip(off.losses, off.losses[1:], strict=False)]
    kernels = "" if on.has_kernels else "There are no kernels for this device, so both runs are the same. "
    shown = [step for step in SHOWN_STEPS if step <= len(differences)]
    rows = [
        f"| {step} | {on.losses[step - 1]:.4f} | {off.losses[step - 1]:.4f} | {differences[step - 1]:.4f} |"
        for step in shown
    ]
    return (
        f"{comparison.subject.ranks} ranks on {comparison.subject.device}, {comparison.spec.optimizer.precision}, "
        f"`python -m {_name(comparison)}`. {kernels}The largest difference of all {len(differences)} steps is "
        f"{largest:.4f}, at step {differences.index(largest) + 1}. From one step to the next, the loss changes by "
        f"{sum(changes) / max(1, len(changes)):.4f} on average.\n\n"
        "| step | loss with kernels | without | difference |\n|---|---|---|---|\n" + "\n".join(rows)
    )


if __name__ == "__main__":
    sys.exit(main())

"""``bench``: measures how fast this machine trains a recipe."""

import statistics
from typing import Annotated

import typer

from flows.cli.options import ConfigOption, RecipeOrConfig, SetOption, chosen, settings
from flows.cli.terminal import say, show_table, stage_display
from infra.head.benchmark_run import benchmark
from t5train.train.step_benchmark import IDLE, PROFILED_STEPS


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(bench)


def bench(
    recipe: RecipeOrConfig = None,
    config: ConfigOption = None,
    changes: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Number of steps to measure, after warm-up")] = 20,
) -> None:
    """Measure training steps of a recipe on this machine, on random tokens: speed, memory, and where the time goes."""
    spec = chosen(recipe, config, settings(changes)).spec()
    with stage_display() as progress:
        measured = benchmark(spec, steps, progress)
    seconds, ranks = measured.step_seconds, spec.cluster.ranks
    median = statistics.median(seconds)
    say(f"{spec.recipe}: {ranks} rank{'s' if ranks > 1 else ''} on {measured.device}, {spec.optimizer.precision}")
    spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms over {len(seconds)} steps"
    say(f"Median step: {median * 1e3:.1f} ms ({spread})")
    say(f"{measured.tokens_a_step / median:,.0f} tokens/s over all ranks (encoder and decoder)")
    if measured.mfu is not None:
        say(f"MFU: {measured.mfu:.1%} of the peak in the data sheet")
    reserved = f"{measured.reserved_bytes / 2**30:.1f} GiB reserved by the allocator"
    say(f"Peak memory of rank 0: {measured.memory_bytes / 2**30:.1f} GiB in tensors, {reserved}")
    total = sum(measured.seconds_by_kind.values())
    kinds = sorted(measured.seconds_by_kind.items(), key=lambda pair: (pair[0] == IDLE, -pair[1]))
    say(
        f"Where a step goes, from {PROFILED_STEPS} more steps under a profiler, summed over kernels, which may overlap:"
    )
    rows = [[kind, f"{taken * 1e3:.1f}", f"{taken / total:.0%}"] for kind, taken in kinds]
    show_table(["work", "ms", "share"], rows)

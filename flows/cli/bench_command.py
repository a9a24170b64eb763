"""``bench``: measures how fast this machine trains a recipe."""

import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import ConfigOption, RecipeOrConfig, SetOption, chosen, settings
from flows.cli.terminal import say, show_table, stage_display
from infra.head.benchmark_run import benchmark, benchmark_trainer
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.engine.memory_estimate import WITNESS, held_by_a_rank
from t5train.errors import LaunchError
from t5train.model.model_shape import resolve as resolve_shape
from t5train.quantities import quantity
from t5train.spec import RunSpec
from t5train.train.step_benchmark import IDLE, PROFILED_STEPS, Measured, tokens_a_step

_GIB = 2**30


def bench(
    recipe: RecipeOrConfig = None,
    config: ConfigOption = None,
    changes: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Number of steps to measure, after warm-up")] = 20,
    shards: Annotated[
        Path | None,
        typer.Option(
            "--shards",
            help="Folder of shards, of text or of pairs, to read as in training",
            show_default="random",
            readable=False,
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Do not measure Hugging Face's Trainer, even if accelerate is installed")
    ] = False,
) -> None:
    """Measure training steps of a recipe on this machine: speed, memory, and where the time goes.

    If accelerate is installed, Hugging Face's Trainer is measured next to it, on random tokens.

    $ t5-pretrain bench smoke
    $ t5-pretrain bench base --set layout.micro_batch_sequences=64
    $ t5-pretrain bench base --shards work/shards/wiki-0123456789ab --alone
    """
    spec = chosen(recipe, config, settings(changes)).spec()
    with stage_display() as progress:
        measured = benchmark(spec, steps, progress, shards)
    _show_speed(spec, measured)
    _show_memory(spec, measured)
    _show_kinds(measured)
    if not alone:
        _compare(spec, steps, shards, measured.tokens_a_step / statistics.median(measured.step_seconds))


def _show_speed(spec: RunSpec, measured: Measured) -> None:
    seconds, ranks = measured.step_seconds, spec.cluster.ranks
    median = statistics.median(seconds)
    say(f"{spec.recipe}: {quantity(ranks, 'rank')} on {measured.device}, {spec.optimizer.precision}")
    spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms over {len(seconds)} steps"
    say(f"Median step: {median * 1e3:.1f} ms ({spread})")
    say(f"{measured.tokens_a_step / median:,.0f} tokens/s over all ranks (encoder and decoder)")
    if measured.mfu is not None:
        say(f"MFU: {measured.mfu:.1%} of the peak in the data sheet")
    if measured.data_wait_seconds is None:
        say("Waiting for data: not measured, as tokens are random; give --shards DIR")
    else:
        waited = sum(measured.data_wait_seconds)
        say(f"Waiting for data: {waited / sum(seconds):.2%} of the time, {waited / len(seconds) * 1e3:.2f} ms a step")


def _show_memory(spec: RunSpec, measured: Measured) -> None:
    """Show what was measured next to what is estimated. On the CPU, all memory is the host's."""
    held = held_by_a_rank(spec, resolve_shape(spec.model, expected_vocab_size(spec.tokenizer)))
    during = [one for one in held if one.what != WITNESS]
    accelerator, host = (sum(sizes) for sizes in zip(*(one[1:] for one in during), strict=True))
    say("Memory of rank 0, in GiB. The estimate does not include activations:")
    rows = [["host", f"{host / _GIB:.1f}", f"{measured.host_memory_bytes / _GIB:.1f}", ""]]
    if measured.device == "CPU":
        rows[0][1] = f"{(host + accelerator) / _GIB:.1f}"
    else:
        found = [f"{size / _GIB:.1f}" for size in (accelerator, measured.memory_bytes, measured.reserved_bytes)]
        rows.insert(0, ["accelerator", *found])
    show_table(["memory", "estimate", "peak", "reserved by torch"], rows)


def _show_kinds(measured: Measured) -> None:
    total = sum(measured.seconds_by_kind.values())
    kinds = sorted(measured.seconds_by_kind.items(), key=lambda pair: (pair[0] == IDLE, -pair[1]))
    say(
        f"Where a step goes, from {PROFILED_STEPS} more steps under a profiler, summed over kernels, which may overlap:"
    )
    rows = [[kind, f"{taken * 1e3:.1f}", f"{taken / total:.0%}"] for kind, taken in kinds]
    show_table(["work", "ms", "share"], rows)


def _compare(spec: RunSpec, steps: int, shards: Path | None, rate: float) -> None:
    """Measure Hugging Face's Trainer, and say how much faster this project is."""
    name = "Hugging Face's Trainer (DeepSpeed ZeRO-2, not tuned)"
    if find_spec("accelerate") is None:
        say(f"{name} is not measured: it needs `pip install accelerate`")
    elif spec.optimizer.precision == "fp16":
        say(f"{name} is not measured: it is compared in bf16 or fp32")
    else:
        say(f"Measuring {name} ...")
        try:
            found = benchmark_trainer(spec, steps, shards)
        except LaunchError as error:
            say(f"{name} failed: {error}")
            return
        if found is None:
            say(f"{name} does not fit into memory with any micro-batch")
            return
        median = statistics.median(found.measured.step_seconds)
        tokens = tokens_a_step(spec) / median
        say(
            f"{name}: {tokens:,.0f} tokens/s, {median * 1e3:.1f} ms a step, {found.measured.memory_bytes / _GIB:.1f} "
            f"GiB, micro-batch {found.micro_batch_sequences}. This project is {rate / tokens:.2f} times as fast."
        )

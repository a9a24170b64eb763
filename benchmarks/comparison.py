"""One comparison of training on this machine: its spec, what it is valid for, and its single measurements."""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import peer_training
from benchmarks.finished_rows import Subject
from benchmarks.measured_conditions import code_digest, commit, device_name, machine_id, versions
from benchmarks.measured_result import Figure, Result, add_into
from benchmarks.peer_outcomes import ALONE, DENSE, OURS, TRIAL, Outcome, Outcomes, Tuning
from benchmarks.time_budget import TimeBudget
from flows.cli.terminal import progress_display
from flows.spec_from_recipe import resolve
from infra.head.benchmark_run import TRAINER_PROGRAM, benchmark, measure_ranks
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.errors import OutOfMemory, SpecError
from t5train.model.model_shape import count_parameters
from t5train.model.model_shape import resolve as resolve_shape
from t5train.spec import RunSpec
from t5train.train.step_benchmark import tokens_a_step
from t5train.train.trainer_benchmark import TrainerJob

TRIAL_STEPS = 5
ON_ONE_RANK = MappingProxyType({"cluster.ranks": 1, "layout.pipeline_stages": 1, "layout.expert_parallel_size": 1})
"""Settings with which a single rank trains what several do: without stages and with all experts."""


class Comparison(NamedTuple):
    """What one command compares."""

    spec: RunSpec
    subject: Subject
    commit: str
    root: Path
    budget: TimeBudget

    def name(self, module: str) -> str:
        """Return the command of ``module`` that makes this comparison, without its folder."""
        settings = "".join(f" --set {setting}" for setting in self.subject.settings)
        return f"{module} {self.subject.recipe} --ranks {self.subject.ranks}{settings}"

    def facts(self) -> Mapping[str, Any]:
        """Return what a row of this comparison records beside its measurement."""
        finished_at = datetime.now(UTC).isoformat(timespec="seconds")
        return {"subject": self.subject, "commit": self.commit, "finished_at": finished_at}


def parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every comparison. ``steps`` is the default of ``--steps``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("recipe")
    made.add_argument("--ranks", type=int, help="the recipe's if left out")
    made.add_argument("--steps", type=int, default=steps, help=f"steps after warm-up, at least 1; {steps} by default")
    made.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting to change")
    add_common_arguments(made)
    return made


def add_common_arguments(made: argparse.ArgumentParser) -> None:
    """Add the arguments that do not say what is measured: where results are kept and written, and the time limit."""
    made.add_argument("--root", type=Path, required=True, help="folder for finished measurements and logs")
    made.add_argument("--commit", help="commit to record instead of that of the checkout, as in a copy of the tree")
    add_into(made)
    made.add_argument(
        "--until-seconds",
        type=float,
        help="end after at most so many seconds, with exit code 3 if not everything is measured; start nothing that is "
        "not expected to end in time. 0 shows what is measured",
    )


def compare(given: argparse.Namespace, budget: TimeBudget | None = None) -> Comparison:
    """Build a comparison from the arguments of a command, which ends if one is wrong.

    Its time is that of ``budget`` or, without one, starts now.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended, too
    budget = budget or TimeBudget(given.until_seconds)
    settings = settings_of(given.set)
    if given.ranks is not None:
        settings["cluster.ranks"] = str(given.ranks)
    try:
        spec = resolve(given.recipe, settings)
    except SpecError as error:
        raise SystemExit(str(error)) from None
    given.root.mkdir(parents=True, exist_ok=True)
    return Comparison(spec, _subject(given, spec), commit(given.commit), given.root.absolute(), budget)


def settings_of(changes: Sequence[str], option: str = "--set") -> dict[str, str]:
    """Return settings by their names as they are given with ``option``. The command ends if one has no value."""
    if wrong := [change for change in changes if "=" not in change]:
        raise SystemExit(f"{option} {wrong[0]} is not of the form part.key=value")
    return dict(change.split("=", 1) for change in changes)


def _subject(given: argparse.Namespace, spec: RunSpec) -> Subject:
    return Subject(
        recipe=given.recipe,
        settings=tuple(sorted(given.set)),
        ranks=spec.cluster.ranks,
        steps=given.steps,
        device=device_name(spec.cluster.accelerator),
        machine=machine_id(),
        code=code_digest(),
        versions=versions(),
    )


def add(comparison: Comparison, outcomes: Outcomes, contender: str, repeat: int, tuning: Tuning) -> None:
    """Measure once, unless there is no time for it, and append the outcome. Raises OutOfTime, or a rank's error."""
    what = f"{contender}, {'a trial' if repeat == TRIAL else f'repeat {repeat}'}"
    expected = outcomes.expected_seconds(contender, tuning)
    comparison.budget.require(what, expected)
    print(f"{what}: starts, expected to take {expected:.0f} s", flush=True)
    started = time.monotonic()
    try:
        measured = _measured(comparison, contender, repeat, tuning)
    except OutOfMemory:
        measured = {"out_of_memory": True}
    spec = spec_for(comparison.spec, contender)
    outcome = Outcome(
        **comparison.facts(),
        contender=contender,
        repeat=repeat,
        tuning=tuning,
        duration_seconds=time.monotonic() - started,
        tokens_a_step=tokens_a_step(spec),
        parameters=parameters_of(spec),
        **measured,
    )
    outcomes.add(outcome)
    print(f"{what}: {outcome}, after {outcome.duration_seconds:.0f} s", flush=True)


def _measured(comparison: Comparison, contender: str, repeat: int, tuning: Tuning) -> dict[str, Any]:
    if contender.startswith(OURS):
        return _ours(spec_for(comparison.spec, contender), comparison.subject.steps, tuning)
    return _peer(comparison, contender, repeat, tuning)


def spec_for(spec: RunSpec, contender: str) -> RunSpec:
    """Return what this project trains as ``contender``: the recipe, its dense twin, or its part on one rank."""
    if contender == DENSE:
        return spec.with_settings({"model.moe.num_experts": 0, "layout.expert_parallel_size": 1})
    if contender == ALONE:
        own_share = spec.optimizer.global_batch_sequences // spec.cluster.ranks
        return spec.with_settings({**ON_ONE_RANK, "optimizer.global_batch_sequences": own_share})
    return spec


def _ours(spec: RunSpec, steps: int, tuning: Tuning) -> dict[str, Any]:
    changed = spec.with_settings({"layout.micro_batch_sequences": tuning.micro_batch_sequences})
    with progress_display() as progress:
        measured = benchmark(changed, steps, progress)
    found = measured.model_dump(include={"step_seconds", "memory_bytes", "reserved_bytes", "host_memory_bytes"})
    return found | {"precision": spec.optimizer.precision}


def _peer(comparison: Comparison, peer: str, repeat: int, tuning: Tuning) -> dict[str, Any]:
    """Run the ranks of a peer. Logs stay in the root."""
    size, attention = tuning.micro_batch_sequences, tuning.attention or "default"
    folder = comparison.root / "logs" / f"{peer.replace(' ', '-')}-{repeat}-{size}-{attention}"
    shutil.rmtree(folder, ignore_errors=True)
    sizes = {"layout.pipeline_stages": 1, "layout.micro_batch_sequences": size}
    facts = {
        "spec": comparison.spec.with_settings(sizes),
        "vocab_size": expected_vocab_size(comparison.spec.tokenizer),
        "steps": TRIAL_STEPS if repeat == TRIAL else comparison.subject.steps,
    }
    if peer == "trainer":
        return measure_ranks(TRAINER_PROGRAM, TrainerJob.model_validate(facts), folder).model_dump()
    job = peer_training.PeerJob.model_validate({**facts, "peer": peer, "attention": tuning.attention})
    return measure_ranks(peer_training.PROGRAM, job, folder).model_dump()


def parameters_of(spec: RunSpec) -> int:
    """Return the number of parameters that the spec's model has."""
    return count_parameters(resolve_shape(spec.model, expected_vocab_size(spec.tokenizer)))


def result(comparison: Comparison, what: str, command: str, notes: str, rows: Sequence[Mapping[str, Figure]]) -> Result:
    """Return what was found, with the conditions of the comparison."""
    subject = comparison.subject
    packages = ", ".join(f"{name} {number}" for name, number in subject.versions)
    return Result(
        what=what,
        command=f"python -m {command}",
        commit=comparison.commit,
        machine=f"{subject.ranks} rank{'s' if subject.ranks > 1 else ''} on {subject.device}",
        notes=f"{packages}; code {subject.code}, machine {subject.machine}. {notes}",
        rows=rows,
    )


def speed_notes(comparison: Comparison) -> str:
    """Return what a reader must know about the figures of a comparison of speed."""
    spec, sample = comparison.spec, geometry(comparison.spec.objective)
    return (
        f"{parameters_of(spec):,} parameters, {sample.input_tokens} + {sample.target_tokens} tokens, "
        f"{spec.optimizer.global_batch_sequences} sequences a step, {comparison.subject.steps} steps, random tokens, "
        "each step's loss read. Medians of the repeats; ratios are of measurements of the same round."
    )

"""Measure how fast this project trains a recipe next to its peers, on this machine, in one run.

::

    python -m benchmarks.training_peers base --root DIR [--ranks N] [--repeats 3] [--steps 20]
        [--only ours,trainer] [--set layout.micro_batch_sequences=64] [--into docs/measurements.md]

- ours: this project, as ``t5-pretrain bench`` measures it.
- trainer: Hugging Face's Trainer with DeepSpeed ZeRO-2, not tuned.
- pytorch: plain PyTorch: Hugging Face's T5, compiled, fused AdamW; DDP on several ranks.
- pytorch tuned: the same with the fastest attention of transformers and the fastest micro-batch, found in short trials.
- deepspeed: DeepSpeed's engine with Hugging Face's T5, compiled, in the recipe's ZeRO stage, tuned in the same way.

All train the same shape in the same global batch on random tokens. Each runs in processes of its own, and the repeats
take turns. A finished measurement is appended to DIR/outcomes.jsonl at once, and is not repeated by the next command
with the same root. Times are medians of the steps after warm-up. The peers of a pipeline run without one.
"""

import argparse
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from os import environ
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from benchmarks.peer_outcomes import (
    OURS,
    TRIAL,
    Outcome,
    Outcomes,
    Subject,
    Tuning,
    fastest,
    next_trial,
    table,
    untuned,
    write_section,
)
from benchmarks.peer_step import Peer, PeerJob, PeerMeasured, model_class
from benchmarks.rank_processes import rank_variables, run_ranks
from flows.spec_from_recipe import resolve
from infra.head.benchmark_run import benchmark
from t5train.data.span_corruption import geometry
from t5train.data.tokenizer import expected_vocab_size
from t5train.errors import OutOfMemory, SpecError, T5TrainError
from t5train.model.model_shape import count_parameters
from t5train.model.model_shape import resolve as resolve_shape
from t5train.spec import RunSpec
from tests.support.hardware import hardware

PEERS: tuple[Peer, ...] = ("trainer", "pytorch", "pytorch tuned", "deepspeed")
CONTENDERS = (OURS, *PEERS)
TUNED = frozenset({"pytorch tuned", "deepspeed"})
TRIAL_STEPS = 5
_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "triton")


class Comparison(NamedTuple):
    """What one command compares."""

    spec: RunSpec
    subject: Subject
    root: Path
    steps: int

    def name(self, module: str) -> str:
        """Return the command of ``module`` that makes this comparison, without its folder."""
        settings = "".join(f" --set {setting}" for setting in self.subject.settings)
        return f"{module} {self.subject.recipe} --ranks {self.subject.ranks}{settings}"


def main() -> int:
    """Measure what is not yet measured, and print the table. Return 1 if a contender failed."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended, too
    contenders = _contenders(given.only)
    comparison = compare(given.recipe, given.set, given.ranks, given.root, given.steps)
    print(f"{_name(comparison)}: {comparison.subject.device}", flush=True)
    outcomes = Outcomes(comparison.root / "outcomes.jsonl", comparison.subject)
    failed: set[str] = set()
    for repeat in range(1, given.repeats + 1):
        for contender in contenders:
            if contender not in failed and not _measure(comparison, outcomes, contender, repeat):
                failed.add(contender)
    text = f"{_conditions(comparison)}\n\n{table(outcomes, CONTENDERS)}"
    print(text)
    if given.into:
        write_section(given.into, _name(comparison), text)
    return 1 if failed else 0


def _name(comparison: Comparison) -> str:
    return comparison.name("benchmarks.training_peers")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--root", type=Path, required=True, help="folder for finished measurements and logs")
    parser.add_argument("--ranks", type=int, help="the recipe's if left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps to measure after warm-up, at least 1")
    parser.add_argument("--only", help=f"comma-separated contenders: {', '.join(CONTENDERS)}")
    parser.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting to change")
    parser.add_argument("--into", type=Path, help="document in which to replace this comparison, or to append it")
    return parser.parse_args()


def _contenders(only: str | None) -> list[str]:
    chosen = only.split(",") if only else list(CONTENDERS)
    if unknown := set(chosen) - set(CONTENDERS):
        raise SystemExit(f"--only names {sorted(unknown)}: choose from {', '.join(CONTENDERS)}")
    if "trainer" in chosen and find_spec("accelerate") is None:
        print("trainer is left out, as it needs accelerate: pip install accelerate", flush=True)
        chosen.remove("trainer")
    return chosen


def compare(recipe: str, changes: Sequence[str], ranks: int | None, root: Path, steps: int) -> Comparison:
    """Build a comparison from the arguments of a command, which ends if one is wrong."""
    if wrong := [change for change in changes if "=" not in change]:
        raise SystemExit(f"--set {wrong[0]} is not of the form part.key=value")
    settings = dict(change.split("=", 1) for change in changes)
    if ranks is not None:
        settings["cluster.ranks"] = str(ranks)
    try:
        spec = resolve(recipe, settings)
    except SpecError as error:
        raise SystemExit(str(error)) from None
    if spec.optimizer.precision == "fp16":
        raise SystemExit("optimizer.precision is fp16, but the peers train in bf16 or fp32: set one of these")
    device = _device(spec)
    subject = Subject(recipe=recipe, settings=tuple(sorted(changes)), ranks=spec.cluster.ranks, device=device)
    root.mkdir(parents=True, exist_ok=True)
    return Comparison(spec, subject, root.absolute(), steps)


def _device(spec: RunSpec) -> str:
    """Return the name of the accelerator, asked in another process, as this one must not use memory on it."""
    code = "from t5train.engine.peak_flops import accelerator_name as name; print(name() or '')"
    variables = {**environ, **rank_variables(1, spec.cluster.accelerator)}
    asked = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, check=True, text=True)
    return asked.stdout.removesuffix("\n").rpartition("\n")[2] or hardware()


def _measure(comparison: Comparison, outcomes: Outcomes, contender: str, repeat: int) -> bool:
    """Measure a contender, with the trials that this needs, unless that is done. Return False if it failed."""
    try:
        if contender == OURS:
            tuning = Tuning(comparison.spec.layout.micro_batch_sequences)
            if not outcomes.has(OURS, repeat, tuning):
                _add(outcomes, _measured_ours(comparison, repeat, tuning))
        else:
            _measure_peer(comparison, outcomes, contender, repeat)
    except T5TrainError as error:
        print(f"{contender}, repeat {repeat}, failed: {error}", flush=True)
        return False
    return True


def _measure_peer(comparison: Comparison, outcomes: Outcomes, peer: str, repeat: int) -> None:
    """Measure a peer with its best tuning. Record it if no tuning fits into memory."""
    size = comparison.spec.layout.micro_batch_sequences
    if peer in TUNED:
        largest = comparison.spec.optimizer.global_batch_sequences // comparison.subject.ranks
        attentions = ("sdpa", "eager") if model_class(comparison.spec)._supports_sdpa else ("eager",)
        while trial := next_trial(size, largest, attentions, outcomes.of(peer)):
            _add(outcomes, _measured_peer(comparison, peer, TRIAL, trial))
        choose = fastest
    else:
        choose = partial(untuned, size)
    while (tuning := choose(outcomes.of(peer))) and not outcomes.has(peer, repeat, tuning):
        _add(outcomes, _measured_peer(comparison, peer, repeat, tuning))


def _add(outcomes: Outcomes, outcome: Outcome) -> None:
    outcomes.add(outcome)
    repeat = "trial" if outcome.repeat == TRIAL else f"repeat {outcome.repeat}"
    print(f"{outcome.contender}, {repeat}: {outcome}", flush=True)


def _measured_ours(comparison: Comparison, repeat: int, tuning: Tuning) -> Outcome:
    spec = comparison.spec
    measured = benchmark(spec, comparison.steps, lambda *_: None)
    return _outcome(
        comparison,
        OURS,
        repeat,
        tuning,
        step_seconds=measured.step_seconds,
        memory_bytes=measured.memory_bytes,
        precision=spec.optimizer.precision,
    )


def _measured_peer(comparison: Comparison, peer: str, repeat: int, tuning: Tuning) -> Outcome:
    """Run the ranks of a peer. Logs stay in the root."""
    size, attention = tuning.micro_batch_sequences, tuning.attention or "default"
    folder = comparison.root / "logs" / f"{peer.replace(' ', '-')}-{repeat}-{size}-{attention}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sizes = {"layout.pipeline_stages": 1, "layout.micro_batch_sequences": size}
    job = PeerJob.model_validate(
        {
            "peer": peer,
            "spec": comparison.spec.with_settings(sizes),
            "vocab_size": expected_vocab_size(comparison.spec.tokenizer),
            "steps": TRIAL_STEPS if repeat == TRIAL else comparison.steps,
            "attention": tuning.attention,
        }
    )
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), "utf-8")
    cluster = comparison.spec.cluster
    try:
        run_ranks(("-m", "benchmarks.peer_step", str(path)), cluster.ranks, cluster.accelerator, folder)
    except OutOfMemory:
        return _outcome(comparison, peer, repeat, tuning, out_of_memory=True)
    measured = PeerMeasured.model_validate_json(path.with_name("measured.json").read_text("utf-8"))
    return _outcome(comparison, peer, repeat, tuning, **measured.model_dump())


def _outcome(comparison: Comparison, contender: str, repeat: int, tuning: Tuning, **measured: Any) -> Outcome:
    spec, sample = comparison.spec, geometry(comparison.spec.objective)
    return Outcome(
        subject=comparison.subject,
        contender=contender,
        repeat=repeat,
        tuning=tuning,
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(_PACKAGES),
        tokens_a_step=spec.optimizer.global_batch_sequences * (sample.input_tokens + sample.target_tokens),
        parameters=count_parameters(resolve_shape(spec.model, expected_vocab_size(spec.tokenizer))),
        **measured,
    )


def _versions(packages: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _conditions(comparison: Comparison) -> str:
    """Return the sentences above the table."""
    spec, subject, sample = comparison.spec, comparison.subject, geometry(comparison.spec.objective)
    shape = resolve_shape(spec.model, expected_vocab_size(spec.tokenizer))
    versions = ", ".join(f"{name} {number}" for name, number in _versions(_PACKAGES).items())
    ranks = f"{subject.ranks} rank{'s' if subject.ranks > 1 else ''}"
    return fill(
        f"{datetime.now(UTC).date()}, {ranks} on {subject.device}; {versions}. `python -m {_name(comparison)}`: "
        f"{count_parameters(shape):,} parameters, {sample.input_tokens} + {sample.target_tokens} tokens, "
        f"{spec.optimizer.global_batch_sequences} sequences a step, random tokens, each step's loss read. "
        "Medians of the repeats, their range in brackets; ratios are of measurements of the same round.",
        width=120,
        break_on_hyphens=False,
        break_long_words=False,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measure how fast this project trains a recipe next to its peers, on this machine, in one run.

::

    python -m benchmarks.training_peers base --root DIR [--ranks N] [--repeats 3] [--steps 20] [--until-seconds 570]
        [--only ours,trainer] [--set layout.micro_batch_sequences=64] [--into benchmarks/results/NAME.json]

- ours: this project, as ``t5-pretrain bench`` measures it.
- ours dense: with experts only: the same recipe without them. At one expert per token, both compute with equally many
  parameters for each token.
- trainer: Hugging Face's Trainer with DeepSpeed ZeRO-2, not tuned.
- pytorch: plain PyTorch: Hugging Face's T5, compiled, fused AdamW; DDP on several ranks.
- pytorch tuned: the same with the fastest attention of transformers and the fastest micro-batch, found in short trials.
- deepspeed: DeepSpeed's engine with Hugging Face's T5, compiled, in the recipe's ZeRO stage, tuned in the same way.

All train the same shape in the same global batch on random tokens. Each runs in processes of its own. Contenders that
are not tuned come first, then the trials, then those that are tuned; in each group, the repeats take turns. Times are
medians of the steps after warm-up. The peers of a pipeline run without one.

A finished measurement is appended to DIR/outcomes.jsonl at once. The next command with the same root does not repeat
it, unless code, versions, machine or number of steps have changed: it says which measurements it does not use. How long
each took is recorded too, and with --until-seconds nothing is started that would take longer than what is left.

Expected, until a machine has its own durations: 150 s for each measurement and trial of a model like base on one GPU,
most of it for start and compilation; less once kernels are in the compiler's caches. Three repeats of ours, trainer and
pytorch take about 15 minutes, and the 4 to 8 trials and three repeats of both tuned peers another 25. The exit code is
1 if a contender failed, and 3 if time ran out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec

from benchmarks.comparison import Comparison, add, compare, parser, result, speed_notes
from benchmarks.peer_outcomes import (
    DENSE,
    OURS,
    TRIAL,
    Outcomes,
    Tuning,
    fastest,
    next_trial,
    rows,
    untuned,
)
from benchmarks.time_budget import NOT_FINISHED, OutOfTime
from t5train.errors import T5TrainError
from t5train.spec import RunSpec

UNTUNED, TUNED = (OURS, "trainer", "pytorch", DENSE), ("pytorch tuned", "deepspeed")
CONTENDERS = (*UNTUNED, *TUNED)


def main() -> int:
    """Measure what is not yet measured, and print the table. Return 1 if a contender failed, 3 if time ran out."""
    given = _arguments()
    comparison = compare(given)
    if comparison.spec.optimizer.precision == "fp16":
        raise SystemExit("optimizer.precision is fp16, but the peers train in bf16 or fp32: set one of these")
    contenders = _contenders(given.only, comparison.spec)
    print(f"{_name(comparison)}: {comparison.subject.device}", flush=True)
    outcomes = Outcomes(comparison.root / "outcomes.jsonl", comparison.subject)
    code = _measure_all(comparison, outcomes, contenders, given.repeats)
    what = f"Training {comparison.subject.recipe} next to peers"
    notes = speed_notes(comparison)
    result(comparison, what, _name(comparison), notes, rows(outcomes, CONTENDERS)).show(given.into)
    return code


def _name(comparison: Comparison) -> str:
    return comparison.name("benchmarks.training_peers")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, steps=20)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--only", help=f"comma-separated contenders: {', '.join(CONTENDERS)}")
    return made.parse_args()


def _contenders(only: str | None, spec: RunSpec) -> list[str]:
    chosen = only.split(",") if only else list(CONTENDERS)
    if unknown := set(chosen) - set(CONTENDERS):
        raise SystemExit(f"--only names {sorted(unknown)}: choose from {', '.join(CONTENDERS)}")
    if "trainer" in chosen and find_spec("accelerate") is None:
        print("trainer is left out, as it needs accelerate: pip install accelerate", flush=True)
        chosen.remove("trainer")
    if DENSE in chosen and not (spec.model.moe.num_experts and spec.model.moe.top_k == 1):
        chosen.remove(DENSE)
    return chosen


def in_order(contenders: Sequence[str], repeats: int) -> Iterator[tuple[str, int]]:
    """Yield contenders and repeats, the most important first."""
    for group in (UNTUNED, TUNED):
        for repeat in range(1, repeats + 1):
            yield from ((contender, repeat) for contender in group if contender in contenders)


def _measure_all(comparison: Comparison, outcomes: Outcomes, contenders: Sequence[str], repeats: int) -> int:
    """Measure what is not yet measured, as far as time allows. Return the exit code."""
    failed: set[str] = set()
    try:
        for contender, repeat in in_order(contenders, repeats):
            if contender not in failed and not _measure(comparison, outcomes, contender, repeat):
                failed.add(contender)
    except OutOfTime as error:
        print(f"stopped: {error}. The same command continues", flush=True)
        return NOT_FINISHED
    finally:
        comparison.budget.close()
    return 1 if failed else 0


def _measure(comparison: Comparison, outcomes: Outcomes, contender: str, repeat: int) -> bool:
    """Measure a contender, with the trials that this needs, unless that is done. Return False if it failed."""
    size = comparison.spec.layout.micro_batch_sequences
    try:
        if contender in {OURS, DENSE}:
            tuning = Tuning(size)
            if not outcomes.has(contender, repeat, tuning):
                add(comparison, outcomes, contender, repeat, tuning)
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
        from t5train.train.trainer_benchmark import model_class

        largest = comparison.spec.optimizer.global_batch_sequences // comparison.subject.ranks
        attentions = ("sdpa", "eager") if model_class(comparison.spec)._supports_sdpa else ("eager",)
        while trial := next_trial(size, largest, attentions, outcomes.of(peer)):
            add(comparison, outcomes, peer, TRIAL, trial)
        choose = fastest
    else:
        choose = partial(untuned, size)
    while (tuning := choose(outcomes.of(peer))) and not outcomes.has(peer, repeat, tuning):
        add(comparison, outcomes, peer, repeat, tuning)


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tune the recipe reverse_and_sort, from pairs to a published model, with three seeds; and once with kills.

::

    python -m tests.acceptance.finetuning_trial --into benchmarks/results/finetuning_trial.json

Plain transformers loads each published model and decodes the source of every pair of the test split greedily. No source
of that split may be trained on, and at least 95% of the outputs must be the targets. The fourth run repeats the first,
and all of its processes are killed (SIGKILL) at three random steps: the published weights must have the same sha256,
and the witness the same loss curve and metrics. Otherwise the command prints what is wrong, and fails.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measured_conditions import commit
from benchmarks.measured_result import Figure, Result, add_into
from infra.node.processes import Belongs, end, variable
from t5train.data.pairs.pairs import Pair, read_pairs, tasks_of
from t5train.records import metrics
from t5train.records.stage_records import Pairs
from t5train.spec.recipes import recipe
from tests.acceptance.kills.independent_tags import sha256_of
from tests.support.hardware import hardware
from tests.support.waiting import await_that

RECIPE, RUN = "reverse_and_sort", "trial"
SEEDS = (0, 1, 2)
KILLS = 3
LEAST_EXACT_MATCH = 0.95
_MARK = "T5_FINETUNING_TRIAL"
"""Every process of a command carries its root in this environment variable."""
_BATCH = 128
_SAME = ("tensors", "curve", "validation")
"""What the witness of the killed run must have like that of the undisturbed one."""


@dataclass
class Trial:
    """A run in a root of its own, and how long its commands took."""

    root: Path
    seed: int
    seconds: float = 0.0
    killed_after: list[int] = field(default_factory=list)
    """The last recorded step at each kill."""

    @property
    def run(self) -> Path:
        return self.root / "runs" / RUN

    @property
    def published(self) -> Path:
        return self.root / "published" / RUN

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flows.cli", "finetune", RECIPE, "--root", str(self.root), "--name", RUN]
        command += ["--set", f"optimizer.seed={self.seed}"]
        self.root.mkdir(exist_ok=True)
        with open(self.root / "output.log", "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen(command, env=os.environ | {_MARK: str(self.root)}, **pipes)

    def finish(self) -> None:
        """Run the command to its end. Raises RuntimeError if it fails."""
        began = time.monotonic()
        if code := self.start().wait():
            raise RuntimeError(f"exited with {code}:\n{(self.root / 'output.log').read_text()[-4000:]}")
        self.seconds += time.monotonic() - began

    def kill_after(self, step: int) -> None:
        """Start the command, and kill all of its processes at once when a step is recorded."""
        began, before = time.monotonic(), self._attempts()
        process = self.start()
        await_that(lambda: process.poll() is not None or (self._attempts() > before and self.last_step() >= step))
        left = end(self._belongs(), grace_seconds=0)
        if process.wait() != -9 or left:
            raise RuntimeError(f"exited with {process.returncode} before step {step}; processes left: {sorted(left)}")
        self.seconds += time.monotonic() - began
        self.killed_after.append(self.last_step())

    def last_step(self) -> int:
        lines = metrics.read(self.run / "metrics.jsonl")
        return int(lines[-1]["step"] or 0) if lines else 0

    def witness(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "witness/witness.json").read_text()))

    def weights(self) -> Mapping[str, str]:
        return {path.name: sha256_of(path) for path in self.published.glob("*.safetensors")}

    def pairs(self, split: str) -> list[Pair]:
        (folder,) = (self.root / "pairs").iterdir()
        record = Pairs.load(folder)
        return [pair for task in range(len(tasks_of(record))) for pair in read_pairs(record, split, task)]

    def _attempts(self) -> int:
        return len([*self.run.glob("attempts/*/rank-*.pid")])

    def _belongs(self) -> Belongs:
        return lambda pid: variable(pid, _MARK) == str(self.root)


def run_trials(folder: Path, seed: int) -> tuple[list[Trial], list[str]]:
    """Run all trials; return them, and what is wrong. The seed decides when the last one is killed."""
    trials = [Trial(folder / f"seed-{each}", each) for each in SEEDS]
    for trial in trials:
        trial.finish()
        print(f"seed {trial.seed}: {trial.seconds:.0f} s", flush=True)
    killed = Trial(folder / "killed", SEEDS[0])
    for step in sorted(random.Random(seed).sample(range(1, recipe(RECIPE).optimizer.num_steps), KILLS)):
        killed.kill_after(step)
        print(f"killed after step {killed.killed_after[-1]}", flush=True)
    killed.finish()
    return [*trials, killed], differences(trials[0], killed)


def differences(undisturbed: Trial, killed: Trial) -> list[str]:
    """What a killed run published and recorded differently."""
    one, other = undisturbed.witness(), killed.witness()
    found = [f"killed: the witness has another {name}" for name in _SAME if one[name] != other[name]]
    return found + (["killed: other weights"] if undisturbed.weights() != killed.weights() else [])


def judged(trial: Trial) -> tuple[Mapping[str, Figure], list[str]]:
    """The row of a trial, and what is wrong with it."""
    tested = trial.pairs("test")
    trained = {pair.source for pair in trial.pairs("train")}
    hits = sum(found == pair.target for found, pair in zip(generated(trial.published, tested), tested, strict=True))
    recorded = trial.witness()["validation"]
    row: dict[str, Figure] = {
        "run": "killed" if trial.killed_after else "undisturbed",
        "seed": trial.seed,
        "minutes": round(trial.seconds / 60, 1),
        "killed after steps": ", ".join(map(str, trial.killed_after)),
        "unseen pairs": len(tested),
        "exact match, generated": round(hits / len(tested), 4),
        "exact match, recorded": round(recorded["test_exact_match"], 4),
        "pairs recorded": recorded["test_pairs"],
        "weights, sha256": ", ".join(each[:16] for each in trial.weights().values()),
    }
    where, faults = f"{row['run']}, seed {trial.seed}", list[str]()
    if seen := [pair.source for pair in tested if pair.source in trained]:
        faults.append(f"{where}: {len(seen)} sources of the test split are trained on, such as {seen[0]!r}")
    if hits / len(tested) < LEAST_EXACT_MATCH:
        faults.append(f"{where}: {hits} of {len(tested)} targets are generated, fewer than {LEAST_EXACT_MATCH:.0%}")
    if not json.loads((trial.published / "certificate.json").read_text())["passed"]:
        faults.append(f"{where}: not certified")
    return row, faults


def generated(published: Path, pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield what plain transformers decodes greedily for the source of each pair."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    for first in range(0, len(pairs), _BATCH):
        sources = [pair.source for pair in pairs[first : first + _BATCH]]
        inputs = tokenizer(sources, return_tensors="pt", padding=True)
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=recipe(RECIPE).pairs.target_tokens)
        yield from tokenizer.batch_decode(outputs, skip_special_tokens=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides at which steps the last run is killed")
    add_into(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="finetuning-", ignore_cleanup_errors=True) as folder:
        trials, faults = run_trials(Path(folder), options.seed)
        rows, of_trials = zip(*map(judged, trials), strict=True)
    faults += [fault for each in of_trials for fault in each]
    found = "; ".join(faults) or "The killed run's weights are bit-equal, and its loss curve and metrics are the same."
    Result(
        what="Fine-tuning from pairs to a published model: three seeds, and the first once more with kills",
        command="make finetuning-trial",
        commit=commit(),
        machine=hardware(),
        notes=f"Load average {os.getloadavg()[0]:.1f}. {found}",
        rows=rows,
    ).show(options.into)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

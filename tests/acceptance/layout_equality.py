"""Compare every layout with plain data parallelism (ZeRO 0): one seed, no dropout, fp32, CPU ranks.

    python -m tests.acceptance.layout_equality [--steps 50] [--ranks 2 4] [--into docs/evidence/layouts.md]

A model of the demo's size is trained in each layout under three conditions, always with the same number of ranks. Its
consolidated weights, losses and gradient norms are compared with those of ZeRO 0 under the same condition. The
difference in weights is the largest of any element, relative to the root mean square of its tensor. The difference in
losses and norms is the largest of any step, relative to the value itself. ``--into`` puts the tables into a file,
in their section of it.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from infra.head.launch.local_launch import LaunchSpec, launch
from t5train.checkpoint.consolidate import consolidate
from t5train.records import metrics
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.acceptance.result_table import write_section
from tests.support.generated_text import make_shards
from tests.support.hardware import hardware

BATCH = 16
PLAIN = "ZeRO 0"
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"layout.zero_stage": 0},
    "ZeRO 1": {"layout.zero_stage": 1},
    "ZeRO 1, optimizer offloaded": {"layout.zero_stage": 1, "layout.offload": "optimizer"},
    "ZeRO 2": {"layout.zero_stage": 2},
    "ZeRO 2, optimizer offloaded": {"layout.zero_stage": 2, "layout.offload": "optimizer"},
    "ZeRO 3": {"layout.zero_stage": 3},
    "ZeRO 3, all offloaded": {"layout.zero_stage": 3, "layout.offload": "all"},
    "pipeline of 2 stages": {"layout.zero_stage": 1, "layout.pipeline_stages": 2},
}
# The gradient clip and the passes per step of each condition.
CONDITIONS: Mapping[str, tuple[float, int]] = {
    "one pass a step": (0.0, 1),
    "one pass, gradients clipped": (0.1, 1),
    "four passes": (0.0, 4),
}


@dataclass(frozen=True)
class Trained:
    """The final weights of a run, and the losses and gradient norms of every step."""

    weights: dict[str, np.ndarray]
    losses: np.ndarray
    norms: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> "Trained":
        consolidate(folder / "checkpoints", folder / "weights")
        lines = [line for line in metrics.read(folder / "metrics.jsonl") if "loss" in line]
        logged = [np.array([line[name] for line in lines], dtype=np.float64) for name in ("loss", "gradient_norm")]
        return cls(load_file(folder / "weights/model.safetensors"), *logged)


@dataclass(frozen=True)
class Difference:
    """The largest differences of two runs: weights relative to their tensor's RMS, losses and norms to themselves."""

    weights: float
    losses: float
    norms: float

    @classmethod
    def between(cls, one: Trained, other: Trained) -> "Difference":
        weights = max(_distance(one.weights[name], whole) for name, whole in other.weights.items())
        return cls(weights, *(float(np.abs(a / b - 1).max()) for a, b in _pairs(one, other)))


def _pairs(one: Trained, other: Trained) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(one.losses, other.losses), (one.norms, other.norms)]


def _distance(tensor: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(tensor - other).max() / np.sqrt(np.square(other, dtype=np.float64).mean()))


def spec_of(layout: str, condition: str, ranks: int, steps: int) -> RunSpec:
    """A small run.

    Every layout has micro-batches of the same size, so a pipeline, with fewer replicas, takes more of them.
    """
    clip, passes = CONDITIONS[condition]
    return recipe("smoke").with_settings(
        {
            "tokenizer.vocab_size": 500,
            "objective.input_tokens": 32,
            "optimizer.num_steps": steps,
            "optimizer.warmup_steps": steps // 5,
            "optimizer.global_batch_sequences": BATCH,
            "optimizer.gradient_clip": clip,
            "cluster.ranks": ranks,
            "layout.micro_batch_sequences": BATCH // ranks // passes,
            "storage.checkpoint_every_steps": steps,
            "storage.validate_sequences": BATCH,
            **LAYOUTS[layout],
        }
    )


def train_all(root: Path, shards: TokenShards, ranks: int, steps: int) -> dict[tuple[str, str], Trained]:
    """Train every layout under every condition, in one launch."""
    folders = {key: root / f"{ranks}-{number}" for number, key in enumerate(itertools.product(LAYOUTS, CONDITIONS))}
    jobs = []
    for (layout, condition), folder in folders.items():
        folder.mkdir()
        spec = spec_of(layout, condition, ranks, steps).model_dump(mode="json")
        jobs.append({"spec": spec, "shards": str(shards.path), "run_folder": str(folder)})
    (root / "jobs.json").write_text(json.dumps(jobs), "utf-8")
    program = str(Path(__file__).with_name("layout_ranks.py")), str(root / "jobs.json")
    launch(LaunchSpec(lambda _: program, root / f"launch-{ranks}", ranks, "cpu", environment={"OMP_NUM_THREADS": "1"}))
    return {key: Trained.of(folder) for key, folder in folders.items()}


def compare(trained: Mapping[tuple[str, str], Trained]) -> dict[tuple[str, str], Difference]:
    """Compare every layout with plain data parallelism under the same condition."""
    return {
        (layout, condition): Difference.between(run, trained[PLAIN, condition])
        for (layout, condition), run in trained.items()
        if layout != PLAIN
    }


def table(found: Mapping[tuple[str, str], Difference], ranks: int) -> str:
    lines = [[f"{ranks} ranks: weights (losses)", *CONDITIONS], ["---"] * (1 + len(CONDITIONS))]
    lines += [[layout, *(_cell(found[layout, condition]) for condition in CONDITIONS)] for layout in [*LAYOUTS][1:]]
    norms = max(difference.norms for difference in found.values())
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in lines), "", f"Gradient norms differ by {norms:.0e} at most."]
    )


def _cell(found: Difference) -> str:
    weights = f"{found.weights:.0e}" if found.weights else "bit-equal"
    return f"{weights} ({found.losses:.0e})" if found.losses else weights


def measure(steps: int, ranks: Sequence[int]) -> str:
    """Train and compare; return a line about date and hardware, then the tables."""
    heading = f"{time.strftime('%Y-%m-%d')}, {hardware()}, torch {torch.__version__}, {steps} steps."
    with tempfile.TemporaryDirectory() as scratch:
        root, spec = Path(scratch), spec_of(PLAIN, "one pass a step", 2, steps)
        _, shards = make_shards(spec, root)
        tables = [table(compare(train_all(root, shards, count, steps)), count) for count in ranks]
    return "\n\n".join([heading, *tables])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--into", type=Path, help="write the tables into their section of this file")
    options = parser.parse_args()
    text = measure(options.steps, options.ranks)
    print(text)
    if options.into:
        write_section(options.into, "tests/acceptance/layout_equality.py", text)


if __name__ == "__main__":
    main()

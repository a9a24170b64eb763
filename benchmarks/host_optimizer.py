"""Compare an optimizer step in host memory with DeepSpeedCPUAdam's, on a flat partition of T5 v1.1 base as in ZeRO.

::

    python -m benchmarks.host_optimizer [--preset base] [--rounds 5]

AdamWRms updates each tensor in proportion to its RMS; DeepSpeedCPUAdam updates all tensors alike. Both use the operator
that DeepSpeed compiles. AdamWRms is also measured with torch's operators. The optimizers take turns, on one thread; the
table shows the median CPU seconds of the rounds. Needs 32 bytes of memory per parameter.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.engine.optimizer import AdamWRms, HostAdam, Partition, Segment
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec

BETAS, EPSILON, RATE = (0.9, 0.999), 1e-8, 1e-3


def main() -> None:
    """Print one table: CPU seconds per step, and the ratio to DeepSpeedCPUAdam in the same run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--rounds", type=int, default=5)
    add_into(parser)
    arguments = parser.parse_args()
    sizes = _sizes(arguments.preset)
    flat = torch.randn(sum(sizes)).mul_(0.02)
    flat.grad = torch.randn_like(flat).mul_(1e-3)
    seconds = _measure(_optimizers(flat, sizes), arguments.rounds)
    peer = statistics.median(seconds["DeepSpeedCPUAdam"])
    rows: list[dict[str, Figure]] = [
        {
            "optimizer": name,
            "CPU seconds per step": round(statistics.median(found), 3),
            "relative to DeepSpeedCPUAdam": round(statistics.median(found) / peer, 2),
        }
        for name, found in seconds.items()
    ]
    notes = f"One thread, {sum(sizes):,} parameters in {len(sizes)} tensors, median of {arguments.rounds} rounds."
    what = "A step of the optimizer in host memory, next to DeepSpeedCPUAdam"
    measured_here(what, rows, notes).show(arguments.into)


def _sizes(preset: str) -> list[int]:
    with torch.device("meta"):
        shape = resolve(ModelSpec.model_validate({"preset": preset}), 32_100)
        return [parameter.numel() for parameter in T5(shape, decoder_start_id=0).parameters()]


def _optimizers(flat: torch.Tensor, sizes: list[int]) -> dict[str, Callable[[], Any]]:
    """Return the step function of each optimizer. They share weights and gradients, but not moments."""
    ends = list(accumulate(sizes))
    segments = [
        Segment(end - size, end, owner, size, 0) for owner, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    ours = {}
    for name, host_adam in (("AdamWRms", HostAdam()), ("AdamWRms, torch's operators", None)):
        optimizer = AdamWRms([flat], BETAS, EPSILON, 0.0, relative=True, host_adam=host_adam)
        optimizer.param_groups[0]["lr"] = RATE
        optimizer.attach({flat: Partition(segments, len(sizes))}, None)
        ours[name] = optimizer.step
    return {"DeepSpeedCPUAdam": DeepSpeedCPUAdam([flat], RATE, betas=BETAS, eps=EPSILON).step, **ours}


def _measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each step, in turns, after a first step that allocates the moments."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if turn:
                seconds[name].append(time.process_time() - began)
    return seconds


if __name__ == "__main__":
    main()

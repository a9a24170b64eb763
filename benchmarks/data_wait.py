"""Measure whether the loader prepares batches in the background as fast as an accelerator takes them.

    python -m benchmarks.data_wait [--batch 128] [--step-ms 114] [--steps 200] [--windows 4000]

Batches of span-corrupted samples, 512 + 114 tokens, are read from token shards and prepared by the thread that training
uses. A consumer takes one per step. First it waits during a step without the interpreter's lock, as training does while
the accelerator works; then it computes in Python throughout, so that the thread gets only its turns. The table shows
how long the consumer waited for batches, and the CPU time of a batch. The goal is a wait of less than 1%.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measured_result import Figure, add_into, measured_here
from benchmarks.reading import python_documentation
from t5train.data.samples.loader import PREFETCHED_BATCHES, Batch, Prefetched, Samples
from t5train.spec import ObjectiveSpec

Step = Callable[[float], None]


def main() -> None:
    """Make token shards, take steps, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=114.0, help="duration of a step without the wait")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--windows", type=int, default=4000)
    add_into(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shards = python_documentation(Path(folder), given.windows)
        samples = Samples(shards, "train", ObjectiveSpec(input_tokens=512), seed=0)
        rows = list[dict[str, Figure]]()
        for name, step in (("waits", time.sleep), ("computes in Python", compute)):
            waits = waited(batches(samples, given.batch), step, given.step_ms / 1e3, given.steps)
            share = sum(waits) / (sum(waits) + given.steps * given.step_ms / 1e3)
            rows.append(
                {
                    "during a step, the consumer": name,
                    "waited for data": f"{share:.3%}",
                    "longest wait, ms": round(max(waits) * 1e3, 1),
                    "CPU ms per batch": round(cpu_seconds(samples, given.batch) * 1e3, 1),
                }
            )
    notes = f"{given.steps} steps of {given.step_ms:.0f} ms, batches of {given.batch} samples of 512 + 114 tokens."
    measured_here("How long training waits for data", rows, notes).show(given.into)


def batches(samples: Samples, size: int) -> Iterator[Batch]:
    """Yield batches without end."""
    start = 0
    while True:
        yield samples.batch(start, size)
        start += size


def waited(source: Iterator[Batch], step: Step, step_seconds: float, steps: int) -> list[float]:
    """Return how long each of ``steps`` waited for its batch, after a few steps that fill the queue."""
    waits = []
    with Prefetched(source, PREFETCHED_BATCHES) as prefetched:
        for number in range(PREFETCHED_BATCHES + steps):
            before = prefetched.waited_seconds
            next(prefetched)
            if number >= PREFETCHED_BATCHES:
                waits.append(prefetched.waited_seconds - before)
            step(step_seconds)
    return waits


def compute(seconds: float) -> None:
    """Compute in Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def cpu_seconds(samples: Samples, size: int, number: int = 20) -> float:
    """Return the CPU time of preparing a batch."""
    started = time.thread_time()
    for each in range(number):
        samples.batch(each * size, size)
    return (time.thread_time() - started) / number


if __name__ == "__main__":
    main()

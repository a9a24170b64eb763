"""Compare the computed order of samples with a NumPy permutation that is made at the beginning of each epoch.

    python -m benchmarks.sample_order [--samples 20000000] [--batch 128] [--rounds 7]
    python -m benchmarks.sample_order --samples 1000000000 --without-table

Both return the ids of the samples of each batch, in random order; CPU seconds of one process are measured. The time and
memory at the beginning of an epoch are shown separately, because every rank needs them again at each epoch.

With --without-table, only the computed order is measured, for the batches from 1,000 before the end of an epoch to
1,000 after it: a table of 10^9 samples takes 8 GB.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.data.samples.keyed_random import permuted
from tests.support.hardware import hardware

SECONDS_A_ROUND = 0.5


def begin_with_table(samples: int) -> tuple[float, int]:
    """Return the CPU seconds and the peak bytes of making NumPy's permutation at the beginning of an epoch."""
    started = time.process_time()
    np.random.default_rng(0).permutation(samples)
    seconds = time.process_time() - started
    return seconds, peak_bytes(lambda: np.random.default_rng(0).permutation(samples))


def peak_bytes(action: Callable[[], object]) -> int:
    """Return the peak memory that Python and NumPy allocate during an action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds_a_batch(ids_at: Callable[[np.ndarray], object], samples: int, batch: int) -> float:
    """Return the CPU seconds for the ids of a batch, measured for about half a second."""
    done, started = 0, time.process_time()
    while (spent := time.process_time() - started) < SECONDS_A_ROUND:
        ids_at((np.arange(batch) + done * batch) % samples)
        done += 1
    return spent / done


def main() -> None:
    """Measure both in turns, and print one table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--samples", type=int, default=20_000_000)
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--without-table", action="store_true")
    add_into(arguments)
    given = arguments.parse_args()
    if given.without_table:
        across_an_epoch(given.samples, given.batch)
        return
    epochs = np.zeros(given.batch, dtype=np.int64)
    table = np.random.default_rng(0).permutation(given.samples)

    def computed(places: np.ndarray) -> np.ndarray:
        return permuted(places, given.samples, 0, 1, epochs)

    rounds = [
        (
            seconds_a_batch(lambda places: table[places], given.samples, given.batch),
            seconds_a_batch(computed, given.samples, given.batch),
        )
        for _ in range(given.rounds)
    ]
    looked_up, computing = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    begin_seconds, begin_bytes = begin_with_table(given.samples)
    bytes_computed = peak_bytes(lambda: computed(np.arange(given.batch)))
    rows = compared((begin_seconds, looked_up, begin_bytes), (computing, bytes_computed))
    notes = f"{given.samples:,} samples, batches of {given.batch}, numpy {np.__version__}."
    measured_here("The order of samples: computed, next to numpy's permutation", rows, notes).show(given.into)


def across_an_epoch(samples: int, batch: int, batches: int = 1000) -> None:
    """Compute the order of the batches around the end of an epoch, and print their times and the peak memory."""
    first = samples - batches * batch - batch // 2  # one batch has samples of both epochs

    def computed(number: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(first + number * batch, first + (number + 1) * batch), samples)
        return permuted(places, samples, 0, 1, epochs)

    times = list[float]()
    for number in range(2 * batches):
        started = time.process_time()
        computed(number)
        times.append(time.process_time() - started)
    print(f"order of {samples:,} samples, {2 * batches} batches of {batch} around the end of an epoch, {hardware()}")
    print(
        f"a batch: median {1e6 * statistics.median(times):.0f} us, longest {1e6 * max(times):.0f} us; memory "
        f"{peak_bytes(lambda: computed(batches)):,} bytes"
    )


def compared(table: tuple[float, float, int], computed: tuple[float, int]) -> list[dict[str, Figure]]:
    """Return the pause at an epoch, the time of a batch and the memory of both ways."""
    named = {"numpy's permutation": table, "t5-pretrain, computed": (0.0, *computed)}
    return [
        {
            "order": name,
            "pause at an epoch, CPU s": round(pause, 2),
            "per batch, µs": round(1e6 * batch_seconds, 1),
            "memory, bytes": held,
        }
        for name, (pause, batch_seconds, held) in named.items()
    ]


if __name__ == "__main__":
    main()

"""The measurement of the wait for data: it sees a loader that is too slow, and does not count what is hidden."""

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.data_wait import waited
from t5train.data.samples.loader import Batch

NONE = np.zeros(0, np.int32)


def batches(seconds: float) -> Iterator[Batch]:
    while True:
        time.sleep(seconds)
        yield Batch(NONE, NONE, NONE, NONE)


def test_only_a_loader_that_is_slower_than_a_step_is_waited_for() -> None:
    waits = waited(batches(0.1), time.sleep, 0.05, steps=6)
    assert len(waits) == 6
    assert sum(waits) > 0.15
    assert sum(waited(batches(0.001), time.sleep, 0.2, steps=5)) < 0.2

"""Compare span corruption of whole batches with T5's published algorithm, which data collators apply row by row.

    python -m benchmarks.span_corruption [--batch 128] [--rounds 7]

568 tokens become 512 inputs and 114 targets (noise density 0.15, mean span 3). The two take turns in one process; the
table shows the median of the rounds in samples per CPU second.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.measured_result import Figure, add_into, measured_here
from t5train.data.samples import keyed_random
from t5train.data.samples.span_corruption import corrupt, geometry
from t5train.spec import ObjectiveSpec

VOCAB_SIZE, EOS_ID, PAD_ID = 32_100, 1, 0
NOISE_DENSITY, MEAN_SPAN_TOKENS = 0.15, 3.0
SECONDS_A_ROUND = 1.0


def random_segmentation(num_items: int, num_segments: int) -> np.ndarray:
    """Draw the lengths of ``num_segments`` non-empty segments of ``num_items``, all divisions equally likely."""
    is_boundary = np.arange(num_items - 1) < num_segments - 1
    np.random.shuffle(is_boundary)
    segment_of = np.cumsum(np.concatenate([[False], is_boundary]))
    return np.unique(segment_of, return_counts=True)[1]


def random_spans_noise_mask(length: int) -> np.ndarray:
    """Draw the noise mask of Raffel et al. 2020: kept stretches alternate with noise spans."""
    num_noise = min(max(int(np.round(length * NOISE_DENSITY)), 1), length - 1)
    num_spans = max(int(np.round(num_noise / MEAN_SPAN_TOKENS)), 1)
    noise = random_segmentation(num_noise, num_spans)
    kept = random_segmentation(length - num_noise, num_spans)
    starts = np.cumsum(np.stack([kept, noise], axis=1).reshape(-1))[:-1]
    is_start = np.zeros(length, dtype=np.int64)
    is_start[starts] = True
    return np.cumsum(is_start) % 2 == 1


def sentinel_ids(mask: np.ndarray) -> np.ndarray:
    """Return a sentinel where a masked stretch begins, -1 in the rest of it, and 0 elsewhere."""
    begins = mask & ~np.roll(mask, 1, axis=-1)
    begins[:, 0] = mask[:, 0]
    numbers = np.where(begins, np.cumsum(begins, axis=-1), 0)
    return np.where(begins, VOCAB_SIZE - numbers, 0) - (mask & ~begins)


def filtered(ids: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Return the ids with each masked stretch replaced by its sentinel, followed by EOS."""
    replaced = np.where(sentinels != 0, sentinels, ids)
    rows = replaced[replaced >= 0].reshape(len(ids), -1)
    return np.concatenate([rows, np.full((len(ids), 1), EOS_ID, dtype=rows.dtype)], axis=-1)


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Make a batch of examples from ``datasets``, as a data collator for T5's objective does."""
    ids = np.array([example["input_ids"] for example in examples])
    mask = np.stack([random_spans_noise_mask(ids.shape[1]) for _ in range(len(ids))])
    inputs = filtered(ids, sentinel_ids(mask))
    labels = filtered(ids, sentinel_ids(~mask))
    shifted = np.concatenate([np.full((len(ids), 1), PAD_ID), labels[:, :-1]], axis=-1)
    return {"input_ids": inputs, "labels": labels, "decoder_input_ids": shifted}


def samples_per_cpu_second(one_batch: Callable[[], object], batch: int) -> float:
    """Return the rate, measured for about a second."""
    done, started = 0, time.process_time()
    while (spent := time.process_time() - started) < SECONDS_A_ROUND:
        one_batch()
        done += batch
    return done / spent


def main() -> None:
    """Run both in turns, and print one table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=7)
    add_into(arguments)
    given = arguments.parse_args()
    shape = geometry(ObjectiveSpec(noise_density=NOISE_DENSITY, mean_span_tokens=MEAN_SPAN_TOKENS, input_tokens=512))
    windows = np.random.default_rng(0).integers(2, 32_000, (given.batch, shape.window_tokens), dtype=np.uint16)
    examples = [{"input_ids": row} for row in windows.astype(np.int64)]
    ids = np.arange(given.batch)

    def ours() -> object:
        return corrupt(windows, keyed_random.keys(0, 0, ids), shape, VOCAB_SIZE - 1, EOS_ID)

    peer, own = collate(examples), corrupt(windows, keyed_random.keys(0, 0, ids), shape, VOCAB_SIZE - 1, EOS_ID)
    assert peer["input_ids"].shape == own[0].shape == (given.batch, 512)
    assert peer["labels"].shape == own[1].shape == (given.batch, 114)
    peers, owns = [], []
    for _ in range(given.rounds):
        peers.append(samples_per_cpu_second(lambda: collate(examples), given.batch))
        owns.append(samples_per_cpu_second(ours, given.batch))
    peer_rate, own_rate = statistics.median(peers), statistics.median(owns)
    rates = {"a collator that works row by row": peer_rate, "t5-pretrain, a batch at a time": own_rate}
    rows: list[dict[str, Figure]] = [
        {"program": name, "samples per CPU second": round(rate), "ratio": round(rate / peer_rate, 1)}
        for name, rate in rates.items()
    ]
    notes = f"568 to 512 + 114 tokens, batch {given.batch}, numpy {np.__version__}."
    what = "Span corruption of batches, next to a collator that works row by row"
    measured_here(what, rows, notes).show(given.into)


if __name__ == "__main__":
    main()

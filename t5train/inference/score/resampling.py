"""Bootstrap: what sums over the rows would be if other rows had been drawn.

The rows are drawn as sacrebleu draws them, so BLEU and chrF have its intervals and p-values. It holds all resamples in
memory, which are 7 GB for chrF of 100,000 rows. Here, a resample is how often each row was drawn, and its sums are a
product of matrices.
"""

import numpy as np

from t5train.progress import Progress

_DRAWN_AT_ONCE = 1 << 22  # 32 MiB of row numbers


def resampled_sums(statistics: np.ndarray, resamples: int, seed: int, progress: Progress) -> np.ndarray:
    """Return the sums over rows that are drawn with replacement: float64 [resamples, columns].

    ``statistics`` [rows, columns] are whole numbers. The same seed draws the same rows for any columns.
    """
    rows, random = len(statistics), np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // rows)
    blocks = []
    for start in range(0, resamples, at_once):
        drawn = random.choice(rows, size=(min(at_once, resamples - start), rows))
        times = np.stack([np.bincount(each, minlength=rows) for each in drawn])
        blocks.append(times.astype(np.float64) @ statistics)
        progress("resamples drawn", start + len(drawn), resamples)
    return np.concatenate(blocks)


def spread_of(scores: np.ndarray) -> tuple[float, float]:
    """Return the mean of scores [resamples], and half of the distance between their 2.5% and 97.5% quantiles."""
    from sacrebleu.significance import estimate_ci

    mean, half_interval = estimate_ci(scores)
    return float(mean), float(half_interval)


def p_value(one: np.ndarray, other: np.ndarray, difference: float) -> float:
    """Return the p-value of sacrebleu's paired bootstrap test, for two systems' scores [resamples] of the same rows.

    It is 1 if the two differ in no resample, for which sacrebleu's formula gives the smallest p-value that it has. The
    formula is repeated here because sacrebleu's PairedTest takes texts, and only metrics of its own.
    """
    differences = np.abs(other - one)
    if not differences.any():
        return 1.0
    centred = differences - differences.mean()
    return (np.count_nonzero(centred > abs(difference)) + 1) / (len(centred) + 1)

"""T5's span corruption (Raffel et al. 2020, section 3.1.4), computed for whole batches.

Each window of tokens becomes an input, in which every noise span is replaced by one sentinel, and a target, in which
every kept stretch is replaced by one sentinel. Both end with EOS. A window begins with a kept stretch and ends with a
noise span. The lengths of the noise spans are drawn uniformly from all ways to divide the noise tokens into non-empty
spans. The lengths of the kept stretches are drawn in the same way.

Documents in a window end with EOS, which is masked like any other token, as in nanoT5; T5 itself joins documents
without it (docs/explanation/objective.md).
"""

from typing import NamedTuple

import numpy as np

from t5train.data.samples.keyed_random import Bits, bits
from t5train.errors import SpecError
from t5train.spec import NUM_SENTINELS, ObjectiveSpec, RowLengths, RunSpec


class Geometry(NamedTuple):
    """The number of tokens of each kind in a sample, which is the same for all samples of an objective."""

    window_tokens: int
    noise_tokens: int
    spans: int

    @property
    def input_tokens(self) -> int:
        """Tokens of an input: the kept tokens, a sentinel for each span, and EOS."""
        return self.window_tokens - self.noise_tokens + self.spans + 1

    @property
    def target_tokens(self) -> int:
        """Tokens of a target: the noise tokens, a sentinel for each span, and EOS."""
        return self.noise_tokens + self.spans + 1


def geometry(objective: ObjectiveSpec) -> Geometry:
    """Return the geometry of the longest window whose input fits into ``objective.input_tokens``.

    With the default objective (512 input tokens), a window has 568 tokens, 85 of them noise. Raises SpecError if a
    window needs more spans than there are sentinels.
    """
    window = objective.input_tokens - 1  # always fits, because every noise span shrinks to one sentinel
    while (found := _geometry(window + 1, objective)).input_tokens <= objective.input_tokens:
        window = found.window_tokens
    found = _geometry(window, objective)
    if found.spans > NUM_SENTINELS:
        raise SpecError(
            f"objective.input_tokens {objective.input_tokens} needs {found.spans} spans, but there are {NUM_SENTINELS} "
            f"sentinels to mark them (objective.noise_density {objective.noise_density}, objective.mean_span_tokens "
            f"{objective.mean_span_tokens}). Raise objective.mean_span_tokens or lower objective.input_tokens"
        )
    return found


def row_lengths(spec: RunSpec) -> RowLengths:
    """Return the lengths of the rows that a run trains on: of pairs, or of the samples of its objective."""
    if spec.is_fine_tuning:
        return RowLengths(spec.pairs.input_tokens, spec.pairs.target_tokens)
    shape = geometry(spec.objective)
    return RowLengths(shape.input_tokens, shape.target_tokens)


def corrupt(
    windows: np.ndarray, key: Bits, shape: Geometry, first_sentinel_id: int, eos_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs int32 [n, input_tokens] and targets int32 [n, target_tokens] of ``windows`` [n, window_tokens].

    A row's noise depends only on its ``key`` [n], not on the rest of the batch. Sentinels count down
    from ``first_sentinel_id``.
    """
    kept, noise = _segment_lengths(key, shape)
    is_noise = _noise_mask(kept, noise)
    sentinels = np.arange(first_sentinel_id, first_sentinel_id - shape.spans, -1, dtype=np.int32)
    inputs = _with_sentinels(windows[~is_noise], np.cumsum(kept, axis=1) + np.arange(shape.spans), sentinels, eos_id)
    before = np.cumsum(noise, axis=1) - noise
    targets = _with_sentinels(windows[is_noise], before + np.arange(shape.spans), sentinels, eos_id)
    return inputs, targets


def is_content(targets: np.ndarray, first_sentinel_id: int, num_sentinels: int = NUM_SENTINELS) -> np.ndarray:
    """Return which targets are masked tokens: neither a sentinel nor the EOS at the end; same shape [n, t], bool.

    An EOS before the end is the masked end of a document.
    """
    content: np.ndarray = (targets <= first_sentinel_id - num_sentinels) | (targets > first_sentinel_id)
    content[:, -1] = False
    return content


def _geometry(window: int, objective: ObjectiveSpec) -> Geometry:
    noise = min(max(round(window * objective.noise_density), 1), window - 1)
    spans = min(max(round(noise / objective.mean_span_tokens), 1), noise, window - noise)
    return Geometry(window, noise, spans)


def _segment_lengths(key: Bits, shape: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """Draw the lengths of the kept stretches and of the noise spans: two int64 [n, spans]."""
    random = bits(key, 2 * (shape.spans - 1))
    kept = _compositions(shape.window_tokens - shape.noise_tokens, shape.spans, random[:, : shape.spans - 1])
    noise = _compositions(shape.noise_tokens, shape.spans, random[:, shape.spans - 1 :])
    return kept, noise


def _compositions(total: int, parts: int, random: Bits) -> np.ndarray:
    """Draw uniformly from the ways to write ``total`` as an ordered sum of ``parts`` positive numbers: [n, parts].

    The parts lie between cuts, and the cuts are a uniform subset of the ``total - 1`` possible places. Floyd's
    algorithm draws the subset, one cut per step, for all rows at once.
    """
    count, places = len(random), total - 1
    lasts = np.arange(places - parts + 1, places)
    # The high half of the product with 32 random bits is a uniform number from 0 to the last place.
    drawn = ((random >> np.uint64(32)) * (lasts + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
    is_cut = np.zeros(count * total, dtype=bool)
    row_starts = np.arange(count) * total
    for chosen, last in zip((drawn + row_starts[:, np.newaxis]).T, lasts, strict=True):
        is_cut[np.where(is_cut[chosen], row_starts + last, chosen)] = True
    is_cut[total - 1 :: total] = True  # the last part ends at the total
    ends = np.flatnonzero(is_cut).reshape(count, parts) - row_starts[:, np.newaxis]
    return np.diff(ends, axis=1, prepend=-1)


def _noise_mask(kept: np.ndarray, noise: np.ndarray) -> np.ndarray:
    lengths = np.stack([kept, noise], axis=2).reshape(-1)
    is_noise = np.tile(np.array([False, True]), kept.size)
    return np.repeat(is_noise, lengths).reshape(len(kept), -1)


def _with_sentinels(tokens: np.ndarray, places: np.ndarray, sentinels: np.ndarray, eos_id: int) -> np.ndarray:
    """Return rows with ``sentinels`` at ``places`` [n, spans], EOS at the end and ``tokens`` everywhere else."""
    count, spans = places.shape
    row_tokens = len(tokens) // count + spans + 1
    rows = np.empty((count, row_tokens), dtype=np.int32)
    is_token = np.ones((count, row_tokens), dtype=bool)
    is_token[np.arange(count)[:, np.newaxis], places] = False
    is_token[:, -1] = False
    rows[is_token] = tokens
    rows[np.arange(count)[:, np.newaxis], places] = sentinels
    rows[:, -1] = eos_id
    return rows

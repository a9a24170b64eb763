"""Loss on held-out text, and two baselines that show whether it is meaningful.

One is the unigram baseline, the simplest language model, which a trained model must beat: it knows only how often each
token occurs in the train split, which the shards stage counts while it writes tokens. The other is the model's own loss
with shuffled encoder inputs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.samples import span_corruption
from t5train.data.samples.loader import Batch, Samples
from t5train.data.vocabulary.unknown_pieces import UNIGRAM_DTYPE, unigram_name
from t5train.engine.collectives import data_rank, gather_floats
from t5train.engine.forward_backward import Passes
from t5train.errors import DigestMismatch
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards


def train_unigram(shards: Shards) -> np.ndarray:
    """Return the log-probability in nats of each id, float64 [vocab_size], from add-one-smoothed train counts.

    Raises DigestMismatch if the counts do not add up to the tokens of the split.
    """
    vocab_size, tokens = int(shards.counts["vocab_size"]), int(shards.counts["train_tokens"])
    counts = np.zeros(vocab_size, dtype=np.int64)
    for number in range(int(shards.counts["num_shards"])):
        path = shards.path / unigram_name(number)
        if path.stat().st_size != counts.nbytes:
            raise DigestMismatch(
                f"{path} has {path.stat().st_size} bytes, not {counts.nbytes}, so the token counts in that file are "
                "damaged. Make the token shards again (`run` or `tokenize`)"
            )
        counts += np.fromfile(path, UNIGRAM_DTYPE)
    if counts.sum() != tokens:
        raise DigestMismatch(
            f"the token counts in {shards.path} are damaged: {counts.sum()} train tokens counted, not {tokens}. Make "
            "the token shards again (`run` or `tokenize`)"
        )
    return np.asarray(np.log((counts + 1) / (tokens + vocab_size)))


def cross_entropy(log_probabilities: np.ndarray, tokens: np.ndarray) -> float:
    """Return the mean negative log-probability of ``tokens`` (any shape, at least one), in nats per token."""
    return float(-log_probabilities[tokens].mean())


class Losses(NamedTuple):
    """Losses in nats per token on one set of validation samples.

    ``content`` excludes sentinels and the closing EOS, and so covers only text that the model had to predict.
    """

    all_targets: float
    content: float
    sequences: int
    content_tokens: int


def validate(passes: Passes, samples: Samples, shards: TokenShards, spec: RunSpec, shuffled: bool = False) -> Losses:
    """Return the losses of the engine's model on validation samples, which are divided among ranks.

    With ``shuffled``, every target is paired with the encoder input of its neighbour in the batch. The loss of a model
    that uses its input is then higher.
    """
    count = validation_sequences(samples, spec)
    shares = [_share(samples, places, count, shuffled) for places in places_of_rank(spec, count)]
    sums = np.zeros(4)
    # A rank that computes no losses adds none.
    for share, losses in zip(shares, passes.token_losses([share.batch for share in shares]), strict=False):
        sums += _sums(losses[: share.held].astype(np.float64), share.batch.targets[: share.held], shards)
    total, tokens, content, content_tokens = np.sum(gather_floats(sums.tolist()), axis=0)
    return Losses(float(total / tokens), float(content / content_tokens), count, int(content_tokens))


def unigram_loss(samples: Samples, shards: TokenShards, spec: RunSpec) -> float:
    """Return the unigram baseline: the loss of the same masked tokens under the frequencies of the training tokens."""
    targets = samples.batch(0, validation_sequences(samples, spec)).targets
    return cross_entropy(train_unigram(shards), targets[is_content(targets, shards)])


def validation_sequences(samples: Samples | PairSamples, spec: RunSpec) -> int:
    """Return the number of samples in a validation."""
    return min(int(samples.num_samples), spec.storage.validate_sequences)


def is_content(targets: np.ndarray, shards: TokenShards) -> np.ndarray:
    """Return which targets are neither a sentinel nor the EOS that ends a sequence; same shape, bool."""
    return span_corruption.is_content(
        targets, int(shards.counts["first_sentinel_id"]), int(shards.counts["num_sentinels"])
    )


class _Share(NamedTuple):
    """A batch. Only its first ``held`` samples count."""

    batch: Batch
    held: int


def places_of_rank(spec: RunSpec, count: int) -> Iterator[range]:
    """Yield the range of validation samples for each of this rank's passes."""
    size = max(2, spec.layout.micro_batch_sequences)
    for first in range(0, count, spec.data_parallel_size * size):
        start = first + data_rank(spec) * size
        yield range(start, start + size)


def _share(samples: Samples, places: range, count: int, shuffled: bool) -> _Share:
    batch, held = samples.batch(places.start, len(places)), len(range(places.start, min(places.stop, count)))
    if shuffled:
        batch.inputs[:held] = np.roll(batch.inputs[:held], 1, axis=0)
    return _Share(batch, held)


def _sums(losses: np.ndarray, targets: np.ndarray, shards: TokenShards) -> np.ndarray:
    """Return the sum of losses and the number of tokens, of all targets and of content. Both arrays are [b, t]."""
    content = is_content(targets, shards)
    return np.array([losses.sum(), losses.size, losses[content].sum(), content.sum()])

"""Loss on held-out text, and the two comparisons that show it means something."""

from typing import Any, NamedTuple

import numpy as np
import torch

from t5train.data.loader import Samples
from t5train.data.unigram import cross_entropy, train_unigram
from t5train.records import TokenShards
from t5train.spec import RunSpec
from t5train.train.engine import model_of
from t5train.train.ranks import gather_floats, on_accelerator, rank, world_size


class Losses(NamedTuple):
    """Nats a token on one set of validation samples.

    ``content`` leaves out sentinels and the closing EOS: what remains is text the model had to guess.
    """

    all_targets: float
    content: float
    sequences: int
    content_tokens: int


def validate(engine: Any, samples: Samples, shards: TokenShards, spec: RunSpec, shuffled: bool = False) -> Losses:
    """Loss of the engine's model on the first validation samples, shared out over ranks.

    Every rank takes as many passes of as many samples, also where none of them counts: at ZeRO 3 and between experts
    of several ranks a forward pass is a collective.
    With ``shuffled`` every target is paired with the encoder input of its neighbour in the batch: a model that
    reads its input does worse.
    """
    size = max(2, spec.layout.micro_batch_sequences)
    count = validation_sequences(samples, spec)
    sums = np.zeros(4)
    model = model_of(engine)
    model.eval()
    with torch.no_grad():
        for first in range(0, count, world_size() * size):
            start = first + rank() * size
            sums += _sums(model, samples, shards, range(start, start + size), count, shuffled)
    model.train()
    total, tokens, content, content_tokens = np.sum(gather_floats(sums.tolist()), axis=0)
    return Losses(float(total / tokens), float(content / content_tokens), count, int(content_tokens))


def unigram_loss(samples: Samples, shards: TokenShards, spec: RunSpec) -> float:
    """Nats a token of the same content tokens under the frequencies of the training tokens."""
    targets = samples.batch(0, validation_sequences(samples, spec)).targets
    return cross_entropy(train_unigram(shards), targets[is_content(targets, shards)])


def validation_sequences(samples: Samples, spec: RunSpec) -> int:
    """How many sequences a validation reads."""
    return min(int(samples.num_samples), spec.storage.validate_sequences)


def is_content(targets: np.ndarray, shards: TokenShards) -> np.ndarray:
    """Which targets are neither a sentinel nor the EOS that ends a sequence; same shape, bool."""
    highest = shards.counts["first_sentinel_id"]
    content: np.ndarray = (targets <= highest - shards.counts["num_sentinels"]) | (targets > highest)
    content[:, -1] = False
    return content


def _sums(model: Any, samples: Samples, shards: TokenShards, places: range, count: int, shuffled: bool) -> np.ndarray:
    """What the samples at these places add, as far as they are among the first ``count``."""
    batch, held = samples.batch(places.start, len(places)), len(range(places.start, min(places.stop, count)))
    if shuffled:
        batch.inputs[:held] = np.roll(batch.inputs[:held], 1, axis=0)
    losses = model.token_losses(on_accelerator(batch.inputs), on_accelerator(batch.targets)).double().cpu().numpy()
    losses, content = losses[:held], is_content(batch.targets[:held], shards)
    return np.array([losses.sum(), losses.size, losses[content].sum(), content.sum()])

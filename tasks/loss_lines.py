"""What a run says of its losses, for people."""

from collections.abc import Mapping
from typing import Any

LOSSES = {
    "validation_content_loss": "validation, non-sentinel targets",
    "unigram_content_loss": "the same targets under the training text's unigram frequencies",
    "shuffled_content_loss": "the same targets, encoder inputs shuffled across the batch",
}
"""The three losses (nats a token) by which a run shows that its model learned from its inputs."""


def loss_lines(losses: Mapping[str, Any]) -> list[str]:
    """The three losses, one line each."""
    return [f"{losses[name]:.4f} nats/token: {meaning}" for name, meaning in LOSSES.items() if name in losses]

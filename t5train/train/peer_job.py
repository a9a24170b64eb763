"""What a peer of this project trains, and what was measured: written and read without importing torch."""

from typing import Literal

from pydantic import BaseModel

from t5train.spec import RunSpec

OUT_OF_MEMORY = 75
"""Exit code of a peer's rank that ran out of memory."""
Peer = Literal["trainer", "pytorch", "pytorch tuned", "deepspeed"]


class PeerJob(BaseModel):
    """What to train, and for how many steps after warm-up."""

    peer: Peer
    spec: RunSpec
    vocab_size: int
    steps: int
    attention: str | None = None
    """An implementation of attention in transformers; None for its default."""


class PeerMeasured(BaseModel):
    """The result of rank 0."""

    step_seconds: list[float]
    memory_bytes: int
    reserved_bytes: int
    host_memory_bytes: int
    attention: str
    precision: str
    first_loss: float
    last_loss: float

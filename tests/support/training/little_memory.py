"""An accelerator, played by the CPU, with too little memory for predictions beside training."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from deepspeed import comm
from torch import Tensor

from t5train.train import generated_metrics
from t5train.train.generated_metrics import GeneratedMetrics

ACCELERATOR = "cpu:0"
_WEIGHTS_TOO_LARGE_FOR = 2


class _Named:
    @staticmethod
    def current_device_name() -> str:
        return ACCELERATOR

    @staticmethod
    def empty_cache() -> None: ...


class _TooLarge(NamedTuple):
    """A weight for which the accelerator has no memory."""

    weight: Tensor

    def to(self, device: str) -> Tensor:
        if device == ACCELERATOR:
            raise torch.OutOfMemoryError
        return self.weight


@contextlib.contextmanager
def too_little_memory_to_predict() -> Iterator[None]:
    """Let rank 0 lack memory for some weights, in the first two validations, and rank 1 for its batches in the others.

    Only the first rank of a node may then predict.
    """
    published, of_share, validations = generated_metrics.published, GeneratedMetrics._of_share, [0]

    def large(*arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        for number, (name, weight) in enumerate(published(*arguments, **options)):
            is_too_large = number == 1 and comm.get_rank() == 0 and validations[0] <= _WEIGHTS_TOO_LARGE_FOR
            yield name, _TooLarge(weight) if is_too_large else weight

    def shared(self: GeneratedMetrics, weights: Any, device: str, part: int, parts: int) -> Any:
        assert device == ACCELERATOR or (comm.get_rank(), part, parts) == (0, 0, 1)
        if device == ACCELERATOR and comm.get_rank() == 1 and validations[0] > _WEIGHTS_TOO_LARGE_FOR:
            raise torch.OutOfMemoryError
        return of_share(self, weights, device, part, parts)

    measure = GeneratedMetrics.measure

    def counted(self: GeneratedMetrics, engine: Any) -> Any:
        validations[0] += 1
        return measure(self, engine)

    with (
        mock.patch.object(generated_metrics, "get_accelerator", _Named),
        mock.patch.object(generated_metrics, "published", large),
        mock.patch.object(GeneratedMetrics, "_of_share", shared),
        mock.patch.object(GeneratedMetrics, "measure", counted),
    ):
        yield

"""Adam's update of flat tensors in host memory, by the operator that DeepSpeed compiles for DeepSpeedCPUAdam.

It reads and writes every number once, with vector instructions on all cores; torch's operators take several passes.
"""

import math
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.errors import SpecError

# Optimizers are kept by number, counted up from zero by DeepSpeedCPUAdam; everything that one knows is given with
# every call, so that one serves all.
_OPTIMIZER = -1
_ROW_ELEMENTS = 8192


class HostAdam:
    """The operator, compiled where it is not yet (``make setup`` does it, in about a minute).

    Raises SpecError where it cannot be compiled.
    """

    def __init__(self) -> None:
        try:
            self._operator: Any = get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
        except Exception as error:  # a compiler's complaints come as several classes, of torch and of DeepSpeed
            raise SpecError(
                f"layout.offload needs DeepSpeed's operator cpu_adam, which cannot be compiled here ({error}): install "
                "a C++ compiler and ninja, or set layout.offload=none"
            ) from error
        self._operator.create_adam(_OPTIMIZER, 0.0, 0.9, 0.999, 1e-8, 0.0, True, False)

    def update(
        self,
        parts: tuple[Tensor, Tensor, Tensor, Tensor],
        rate: float,
        step: int,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """Move ``parts`` in place: weights, gradients and both moments, contiguous fp32 in host memory.

        The bias of the moments is corrected by way of rate and epsilon: the operator's own correction remembers the
        steps it has seen, and a run that resumes would round otherwise. It is that of betas in fp32, as the operator
        has them: 1 - 0.999 is another number there, by one part in 80,000, and so are the moments.
        """
        beta1, beta2 = torch.tensor(betas, dtype=torch.float32).tolist()
        first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
        rate, epsilon = rate * second / first, epsilon * second
        self._operator.adam_update(_OPTIMIZER, step, rate, *betas, epsilon, 0.0, False, *parts)


def sum_of_squares(part: Tensor) -> Tensor:
    """In fp64 over rows, which are summed in fp32 each: as exact to 1e-7, and five times as fast as fp64 throughout.

    Neither where the tensor lies in memory nor how many threads there are shows in the result.
    """
    in_rows = part.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
    rows = torch.linalg.vector_norm(part[:in_rows].view(-1, _ROW_ELEMENTS), dim=1)
    rest = torch.linalg.vector_norm(part[in_rows:], dtype=torch.float64)
    total: Tensor = rows.double().square().sum() + rest.square()
    return total

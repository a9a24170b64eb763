"""Sums of 16-bit gradients over the passes of a step, kept in fp32.

A bf16 sum over many passes loses addends below 1/256 of the sum, so a smaller micro-batch would train a different
model. At ZeRO 2 and 3, DeepSpeed is configured to sum in fp32 (see deepspeed_config). At ZeRO 0 and 1, where every rank
has all gradients, DeepSpeed would use another optimizer for this, with another checkpoint format. This module sums the
gradients instead. It passes them to DeepSpeed rounded once per step, like the gradients of a single pass.
"""

from typing import cast

import torch
from torch import Tensor, nn

from t5train.engine.deepspeed_config import sums_passes
from t5train.spec import RunSpec


class Fp32Sums:
    """Adds each gradient to its sum as soon as it is complete, so that no 16-bit copy is kept."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._sums: dict[Tensor, Tensor] = {}
        self._are_kept = False
        for each in self._parameters:
            each.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]  # untyped in torch

    def keep(self) -> dict[Tensor, Tensor]:
        """Return the sums of all parameters, which from now on stay in the same memory. CUDA graphs can add to them."""
        self._sums = {each: torch.zeros_like(each, dtype=torch.float32) for each in self._parameters}
        self._are_kept = True
        return self._sums

    def hand_over(self) -> None:
        """Set the sums as gradients of their parameters, in the parameters' dtype. The next sums start at zero."""
        if self._are_kept:
            for parameter, total in self._sums.items():
                parameter.grad = total.to(parameter.dtype)
                total.zero_()
            return
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def _add(self, parameter: Tensor) -> None:
        gradient = cast(Tensor, parameter.grad)  # torch has set it before it calls the hook
        parameter.grad = None
        if (total := self._sums.get(parameter)) is None:
            self._sums[parameter] = gradient.float()
        else:
            total.add_(gradient)


def sums_of(module: nn.Module, spec: RunSpec) -> Fp32Sums | None:
    """Return the sums for a module's gradients; None if DeepSpeed sums them, or if there is nothing to sum in fp32."""
    return Fp32Sums(module) if spec.layout.zero_stage < 2 and sums_passes(spec) else None

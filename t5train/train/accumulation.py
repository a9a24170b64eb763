"""Sums of 16-bit gradients over the passes of a step, kept in fp32.

In bf16 a sum of many passes loses what is below a 256th of it, so a smaller micro-batch would train another model. At
ZeRO 2 and 3 DeepSpeed sums in fp32 when it is told to (see deepspeed_config). At ZeRO 0 and 1, where every rank has all
gradients, it would take another optimizer for that, one that writes checkpoints in another form: here they are summed
beside it, and it gets them rounded once a step, as those of a single pass are.
"""

from typing import cast

from torch import Tensor, nn

from t5train.spec import RunSpec
from t5train.train.deepspeed_config import sums_passes


class Fp32Sums:
    """Takes each gradient as soon as it is complete, so that none is held in 16 bits as well."""

    def __init__(self, module: nn.Module) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        for each in module.parameters():
            each.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]  # untyped in torch

    def hand_over(self) -> None:
        """Make the sums the gradients of their parameters, in the parameters' type; the next sum begins at zero."""
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
    """The sums of a module's gradients, where they are not left to DeepSpeed."""
    return Fp32Sums(module) if spec.layout.zero_stage < 2 and sums_passes(spec) else None

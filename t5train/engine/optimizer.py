"""AdamW with a step relative to the scale of each tensor, for ZeRO's flat partitions.

T5's tensors start with standard deviations from 0.005 to 1. Plain AdamW updates all of them by the same amount and
diverges at T5's learning rates. Adafactor scales each tensor's step by its root mean square instead (Shazeer and Stern
2018, section 8); nanoT5 found that AdamW with this scaling works best. ZeRO passes an optimizer one flat piece of many
tensors, so this optimizer has to know which elements belong to which tensor, and ranks add up their parts of each sum.

Flat tensors in host memory are updated by the operator that DeepSpeed compiles for DeepSpeedCPUAdam. It reads and
writes every number once, with vector instructions on all cores; torch's operators take several passes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, overload

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.errors import SpecError

# The operator identifies optimizers by number; DeepSpeedCPUAdam counts from zero. All settings are passed with every
# call, so one optimizer is enough.
_OPTIMIZER = -1
_ROW_ELEMENTS = 8192


class HostAdam:
    """DeepSpeed's operator for Adam in host memory, compiled on first use (by ``make setup``, in about a minute).

    Raises SpecError if it cannot be compiled.
    """

    def __init__(self) -> None:
        try:
            self._operator: Any = get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
        except Exception as error:  # torch and DeepSpeed report a compiler's errors in several classes
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
        """Update ``parts`` in place: weights, gradients and both moments, contiguous fp32 in host memory.

        The bias of the moments is corrected through rate and epsilon: the operator's own correction depends on the
        steps it has seen, so a resumed run would round differently. The correction uses the betas in fp32, as the
        operator does: in fp32, 1 - 0.999 differs by one part in 80,000, and so do the moments.
        """
        beta1, beta2 = torch.tensor(betas, dtype=torch.float32).tolist()
        first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
        rate, epsilon = rate * second / first, epsilon * second
        self._operator.adam_update(_OPTIMIZER, step, rate, *betas, epsilon, 0.0, False, *parts)


def sum_of_squares(part: Tensor) -> Tensor:
    """Return the sum of squares, added in fp32 within rows and in fp64 over rows.

    It is within 1e-7 of a sum in fp64, and five times as fast. The result depends neither on the tensor's address in
    memory nor on the number of threads.
    """
    in_rows = part.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
    rows = torch.linalg.vector_norm(part[:in_rows].view(-1, _ROW_ELEMENTS), dim=1)
    rest = torch.linalg.vector_norm(part[in_rows:], dtype=torch.float64)
    total: Tensor = rows.double().square().sum() + rest.square()
    return total


MINIMAL_RMS = 1e-3
SumOverRanks = Callable[[Tensor, Any], None]
Kernels = Callable[[Tensor, Tensor, dict[str, Tensor], dict[str, Any]], None]
"""Updates a flat tensor by its gradient, state and group of settings, in place."""


class Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat tensor are a part of tensor number ``owner``, of ``numel`` elements.

    That part begins with the tensor's element number ``first``, in row-major order. Weight decay shrinks it if
    ``is_decayed``; None leaves that to the shape of the tensor that is updated, of which vectors are exempt.
    """

    start: int
    stop: int
    owner: int
    numel: int
    first: int
    is_decayed: bool | None = None


class Partition(NamedTuple):
    """The content of one flat tensor: parts of some of ``num_owners`` tensors.

    ``sharers`` are the ranks that hold the other parts, as a process group; None for all ranks.
    """

    segments: list[Segment]
    num_owners: int
    sharers: Any = None

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each segment of ``flat``."""
        return [flat[segment.start : segment.stop] for segment in self.segments]

    def decayed_parts_of(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each segment of ``flat`` that weight decay shrinks."""
        by_shape, flat = flat.dim() > 1, flat.view(-1)
        kept = (each for each in self.segments if (by_shape if each.is_decayed is None else each.is_decayed))
        return [flat[segment.start : segment.stop] for segment in kept]


class _Owners(NamedTuple):
    """The owner of each segment of a partition, int64, and the elements of each owner, fp64 (1 if it is elsewhere)."""

    of_segment: Tensor
    numels: Tensor

    @classmethod
    def of(cls, partition: Partition, device: torch.device) -> "_Owners":
        """Build it once, on the device of the flat tensor: building it in every step would stall an accelerator."""
        numels = dict.fromkeys(range(partition.num_owners), 1)
        numels |= {segment.owner: segment.numel for segment in partition.segments}
        of_segment = torch.tensor([segment.owner for segment in partition.segments], dtype=torch.int64)
        return cls(of_segment.to(device), torch.tensor([*numels.values()], dtype=torch.float64).to(device))


class AdamWRms(torch.optim.Optimizer):
    """Decoupled AdamW; with ``relative``, each tensor's rate is multiplied by its RMS (at least 1e-3).

    ``host_adam`` updates tensors in host memory; without it, torch's operators update them on their device. Call
    ``attach`` before the first step.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        relative: bool,
        host_adam: HostAdam | None = None,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": weight_decay})
        self.relative, self._host_adam = relative, host_adam
        self._partitions: Mapping[Tensor, Partition] = {}
        self._owners: dict[Tensor, _Owners] = {}
        self._sum_over_ranks: SumOverRanks | None = None
        self._kernels: Kernels | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="squares")
        self._squared: dict[Tensor, Future[Tensor]] = {}

    def use_kernels(self, kernels: Kernels) -> None:
        """Let these kernels do the whole update of a tensor from now on."""
        self._kernels = kernels

    def attach(self, partitions: Mapping[Tensor, Partition], sum_over_ranks: SumOverRanks | None) -> None:
        """Set which parts of which parameters the tensors of this optimizer consist of.

        ``sum_over_ranks`` sums a tensor in place over a partition's ``sharers``; None if each rank has everything.
        """
        self._partitions, self._sum_over_ranks = partitions, sum_over_ranks
        self._owners = {flat: _Owners.of(partition, flat.device) for flat, partition in partitions.items()}

    def measure_weights(self) -> None:
        """Start to sum the squares of weights in host memory, which the next update needs; call it after an update.

        The host's cores have little else to do during a pass. Weights do not change until the next update, unless that
        begins with weight decay.
        """
        if (
            self.relative
            and self._host_adam is not None
            and not any(each["weight_decay"] for each in self.param_groups)
        ):
            for flat, partition in self._partitions.items():
                self._squared[flat] = self._thread.submit(self._squares, partition.parts_of(flat.view(-1)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that ``state_dict`` returned. What is known of the weights no longer holds."""
        self._squared.clear()
        super().load_state_dict(state_dict)

    def state_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a tensor's number of steps and its two moments, which are zero before the first step."""
        state: dict[str, Tensor] = self.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        return state

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every tensor that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self._update(flat, flat.grad, group)
        return loss

    def _update(self, flat: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(flat)
        if not self._partitions:
            return  # during its setup, DeepSpeed steps once with zero gradients to allocate the state
        state["step"] += 1
        if self._kernels is not None:
            self._kernels(flat, gradient, state, group)
            return
        decayed = self._partitions[flat].decayed_parts_of(flat) if group["weight_decay"] else []
        if decayed:
            torch._foreach_mul_(decayed, 1 - group["lr"] * group["weight_decay"])
        scales = self._scales(flat) if self.relative else None
        if self._host_adam is None:
            self._move(flat, gradient, state, group, scales)
        else:
            self._move_in_host_memory(self._host_adam, flat, gradient, state, group, scales)

    def _move(
        self, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any], scales: Tensor | None
    ) -> None:
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
        if scales is not None and len(scales):
            torch._foreach_div_(self._partitions[flat].parts_of(denominator.view(-1)), [*scales.unbind()])
        flat.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))

    def _move_in_host_memory(
        self,
        adam: HostAdam,
        flat: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        scales: Tensor | None,
    ) -> None:
        """Update part by part if each part has its own rate, otherwise all at once."""
        step, moved = int(state["step"]), (flat, gradient, state["exp_avg"], state["exp_avg_sq"])
        parts = [moved]
        if scales is not None:
            parts = [*zip(*map(self._partitions[flat].parts_of, moved), strict=True)]
        rates = [1.0] if scales is None else scales.tolist()
        for part, rate in zip(parts, rates, strict=True):
            adam.update(part, group["lr"] * rate, step, group["betas"], group["eps"])

    def _scales(self, flat: Tensor) -> Tensor:
        """Return the RMS of the tensor that each part of ``flat`` belongs to.

        The last partition of a padded group may have no parts; its rank still joins the sum over ranks.
        """
        return self._rms(flat)[self._owners[flat].of_segment]

    def _rms(self, flat: Tensor) -> Tensor:
        """Return the RMS of every tensor that ``flat`` has parts of, over the ranks that share it, by owner; fp32.

        Sums are in fp64, so that the partitioning hardly affects the result. All parts are summed at once, because
        hundreds of small kernels would take an accelerator longer than the rest of the update.
        """
        (segments, _, sharers), owners = self._partitions[flat], self._owners[flat]
        sums = torch.zeros_like(owners.numels)
        if segments:
            measured = self._squared.pop(flat, None)
            parts = self._partitions[flat].parts_of(flat.view(-1))
            sums.index_add_(0, owners.of_segment, self._squares(parts) if measured is None else measured.result())
        if self._sum_over_ranks is not None:
            self._sum_over_ranks(sums, sharers)
        return (sums / owners.numels).sqrt().clamp(min=MINIMAL_RMS).float()

    def _squares(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of squares of each part, fp64."""
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        if self._host_adam is None:
            return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square()
        return torch.stack([sum_of_squares(part) for part in parts])

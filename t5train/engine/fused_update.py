"""Replaces the update of DeepSpeed's optimizer for ZeRO 1 and 2, in bf16 on NVIDIA GPUs.

DeepSpeed's own update of T5 base takes 50 ms on an H200, of which the GPU works 18: it launches thousands of small
kernels and waits for the GPU five times. This one takes 2.3 ms. DeepSpeed's optimizer object stays, with its
partitions and checkpoints; its ``step`` is replaced, and so is the reduction of gradients. On a single rank nothing is
reduced: gradients stay where they are.

This is the only module that replaces methods of DeepSpeed's optimizer. What it relies on is not documented and may
change with every version, so it accepts only the one that it was checked with.
"""

from typing import Any, cast

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import all_gather_dp_groups
from torch import Tensor

from t5train.engine.collectives import sum_over_ranks
from t5train.engine.deepspeed_config import BUCKET_ELEMENTS
from t5train.engine.gradient_reduction import FlatGroup, GradientReduction
from t5train.engine.optimizer import AdamWRms, Partition
from t5train.engine.partition_update import Chunks, Gradients, Settings, squares, update
from t5train.errors import SpecError

CHECKED_WITH = "0.19.8"


class FusedUpdate:
    """The update of one engine's ``DeepSpeedZeroOptimizer``.

    A gradient norm that is not finite changes no weight and no moment. The caller ends the run when it reads the norm.
    """

    def __init__(self, engine: Any, inner: AdamWRms, partitions: dict[Tensor, Partition]) -> None:
        """Prepare for the engine's partitions. Raises SpecError for another version of DeepSpeed."""
        require_checked_version(deepspeed.__version__)
        self._zero, self._inner = engine.optimizer, inner
        self._partitions = list(partitions.values())
        self._flats = list(partitions)
        self._chunks = [Chunks.of(partition, flat.device) for flat, partition in partitions.items()]
        self._counted = [_counted(self._zero.params_in_partition[i], each) for i, each in enumerate(self._partitions)]
        is_alone = all(comm.get_world_size(group=group) == 1 for group in self._zero.real_dp_process_group)
        self._parameters = list(reversed(list(engine.module.parameters())))  # roughly in the order of their gradients
        self._reduction = None if is_alone else _reduction(self._zero, self._parameters)

    def install(self) -> None:
        """Replace DeepSpeed's step, and what it does with gradients before, on this optimizer object."""
        zero = self._zero
        zero.step = self._step
        zero.contiguous_gradients = False  # no memory for buckets
        if self._reduction is None:
            zero.process_gradients = self._keep_gradient
            zero.reduce_gradients = zero.overlapping_partition_gradients_reduce_epilogue = _nothing
        else:
            zero.process_gradients = self._take_gradient if zero.partition_gradients else _nothing
            zero.reduce_gradients = self._reduce_gradients
            zero.overlapping_partition_gradients_reduce_epilogue = self._reduction.finish

    def _take_gradient(self, parameter: Any, _group: int) -> None:
        """Reduce a gradient, at ZeRO 2. DeepSpeed's hook calls this when the gradient is complete."""
        cast(GradientReduction, self._reduction).take(parameter)

    def _reduce_gradients(self, **_settings: Any) -> None:
        """Reduce all gradients, at ZeRO 1. DeepSpeed calls this after the last pass of a step."""
        reduction = cast(GradientReduction, self._reduction)
        for parameter in self._parameters:
            if parameter.grad is not None:
                reduction.take(parameter)
        reduction.finish()

    def _keep_gradient(self, parameter: Any, _group: int) -> None:
        """Leave a gradient where it is or, if DeepSpeed sums the passes of a step in fp32, add it to their sum."""
        if self._zero.gradient_accumulation_dtype == parameter.dtype or parameter.grad is None:
            return
        if parameter.grad_accum is None:
            parameter.grad_accum = parameter.grad.to(self._zero.gradient_accumulation_dtype)
        else:
            parameter.grad_accum.add_(parameter.grad)  # DeepSpeed would first make an fp32 copy of the gradient
        parameter.grad = None

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        """Update this rank's partitions and gather the model's weights, without waiting for the GPU."""
        del closure  # DeepSpeed passes none
        zero = self._zero
        held = [Gradients.of(chunks, self._gradients(i)) for i, chunks in enumerate(self._chunks)]
        sums = [squares(*each) for each in zip(self._chunks, self._flats, held, strict=True)]
        norm = self._norm(sums)
        for i, flat in enumerate(self._flats):
            if self._inner.relative and comm.get_world_size(group=self._partitions[i].sharers) > 1:
                sum_over_ranks(sums[i][0], self._partitions[i].sharers)
            state = self._inner.state_of(flat)
            state["step"] += 1
            parts = (flat, state["exp_avg"], state["exp_avg_sq"])
            update(self._chunks[i], parts, held[i], self._rounded(i), sums[i][0], norm, self._settings(i))
        if self._reduction is not None:
            self._reduction.clear()
        zero.overflow, zero.micro_step_id, zero._global_grad_norm = False, -1, norm
        self._gather_weights()
        zero._lazy_init_hp_params_optimizer_state()

    def _gradients(self, i: int) -> list[Tensor]:
        """Return the gradient of each segment of partition ``i``, without DeepSpeed's padding."""
        if self._reduction is None:
            return [self._gradient_of(each) for each in self._zero.params_in_partition[i]]
        return self._partitions[i].parts_of(self._reduction.sum_of(i))

    def _gradient_of(self, parameter: Any) -> Tensor:
        """Return a parameter's gradient, summed over passes if there are several; zeros if nothing depended on it."""
        held = parameter.grad if parameter.grad_accum is None else parameter.grad_accum
        return torch.zeros_like(parameter, dtype=self._zero.gradient_accumulation_dtype) if held is None else held

    def _norm(self, sums: list[Tensor]) -> Tensor:
        """Return the norm of all gradients over all ranks. Copies of a tied weight count once."""
        mine = torch.stack([each[1] @ counted for each, counted in zip(sums, self._counted, strict=True)]).sum()
        if comm.get_world_size() > 1:
            comm.all_reduce(mine)
        return mine.sqrt().float()  # in fp32, as the kernel tests whether it is finite

    def _rounded(self, i: int) -> Tensor:
        """Return this rank's part of the model's weights."""
        zero = self._zero
        part: Tensor = zero.parallel_partitioned_bit16_groups[i][comm.get_rank(group=zero.real_dp_process_group[i])]
        return part

    def _settings(self, i: int) -> Settings:
        group = self._inner.param_groups[i]
        step = int(self._inner.state_of(self._flats[i])["step"])
        return Settings(
            group["lr"],
            step,
            group["betas"],
            group["eps"],
            group["weight_decay"],
            self._zero.clip_grad,
            self._inner.relative,
        )

    def _gather_weights(self) -> None:
        zero = self._zero
        if any(comm.get_world_size(group=group) > 1 for group in zero.real_dp_process_group):
            all_gather_dp_groups(
                groups_flat=zero.bit16_groups_flat,
                partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
                dp_process_group=zero.real_dp_process_group,
                start_alignment_factor=zero.nccl_start_alignment_factor,
                allgather_bucket_size=zero.allgather_bucket_size,
            )


def _reduction(zero: Any, parameters: list[Tensor]) -> GradientReduction:
    groups = zip(zero.bit16_groups_flat, zero.bit16_groups, zero.real_dp_process_group, strict=True)
    return GradientReduction(
        [FlatGroup(*each) for each in groups],
        parameters,
        comm.get_world_size(group=zero.dp_process_group),
        zero.gradient_accumulation_dtype,
        BUCKET_ELEMENTS,
    )


def require_checked_version(version: str) -> None:
    """Raise SpecError if the update was not checked with this version of DeepSpeed."""
    if version != CHECKED_WITH:
        raise SpecError(
            f"the fused optimizer update replaces methods of DeepSpeed {CHECKED_WITH}, but {version} is installed: "
            f"install deepspeed=={CHECKED_WITH}"
        )


def _counted(parameters: list[Any], partition: Partition) -> Tensor:
    """Return fp64 [owners]: 1, or 0 for the copies of a tied weight that another pipeline stage counts in the norm."""
    counted = torch.ones(partition.num_owners, dtype=torch.float64)
    for parameter, segment in zip(parameters, partition.segments, strict=True):
        if getattr(parameter, "ds_pipe_replicated", False):
            counted[segment.owner] = 0
    return counted.to(get_accelerator().current_device_name())


def _nothing(*_arguments: Any, **_settings: Any) -> None:
    """Replace a method of DeepSpeed that has nothing to do here."""

"""Gathers whole blocks at ZeRO 3, and reduces their gradients block by block.

DeepSpeed gathers the parameters of each module in hooks, and passes each gradient on by itself. For T5-3B on two GPUs,
the host then takes three times as long to start the work as the GPUs take to do it. Here, a block is gathered by one
collective while the block before it runs, and its gradients are reduced by another. DeepSpeed still owns partitions,
sums of gradients, update and checkpoints, and gathers what is not in a block: embeddings, final norms, the output layer
and position biases, which stacks use outside their first block.

A gathered block lies in one of two buffers, always the same one at the same place. What the backward pass has kept of
its weights, such as a transposed view, is therefore valid whenever the block is in its buffer, and a compiled block
always sees parameters of the same shape at the same addresses.

Frozen weights, beside adapters, have no gradients: with them, a block is needed until the backward pass of the one
before it begins, and not only until its last gradient is complete. Nothing is before the first one, as embeddings are
frozen, too.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from torch import Tensor, distributed, nn
from torch.nn import functional

from t5train.model.attention import PositionBias
from t5train.model.t5 import T5, Block

_BUFFERS = 2
_SUMS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # DeepSpeed's name for each parameter's sum


class GatheredBlocks:
    """Gathers the blocks of an engine's model from now on, in place of DeepSpeed."""

    def __init__(self, engine: Any) -> None:
        self._optimizer, self._ranks = engine.optimizer, distributed.get_world_size()
        self._device = torch.device(get_accelerator().current_device_name())
        self._copies = _Stream()
        self._blocks = _blocks_of(engine.module, self._optimizer)
        self._is_frozen = any(len(each.trained) < len(each.parameters) for each in self._blocks)
        self._owner: Mapping[Tensor, _Gathered] = {one: each for each in self._blocks for one in each.trained}
        self._allocate()
        _take_from_deepspeed(self._optimizer, self._blocks)
        for each in self._blocks:
            each.block.register_forward_pre_hook(self._before_forward(each))
            each.block.register_forward_hook(self._after_forward(each))
        self._reduce_alone = self._optimizer.reduce_ready_partitions_and_remove_grads
        self._optimizer.reduce_ready_partitions_and_remove_grads = self._collect

    def _allocate(self) -> None:
        """Allocate the buffers, and let each block's weights be views of one of them.

        A single rank whose weights are on the accelerator uses DeepSpeed's own copy instead.
        """
        first = cast(Any, self._blocks[0].parameters[0]).ds_tensor
        self._empty = torch.empty(0, dtype=first.dtype, device=self._device)
        self._is_offloaded = first.device != self._device
        if self._ranks == 1 and not self._is_offloaded:
            for each in self._blocks:
                each.weights = [one.ds_tensor[: one.ds_numel].view(one.ds_shape) for one in each.partitioned]
            return
        size = max(each.part_elements for each in self._blocks)
        empty = {"dtype": first.dtype, "device": self._device}
        self._buffers = [torch.empty(size * self._ranks, **empty) for _ in range(_BUFFERS)]
        self._interleaved = [torch.empty_like(each) for each in self._buffers] if self._ranks > 1 else self._buffers
        self._parts = [torch.empty(size, **empty) for _ in range(_BUFFERS)] if self._is_offloaded else []
        self._in_buffer: list[_Gathered | None] = [None] * _BUFFERS
        self._freed: list[Any] = [None] * _BUFFERS
        for each in self._blocks:
            each.lie_in(self._buffers[each.number % _BUFFERS], self._ranks)

    @property
    def _has_buffers(self) -> bool:
        return self._ranks > 1 or self._is_offloaded

    def _take(self, each: "_Gathered") -> None:
        """Let the block's parameters be its whole weights."""
        if self._has_buffers:
            if self._in_buffer[each.number % _BUFFERS] is not each:
                # DeepSpeed may have updated its partitions, in the current stream, since the last gathering.
                self._gather(each, _Stream.mark())
            _Stream.wait_for(each.gathered)
        for parameter, weight in zip(each.parameters, each.weights, strict=True):
            parameter.data = weight  # it is empty since it was released

    def _prefetch(self, number: int) -> None:
        """Start to gather a block, if there is one of this number, and its buffer is free."""
        if self._has_buffers and 0 <= number < len(self._blocks) and self._in_buffer[number % _BUFFERS] is None:
            self._gather(self._blocks[number], self._freed[number % _BUFFERS])

    @torch.no_grad()
    def _gather(self, each: "_Gathered", event: Any) -> None:
        """Start to gather a block, after an event at which its buffer is free, and the partitions are as they are."""
        number = each.number % _BUFFERS
        if (other := self._in_buffer[number]) is not None:
            self._release(other)  # its backward pass, if there is one, will gather it again
        self._in_buffer[number] = each
        with self._copies.after(event):
            part = each.part()
            if self._is_offloaded:
                part = self._parts[number][: part.numel()].copy_(part, non_blocking=True)
            gathered = self._interleaved[number][: part.numel() * self._ranks]
            if self._ranks == 1:
                gathered.copy_(part)
            else:
                distributed.all_gather_into_tensor(gathered, part)
                rows = gathered.view(self._ranks, -1)
                torch.split_with_sizes_copy(rows, each.part_sizes, dim=1, out=each.rows)
            each.gathered = _Stream.mark()

    def _release(self, each: "_Gathered") -> None:
        """Let the block's buffer be used for others, after the work that has been started.

        Its parameters become empty, as DeepSpeed expects: a checkpoint of the module would include what they hold.
        """
        for parameter in each.parameters:
            parameter.data = self._empty
        if self._has_buffers and self._in_buffer[each.number % _BUFFERS] is each:
            self._freed[each.number % _BUFFERS] = _Stream.mark()
            self._in_buffer[each.number % _BUFFERS] = None

    def _release_all(self) -> None:
        """Release what a forward pass without a backward pass has left: weights may have changed since."""
        for each in filter(None, list(self._in_buffer) if self._has_buffers else ()):
            self._release(each)

    def _before_forward(self, each: "_Gathered") -> Callable[..., None]:
        def hook(*_: object) -> None:
            if each.number == 0:
                self._release_all()
            self._take(each)
            self._prefetch(each.number + 1)

        return hook

    def _after_forward(self, each: "_Gathered") -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            del module, inputs
            has_backward = torch.is_grad_enabled() and output.requires_grad
            if each.number < len(self._blocks) - 1 or not has_backward:  # the last one is needed next, in its backward
                self._release(each)
            if not has_backward:
                return None
            marked = _BeforeBackward.apply(output, self, each)  # type: ignore[no-untyped-call]  # torch does not annotate it
            return cast(Tensor, marked)

        return hook

    def before_backward(self, each: "_Gathered") -> None:
        """Gather a block whose backward pass begins, and start to gather the one that comes next."""
        if self._is_frozen and each.number + 1 < len(self._blocks):
            self._release(self._blocks[each.number + 1])
        self._take(each)
        self._prefetch(each.number - 1)

    def _collect(self, parameter: Tensor) -> None:
        """Reduce the gradients of a block as soon as all are complete; its weights are then no longer needed."""
        if (each := self._owner.get(parameter)) is None:
            self._reduce_alone(parameter)
            return
        each.num_complete += 1
        if each.num_complete == len(each.trained):
            each.num_complete = 0
            if not self._is_frozen or each.number == 0:
                self._release(each)
            self._reduce(each)

    @torch.no_grad()
    def _reduce(self, each: "_Gathered") -> None:
        """Average the gradients over all ranks, and add this rank's part to DeepSpeed's sums."""
        gradients = [cast(Tensor, parameter.grad) for parameter in each.trained]
        for parameter in each.trained:
            parameter.grad = None
        with _Stream.of(self._optimizer.reduce_and_partition_stream).after(_Stream.mark()):
            parts = self._averaged(each, gradients)
            if self._optimizer.offload_optimizer or each.sums is None:
                self._optimizer.partition_grads(each.trained, [*torch.split(parts, each.trained_sizes)])
            elif self._optimizer.micro_step_id == 0:
                each.sums.copy_(parts)
            else:
                each.sums.add_(parts)
            _Stream.keep(gradients)

    def _averaged(self, each: "_Gathered", gradients: list[Tensor]) -> Tensor:
        """Return this rank's parts of the gradients' averages, one after the other."""
        flat = [
            _padded(gradient.reshape(-1), size * self._ranks).view(self._ranks, -1)
            for gradient, size in zip(gradients, each.trained_sizes, strict=True)
        ]
        joined = torch.cat(flat, dim=1).view(-1)
        if self._ranks == 1:
            return joined
        joined.div_(self._ranks)
        part = joined.new_empty(sum(each.trained_sizes))
        distributed.reduce_scatter_tensor(part, joined)
        return part


class _Gathered:
    """A block, its parameters, where their partitions are, and where its whole weights are while it is gathered."""

    def __init__(self, block: Block, number: int, parameters: list[nn.Parameter], sums: list[Tensor]) -> None:
        self.block, self.number, self.parameters = block, number, parameters
        self.partitioned: list[Any] = list(parameters)  # with the attributes that DeepSpeed adds
        self.part_sizes = [one.partition_numel() for one in self.partitioned]
        self.part_elements = sum(self.part_sizes)
        self.trained = [each for each in parameters if each.requires_grad]
        self.trained_sizes = [cast(Any, each).partition_numel() for each in self.trained]
        self.sums = _as_one(sums)
        self.weights = list[Tensor]()
        self.rows = list[Tensor]()
        self.num_complete = 0
        self.gathered: Any = None

    def part(self) -> Tensor:
        """Return this rank's partitions, one after the other."""
        parts = [one.ds_tensor for one in self.partitioned]
        return torch.cat(parts) if (together := _as_one(parts)) is None else together

    def lie_in(self, buffer: Tensor, ranks: int) -> None:
        """Let the weights be views of a buffer; parts of a tensor are padded to the same length on every rank."""
        places = torch.split(buffer[: self.part_elements * ranks], [size * ranks for size in self.part_sizes])
        self.rows = [place.view(ranks, -1) for place in places]
        self.weights = [
            place[: one.ds_numel].view(one.ds_shape) for place, one in zip(places, self.partitioned, strict=True)
        ]


class _BeforeBackward(torch.autograd.Function):
    """The identity; its backward pass gathers the block whose output it is applied to."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, blocks: GatheredBlocks, each: _Gathered) -> Tensor:
        ctx.blocks, ctx.each = blocks, each
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        ctx.blocks.before_backward(ctx.each)
        return slopes[0], None, None


class _Stream:
    """A stream of the accelerator, for work beside the current stream; on the CPU, everything runs at once."""

    def __init__(self) -> None:
        make = get_accelerator().Stream  # None on the CPU
        self._stream = None if make is None else make()

    @classmethod
    def of(cls, stream: Any) -> "_Stream":
        """Wrap an existing stream."""
        made = cls.__new__(cls)
        made._stream = stream
        return made

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Let what is started in this context run in the stream, after an event; None: at once."""
        if self._stream is None:
            return nullcontext()
        if event is not None:
            self._stream.wait_event(event)
        return cast("AbstractContextManager[Any]", get_accelerator().stream(self._stream))

    @staticmethod
    def mark() -> Any:
        """Return an event of the end of all work of the current stream so far; None on the CPU."""
        current = get_accelerator().current_stream()
        return None if current is None else current.record_event()

    @staticmethod
    def wait_for(event: Any) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            get_accelerator().current_stream().wait_event(event)

    @staticmethod
    def keep(tensors: list[Tensor]) -> None:
        """Let the memory of tensors of another stream not be reused before the current stream has read them."""
        current = get_accelerator().current_stream()
        if current is not None:
            for each in tensors:
                each.record_stream(current)


def _blocks_of(model: T5, optimizer: Any) -> list[_Gathered]:
    """Return the blocks in the order of a forward pass, without position biases."""
    sums = getattr(optimizer, _SUMS)
    found = list[_Gathered]()
    for stack in (model.encoder, model.decoder):
        blocks = [cast(Block, each) for each in stack.block]
        bias = blocks[0].position_bias.weight
        for block in blocks:
            parameters = [each for each in block.parameters() if each is not bias]
            trained = [cast(Any, each) for each in parameters if each.requires_grad]
            found.append(_Gathered(block, len(found), parameters, [sums[each.ds_id] for each in trained]))
    return found


class _Parameters(ZeROOrderedDict):  # type: ignore[misc]  # DeepSpeed has no types
    """The parameters of a module of a block, read as they are.

    DeepSpeed's dictionary takes one that is read in a forward pass, and that DeepSpeed has not gathered itself, for an
    external parameter of the stack, which it gathers with the stack from then on. Then it refuses the next pass, which
    differs.
    """

    __getitem__ = OrderedDict.__getitem__


def _take_from_deepspeed(optimizer: Any, blocks: list[_Gathered]) -> None:
    """Remove the hooks by which DeepSpeed gathers modules of blocks, except position biases."""
    ours = set[int]()
    for each in blocks:
        for module in each.block.modules():
            if not isinstance(module, PositionBias):
                ours |= {id(module._forward_pre_hooks), id(module._forward_hooks)}
                module._parameters = _Parameters(module, module._parameters)
    gathering = optimizer.parameter_offload
    for handle in [*gathering.forward_hooks, *gathering.backward_hooks]:
        if id(handle.hooks_dict_ref()) in ours:
            handle.remove()


def _padded(flat: Tensor, size: int) -> Tensor:
    return functional.pad(flat, (0, size - flat.numel())) if flat.numel() < size else flat


def _as_one(tensors: list[Tensor]) -> Tensor | None:
    """Return flat tensors that lie one after the other in memory as one tensor; None if they do not."""
    if any(one.data_ptr() + one.numel() * one.element_size() != after.data_ptr() for one, after in pairwise(tensors)):
        return None
    return torch.as_strided(tensors[0], (sum(each.numel() for each in tensors),), (1,))

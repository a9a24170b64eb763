"""DeepSpeed's pipeline engine, with two changes.

Copies of a tied weight stay equal to the last bit, and passes can run as CUDA graphs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import engine, schedule
from torch import Tensor, nn
from torch.func import functional_call

from t5train.engine.gradient_accumulation import Fp32Sums
from t5train.model.pipeline.pipeline_model import T5Pipeline


class RecordedPasses:
    """A forward pass and its backward pass over a micro-batch, as CUDA graphs with memory of their own.

    Micro-batches of a pipeline are small, so launching a pass kernel by kernel takes the host longer than the GPU needs
    to run it. torch's own CUDA graphs allow one forward pass before its backward pass; a stage has several under way.

    It holds the activations of one micro-batch: each forward pass must be followed by its backward pass. What a pass
    returns is valid until the next pass of the same kind.
    """

    def __init__(
        self, run: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], sums: Mapping[Any, Tensor]
    ) -> None:
        """Record ``run`` for inputs like these, and the addition of its parameters' gradients to ``sums``.

        The sums stay as they are. Their parameters must be leaves that ``run`` uses and nothing else has used.
        """
        self._inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        accelerator = get_accelerator()
        self._forward, self._backward = accelerator.create_graph(), accelerator.create_graph()
        stream = accelerator.Stream()
        differentiable = [each for each in self._inputs if each.requires_grad]
        wanted = [*differentiable, *sums]
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):  # what has to be compiled or tuned cannot be recorded
            output = run(self._inputs)
            torch.autograd.grad(output, wanted, torch.zeros_like(output), allow_unused=True)
        with _recording(self._forward, None, stream):
            output = run(self._inputs)
        self._output = output.detach()
        self._output_gradient = torch.empty_like(self._output)
        with _recording(self._backward, self._forward.pool(), stream):
            gradients = torch.autograd.grad(output, wanted, self._output_gradient, allow_unused=True)
            of_parameters = gradients[len(differentiable) :]
            for total, gradient in zip(sums.values(), of_parameters, strict=True):
                if gradient is not None:
                    total.add_(gradient)
        self._input_gradient = gradients[0] if differentiable else None

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the output for these inputs."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._forward.replay()
        return self._output

    @torch.no_grad()
    def backward(self, output_gradient: Tensor) -> Tensor | None:
        """Add to the sums, and return the gradient of the input; None if it has none, as for ids."""
        self._output_gradient.copy_(output_gradient)
        self._backward.replay()
        return self._input_gradient


def _recording(graph: Any, memory: Any, stream: Any) -> AbstractContextManager[None]:
    """Record what is launched in this context, in new memory or in that of another graph."""
    recording = get_accelerator().capture_to_graph(graph, pool=memory, stream=stream)
    recording.capture_error_mode = "thread_local"  # other threads, such as NCCL's watchdog, may use the GPU meanwhile
    return cast("AbstractContextManager[None]", recording)


class PipelineEngine(engine.PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """An engine for one pipeline stage."""

    total_loss: Tensor | None

    def __init__(self, model: T5Pipeline, optimizer: Any, config: dict[str, Any], sums: Fp32Sums | None) -> None:
        """If ``sums`` is given, a step takes its gradients from it after the last pass."""
        mpu = model.mpu()
        whole = DeepSpeedConfig(config, mpu)
        super().__init__(args=None, model=model, optimizer=optimizer, mpu=mpu, config=config, config_class=whole)
        self._sums = sums
        self._holders = {key: comm.new_group(ranks) for key, ranks in sorted(_holders(model).items())}
        self._kept_sums: Mapping[Tensor, Tensor] | None = None
        self._leaves: dict[str, Tensor] = {}
        self._examples: list[Tensor] = []
        self._recorded: list[RecordedPasses] = []

    def record_passes(self) -> None:
        """Run passes as CUDA graphs from the second step on; everything is compiled in the first one.

        Without ``sums``, a step has a single pass, and nothing is recorded.
        """
        if self._sums:
            self._kept_sums = self._sums.keep()

    def train_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Take a step, as DeepSpeed does."""
        if self._examples and self._kept_sums:
            self._record(self._kept_sums)
        return cast(Tensor, super().train_batch(data_iter))

    def _record(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Record the passes of each micro-batch that can be under way. The last stage ends one before the next."""
        self.module.train()
        # Leaves of their own, in the same memory: gradients of the model's parameters, which have hooks, would be
        # passed on in the default stream, which cannot be recorded.
        self._leaves = {name: nn.Parameter(each.detach()) for name, each in self.module.named_parameters()}
        sums_of_leaves = {self._leaves[name]: sums[each] for name, each in self.module.named_parameters()}
        count = 1 if self.is_last_stage() else self.num_pipe_buffers
        self._recorded = [RecordedPasses(self._output_of, self._examples, sums_of_leaves) for _ in range(count)]
        self._examples = []

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Run the stage for the micro-batch in this buffer. The last stage adds up the losses of a step."""
        if self._recorded and self.module.training:
            output = self._passes(buffer_id).forward(self._inputs(buffer_id))
            if self.is_last_stage():
                self.total_loss = output.clone() if self.total_loss is None else self.total_loss + output
            else:
                self.pipe_buffers["outputs"][buffer_id] = output
            return
        if self._kept_sums and self.module.training:
            self._examples = self._inputs(buffer_id)
        super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        """Run the backward pass for the micro-batch in this buffer."""
        if not self._recorded:
            super()._exec_backward_pass(buffer_id)
            return
        # The gradient of a loss is divided as DeepSpeed divides the loss.
        ones = torch.ones((), device=self.device)
        given = ones / self.gradient_accumulation_steps() if self.is_last_stage() else self.grad_layer
        gradient = self._passes(buffer_id).backward(given)
        if gradient is not None:
            self.pipe_buffers["inputs"][buffer_id].grad = gradient
        self.pipe_buffers["outputs"][buffer_id] = None

    def _passes(self, buffer_id: int) -> RecordedPasses:
        return self._recorded[buffer_id % len(self._recorded)]

    def _inputs(self, buffer_id: int) -> list[Tensor]:
        """Return what the stage takes: ids, or the previous stage's output, and in the last stage also the targets."""
        held = self.pipe_buffers["inputs"][buffer_id]
        labels = [self.pipe_buffers["labels"][buffer_id]] if self.is_last_stage() else []
        return [*(held if isinstance(held, tuple) else [held]), *labels]

    def _output_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the output of the stage's layers, or the loss in the last stage."""
        given = tuple(inputs) if self.is_first_stage() else inputs[0]
        output = functional_call(self.module, self._leaves, (given,))
        return cast(Tensor, self.module.loss_fn(output, inputs[1]) if self.is_last_stage() else output)

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of a tied weight over its copies in all stages of all model replicas at once.

        DeepSpeed would sum over the stages of each replica, and every stage would then average over replicas in its own
        buckets. Different buckets may add in a different order, so the copies would drift apart. After the sum here,
        the average is one of equal numbers, in any order. All stages process shared modules in the order of their keys;
        in the order of layers, two stages could deadlock.
        """
        if self._sums:
            self._sums.hand_over()
        for key, tied in sorted(self.module.tied_comms.items()):
            if len(tied["ranks"]) > 1:
                for weight in tied["module"].parameters():
                    weight.grad.div_(self.dp_world_size)
                    comm.all_reduce(weight.grad, group=self._holders[key])

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **engine.PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
    }


def _holders(model: T5Pipeline) -> dict[str, list[int]]:
    """Return the ranks that hold a copy of each tied module, in all model replicas."""
    grid = model.mpu()
    return {
        key: sorted(
            grid.stage_to_global(stage_id=stage, data=copy)
            for stage in stages
            for copy in range(grid.get_data_parallel_world_size())
        )
        for key, stages in model.tied_stages().items()
    }

"""T5 as a sequence of layers that DeepSpeed spreads over the stages of a pipeline. Dense models only.

The first layer embeds the inputs of encoder and decoder, and the decoder's embedded inputs pass through the encoder's
stages unchanged. The decoder therefore needs no second copy of the embedding, whose gradients would have to be summed
in every step. Stages exchange one tensor, the joined states of encoder and decoder, so that a stage needs only one
backward pass. Each stage has its own copy of the position biases that it needs, and computes them once per pass.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from t5train.data.samples.span_corruption import Geometry
from t5train.model.attention import PositionBias
from t5train.model.model_shape import T5Shape
from t5train.model.pipeline.pipeline_split import stage_bounds
from t5train.model.t5 import Block, RMSNorm, shift_right

if TYPE_CHECKING:
    from t5train.model.mixture_of_experts import SparseFeedForward

TIED = "tied_modules."


class Flow(NamedTuple):
    """The value that one layer of a stage passes to the next.

    ``source`` [b, s, d_model] is the encoder's state and finally its output, ``target`` [b, t, d_model] the decoder's.
    ``bias`` [1, heads, n, n] is the position bias of the current stack.
    """

    source: Tensor
    target: Tensor
    bias: Tensor | None = None


class T5Pipeline(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """This rank's stage of a T5; all ranks must build it together.

    ``pipeline_layers`` maps DeepSpeed's name of a layer, of any stage, to its path in Hugging Face's model.
    """

    expert_parallel_size = 1

    def __init__(self, shape: T5Shape, decoder_start_id: int, num_stages: int, sample: Geometry) -> None:
        units = starmap(range, pairwise(stage_bounds(shape, num_stages, sample)))
        stages = [list(_stage(shape, decoder_start_id, sample, held)) for held in units]
        layers = [layer for stage in stages for layer in stage]
        super().__init__(
            [layer.spec for layer in layers],
            num_stages=num_stages,
            loss_fn=self.losses,
            partition_method=[0, *accumulate(map(len, stages))],
        )
        self.pipeline_layers = _paths(layers)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats in training; in evaluation, that of each target token, fp32 [b, t]."""
        flat = logits.float().view(-1, logits.shape[-1])
        if self.training:
            return functional.cross_entropy(flat, targets.reshape(-1))
        return functional.cross_entropy(flat, targets.reshape(-1), reduction="none").view(targets.shape)

    def sparse_layers(self) -> "Iterator[tuple[str, SparseFeedForward]]":
        """Return an empty iterator: a pipeline has no experts."""
        return iter(())

    def tied_stages(self) -> dict[str, list[int]]:
        """Return the stages that hold a copy of each tied module, by the module's key."""
        stages: dict[str, set[int]] = {}
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                stages.setdefault(spec.key, set()).add(self.stage_owner(index))
        return {key: sorted(held) for key, held in stages.items()}

    def _partition_layers(self, method: list[int]) -> None:
        """Assign layers to stages. DeepSpeed would balance parameters, including embeddings, and not computation."""
        self.parts = method
        self._set_bounds(start=method[self.stage_id], stop=method[self.stage_id + 1])


class Embedding(nn.Module):
    """The embedding that encoder and decoder share."""

    def __init__(self, shape: T5Shape, decoder_start_id: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self.decoder_start_id = decoder_start_id
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Flow:
        """Embed inputs [b, s] and targets [b, t], both ids."""
        inputs, targets = batch
        source = functional.embedding(inputs, self.weight)
        target = functional.embedding(shift_right(targets, self.decoder_start_id), self.weight)
        return Flow(self.dropout(source), self.dropout(target))


class StageBias(PositionBias):
    """The position bias for those blocks of encoder or decoder that a stage holds."""

    def forward(self, flow: Flow) -> Flow:  # type: ignore[override]  # the layers of a pipeline take one value
        """Return the flow with the bias."""
        return flow._replace(bias=super().forward((flow.target if self.causal else flow.source).shape[1]))


class EncoderBlock(Block):
    """A block of the encoder."""

    def forward(self, flow: Flow) -> Flow:  # type: ignore[override]  # the layers of a pipeline take one value
        """Return the flow with the encoder's next state."""
        assert flow.bias is not None  # noqa: S101 - for the type checker: a stage begins a stack with its bias
        return flow._replace(source=super().forward(flow.source, flow.bias, None))


class DecoderBlock(Block):
    """A block of the decoder."""

    def forward(self, flow: Flow) -> Flow:  # type: ignore[override]  # the layers of a pipeline take one value
        """Return the flow with the decoder's next state."""
        assert flow.bias is not None  # noqa: S101 - for the type checker: a stage begins a stack with its bias
        return flow._replace(target=super().forward(flow.target, flow.bias, flow.source))


class StackEnd(nn.Module):
    """The norm and dropout after the last block of encoder or decoder."""

    def __init__(self, shape: T5Shape, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.final_layer_norm = RMSNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, flow: Flow) -> Flow:
        """Return the flow with the stack's output."""
        if self.is_decoder:
            return flow._replace(target=self.dropout(self.final_layer_norm(flow.target)))
        return flow._replace(source=self.dropout(self.final_layer_norm(flow.source)))


class Output(nn.Module):
    """A separate output layer (v1.1)."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))

    def forward(self, flow: Flow) -> Tensor:
        """Return the logits [b, t, vocab_size]."""
        return functional.linear(flow.target, self.weight)


def tied_output(embedding: Embedding, flow: Flow) -> Tensor:
    """Return the logits [b, t, vocab_size], computed with the embedding's weight (v1.0)."""
    return functional.linear(flow.target * embedding.weight.shape[1] ** -0.5, embedding.weight)


def join(flow: Flow) -> Tensor:
    """Return the input of the next stage, [b, s + t, d_model]: a single tensor, so that one backward pass is enough."""
    return torch.cat([flow.source, flow.target], dim=1)


def split(sample: Geometry, joined: Tensor) -> Flow:
    """Split the output of the previous stage; the inverse of ``join``."""
    return Flow(joined[:, : sample.input_tokens], joined[:, sample.input_tokens :])


class _Layer(NamedTuple):
    """A layer, and the path of its parameters in Hugging Face's model (None if it has none of its own)."""

    spec: LayerSpec | Callable[..., Flow | Tensor]
    path: str | None = None


def _stage(shape: T5Shape, start_id: int, sample: Geometry, units: range) -> Iterator[_Layer]:
    """Yield the layers of the stage that holds these units, as ``stage_bounds`` counts them."""
    output = shape.num_layers + shape.num_decoder_layers
    yield _embedding(shape, start_id) if units.start == 0 else _Layer(partial(split, sample))
    yield from _blocks(shape, range(units.start, min(units.stop, shape.num_layers)), is_decoder=False)
    if units.start < shape.num_layers <= units.stop:
        yield _Layer(LayerSpec(StackEnd, shape, False), "encoder")
    decoders = range(max(units.start, shape.num_layers), min(units.stop, output))
    yield from _blocks(
        shape, range(decoders.start - shape.num_layers, decoders.stop - shape.num_layers), is_decoder=True
    )
    if units.stop > output:
        yield _Layer(LayerSpec(StackEnd, shape, True), "decoder")
        yield _output(shape, start_id)
    else:
        yield _Layer(join)


def _blocks(shape: T5Shape, indices: range, is_decoder: bool) -> Iterator[_Layer]:
    """Yield blocks of one stack, preceded by their shared bias. Yields nothing if there are no blocks."""
    stack, block = ("decoder", DecoderBlock) if is_decoder else ("encoder", EncoderBlock)
    if indices:
        path = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield _Layer(TiedLayerSpec(f"{stack}_bias", StageBias, shape, is_decoder), path)
    for index in indices:
        yield _Layer(LayerSpec(block, shape, is_decoder, index), f"{stack}.block.{index}")


def _embedding(shape: T5Shape, start_id: int) -> _Layer:
    spec = TiedLayerSpec("shared", Embedding, shape, start_id) if shape.tied else LayerSpec(Embedding, shape, start_id)
    return _Layer(spec, "shared")


def _output(shape: T5Shape, start_id: int) -> _Layer:
    if shape.tied:
        return _Layer(TiedLayerSpec("shared", Embedding, shape, start_id, forward_fn=tied_output))
    return _Layer(LayerSpec(Output, shape), "lm_head")


def _paths(layers: Iterable[_Layer]) -> dict[str, str]:
    """Return paths by DeepSpeed's names of layers: a layer's number and, for a tied layer, also its key."""
    paths: dict[str, str] = {}
    for index, layer in enumerate(layers):
        if layer.path is not None:
            paths[str(index)] = layer.path
            if isinstance(layer.spec, TiedLayerSpec):
                paths[f"{TIED}{layer.spec.key}"] = layer.path
    return paths

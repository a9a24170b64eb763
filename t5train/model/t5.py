"""T5 v1.0 and v1.1, optionally with experts. Parameter names and arithmetic are those of Hugging Face's models.

Those are T5ForConditionalGeneration and, with experts, SwitchTransformersForConditionalGeneration. Only experts and
routers have other names in DeepSpeed (see t5train.engine.parameter_layout).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.activation_checkpointing import Recomputable, recomputed
from t5train.model.attention import Attention, PositionBias
from t5train.model.feed_forward import FeedForward, GatedFeedForward
from t5train.model.model_shape import LAYER_NORM_EPSILON, T5Shape

if TYPE_CHECKING:
    from t5train.model.mixture_of_experts import SparseFeedForward


class T5(nn.Module):
    """Encoder and decoder with a shared embedding. ``forward`` returns the training loss."""

    pipeline_layers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, shape: T5Shape, decoder_start_id: int, expert_parallel_size: int = 1) -> None:
        super().__init__()
        self.shape, self.decoder_start_id = shape, decoder_start_id
        self.expert_parallel_size = expert_parallel_size
        self.shared = SharedEmbedding(shape.vocab_size, shape.d_model)
        self.encoder = Stack(shape, shape.num_layers, False, expert_parallel_size)
        self.decoder = Stack(shape, shape.num_decoder_layers, True, expert_parallel_size)
        if not shape.tied:
            self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of ``targets`` [b, t] given ``inputs`` [b, s], over all positions.

        The losses of routers are added, if there are any.
        """
        loss = functional.cross_entropy(self._flat_logits(inputs, targets), targets.reshape(-1))
        for _, layer in self.sparse_layers():
            loss = loss + layer.router_loss
        return loss

    def sparse_layers(self) -> "Iterator[tuple[str, SparseFeedForward]]":
        """Yield the path and module of every layer with experts; none in a dense model."""
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            for index in range(len(stack.block)):
                if self.shape.is_sparse(index):
                    path = f"{name}.block.{index}.layer.{2 if stack.is_decoder else 1}.mlp"
                    yield path, cast("SparseFeedForward", self.get_submodule(path))

    def token_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats of each target token, [b, t], fp32."""
        losses = functional.cross_entropy(self._flat_logits(inputs, targets), targets.reshape(-1), reduction="none")
        return losses.view(targets.shape)

    def logits(self, inputs: Tensor, decoder_inputs: Tensor) -> Tensor:
        """Return logits [b, t, vocab_size], computed in the dtype of the weights."""
        return self.decode(self.encode(inputs), decoder_inputs)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the encoder's states [b, s, d_model]."""
        return cast(Tensor, self.encoder(self.shared(inputs)))

    def decode(self, memory: Tensor, decoder_inputs: Tensor) -> Tensor:
        """Return the same logits as ``logits``, given the encoder's states."""
        hidden = self.decoder(self.shared(decoder_inputs), memory)
        if self.shape.tied:
            return cast(Tensor, self.shared(hidden * self.shape.d_model**-0.5, is_output=True))
        return cast(Tensor, self.lm_head(hidden))

    def _flat_logits(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.logits(inputs, shift_right(targets, self.decoder_start_id)).float().view(-1, self.shape.vocab_size)


class SharedEmbedding(nn.Embedding):
    """Embeds ids; in a tied model it also computes the logits.

    Both go through ``forward``, because at ZeRO 3 this module's hooks gather the weight, also in evaluation.
    """

    def forward(self, tokens: Tensor, is_output: bool = False) -> Tensor:
        """Map ids [b, n] to [b, n, d_model]; if ``is_output``, [b, n, d_model] to logits [b, n, vocab_size]."""
        return functional.linear(tokens, self.weight) if is_output else super().forward(tokens)


def shift_right(targets: Tensor, start_id: int) -> Tensor:
    """Return decoder inputs [b, t]: the start id, then the targets without the last one."""
    start = targets.new_full((targets.shape[0], 1), start_id)
    return torch.cat([start, targets[:, :-1]], dim=1)


class Stack(nn.Module):
    """Encoder or decoder: blocks that share the first block's position bias."""

    def __init__(self, shape: T5Shape, num_layers: int, is_decoder: bool, expert_parallel_size: int) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.block = nn.ModuleList(
            Block(shape, is_decoder, index, expert_parallel_size, None if index else PositionBias(shape, is_decoder))
            for index in range(num_layers)
        )
        self.final_layer_norm = RMSNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, embedded: Tensor, memory: Tensor | None = None) -> Tensor:
        """Map ``embedded`` [b, n, d_model] to the same shape; a decoder attends to ``memory`` [b, m, d_model]."""
        bias = cast(Block, self.block[0]).position_bias(embedded.shape[1])
        hidden = self.dropout(embedded)
        for block in self.block:
            hidden = block(hidden, bias, memory)
        return cast(Tensor, self.dropout(self.final_layer_norm(hidden)))


class Block(Recomputable):
    """Self-attention, cross-attention (decoder only) and feed-forward, each a residual step.

    The first block of a stack owns the position bias that all its blocks use.
    """

    def __init__(
        self,
        shape: T5Shape,
        is_decoder: bool,
        index: int,
        expert_parallel_size: int = 1,
        position_bias: PositionBias | None = None,
    ) -> None:
        super().__init__()
        steps: list[nn.Module] = [SelfAttentionStep(shape, position_bias, is_decoder)]
        if is_decoder:
            steps.append(CrossAttentionStep(shape))
        steps.append(FeedForwardStep(shape, index, expert_parallel_size))
        self.layer = nn.ModuleList(steps)
        self.is_sparse = shape.is_sparse(index)

    @property
    def position_bias(self) -> PositionBias:
        """The stack's position bias, which its first block owns."""
        return cast(SelfAttentionStep, self.layer[0]).SelfAttention.relative_attention_bias

    def forward(self, hidden: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        """Run the block; shapes as in Stack.

        With recomputation, activations of experts are still kept: a second pass would count their tokens twice, and
        all ranks must exchange tokens in the same order.
        """
        if not self.recompute:
            return self._feed_forward(self._attend(hidden, bias, memory))
        if self.is_sparse:
            return self._feed_forward(recomputed(self._attend, hidden, bias, memory))
        return recomputed(self._whole, hidden, bias, memory)

    def _whole(self, hidden: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        return self._feed_forward(self._attend(hidden, bias, memory))

    def _attend(self, hidden: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        hidden = self.layer[0](hidden, bias)
        return hidden if memory is None else cast(Tensor, self.layer[1](hidden, memory))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.layer[-1](hidden))


class SelfAttentionStep(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, shape: T5Shape, position_bias: PositionBias | None, causal: bool) -> None:
        super().__init__()
        self.SelfAttention = Attention(shape, position_bias, causal)
        self.layer_norm = RMSNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Shapes as in Attention."""
        normed = self.layer_norm(hidden)
        return cast(Tensor, hidden + self.dropout(self.SelfAttention(normed, normed, bias)))


class CrossAttentionStep(nn.Module):
    """x + attention(norm(x), memory), without a bias."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.EncDecAttention = Attention(shape)
        self.layer_norm = RMSNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Shapes as in Attention."""
        attention = self.EncDecAttention(self.layer_norm(hidden), memory, self._bias(hidden, memory))
        return cast(Tensor, hidden + self.dropout(attention))

    def _bias(self, hidden: Tensor, memory: Tensor) -> Tensor | None:
        """Return None in training, which is faster, and zeros otherwise, because Hugging Face's model has a bias.

        Kernels with and without a bias round differently.
        """
        if self.training:
            return None
        return hidden.new_zeros(1, self.EncDecAttention.num_heads, hidden.shape[1], memory.shape[1])


class FeedForwardStep(nn.Module):
    """x + feed_forward(norm(x)). In a model with experts, Hugging Face has another name for the feed-forward."""

    def __init__(self, shape: T5Shape, index: int, expert_parallel_size: int) -> None:
        super().__init__()
        self.name = "mlp" if shape.moe.num_experts else "DenseReluDense"
        self.add_module(self.name, _feed_forward(shape, index, expert_parallel_size))
        self.layer_norm = RMSNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout_rate)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, d_model] to the same shape."""
        return cast(Tensor, hidden + self.dropout(self.get_submodule(self.name)(self.layer_norm(hidden))))


def _feed_forward(shape: T5Shape, index: int, expert_parallel_size: int) -> nn.Module:
    if shape.is_sparse(index):
        from t5train.model.mixture_of_experts import (
            SparseFeedForward,  # imports DeepSpeed, which is slow and not needed for dense models
        )

        return SparseFeedForward(shape, expert_parallel_size)
    return GatedFeedForward(shape) if shape.gated else FeedForward(shape)


class RMSNorm(nn.Module):
    """Scales by the root mean square, without mean or offset (Zhang and Sennrich 2019). Squares are in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        hidden = hidden.view_as(hidden)  # see Attention
        variance = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + LAYER_NORM_EPSILON)).to(self.weight.dtype)

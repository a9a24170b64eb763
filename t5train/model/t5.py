"""T5 v1.0 and v1.1, optionally with experts. Parameter names and arithmetic are those of Hugging Face's models.

Those are T5ForConditionalGeneration and, with experts, SwitchTransformersForConditionalGeneration. Only experts and
routers have other names in DeepSpeed (see t5train.engine.parameter_layout).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.activation_checkpointing import Recomputable, recomputed
from t5train.model.attention import Attention, AttentionRows, PositionBias, sees
from t5train.model.counted_dropout import CountedDropout, branch
from t5train.model.feed_forward import FeedForward, GatedFeedForward
from t5train.model.model_shape import LAYER_NORM_EPSILON, T5Shape

if TYPE_CHECKING:
    from t5train.model.mixture_of_experts import SparseFeedForward


_IGNORED = -100  # torch's cross-entropy leaves such targets out
_EMBEDDED, _FINAL, _BLOCKS = 0, 1, 2  # branches of a stack's keys of dropout; from _BLOCKS on, one for each block
_OUTPUT, _INNER = 0, 1  # branches of a sublayer's keys


class PairRows(NamedTuple):
    """What a model must know of rows that hold several pairs of source and target.

    ``input_segments`` [b, s] and ``target_segments`` [b, t] number the pairs of a row from 1; padding is 0. Every pair
    has a source and a target. ``input_keys`` and ``target_keys``, int64 of the same shapes, are the keys of dropout
    (``t5train.model.counted_dropout``); None without. ``scale``, fp32 of no dimension, is what the sum of the losses of
    all target tokens is multiplied by.
    """

    input_segments: Tensor
    target_segments: Tensor
    input_keys: Tensor | None
    target_keys: Tensor | None
    scale: Tensor


class T5(nn.Module):
    """Encoder and decoder with a shared embedding. ``forward`` returns the training loss.

    In training on rows of pairs, ``label_smoothing`` is the weight of the mean loss over the vocabulary, and ``z_loss``
    that of the squared logarithm of softmax's denominator. ``cross_entropy`` is then what ``forward`` last returned,
    without these two.
    """

    pipeline_layers: Mapping[str, str] = MappingProxyType({})
    label_smoothing = 0.0
    z_loss = 0.0
    cross_entropy: Tensor

    def __init__(self, shape: T5Shape, decoder_start_id: int, expert_parallel_size: int = 1) -> None:
        super().__init__()
        self.shape, self.decoder_start_id = shape, decoder_start_id
        self.expert_parallel_size = expert_parallel_size
        self.shared = SharedEmbedding(shape.vocab_size, shape.d_model)
        self.encoder = Stack(shape, shape.num_layers, False, expert_parallel_size)
        self.decoder = Stack(shape, shape.num_decoder_layers, True, expert_parallel_size)
        if not shape.tied:
            self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor, rows: PairRows | None = None) -> Tensor:
        """Return the mean cross-entropy in nats of ``targets`` [b, t] given ``inputs`` [b, s], over all positions.

        The losses of routers are added, if there are any. With ``rows``, return the sum over all positions that are no
        padding, times its scale.
        """
        if rows is not None:
            total, plain = self._sums_of_losses(self._flat_logits(inputs, targets, rows), targets, rows)
            self.cross_entropy = plain.detach() * rows.scale
            return total * rows.scale
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

    def token_losses(self, inputs: Tensor, targets: Tensor, rows: PairRows | None = None) -> Tensor:
        """Return the cross-entropy in nats of each target token, [b, t], fp32; 0 for padding."""
        return _token_losses(self._flat_logits(inputs, targets, rows), targets, rows)

    def predictions(self, inputs: Tensor, targets: Tensor, rows: PairRows | None = None) -> tuple[Tensor, Tensor]:
        """Return ``token_losses``, and whether the likeliest token is the target, bool [b, t]; False for padding."""
        logits = self._flat_logits(inputs, targets, rows)
        is_hit = logits.argmax(-1).view(targets.shape) == targets
        if rows is not None:
            is_hit &= rows.target_segments > 0
        return _token_losses(logits, targets, rows), is_hit

    def logits(self, inputs: Tensor, decoder_inputs: Tensor, rows: PairRows | None = None) -> Tensor:
        """Return logits [b, t, vocab_size], computed in the dtype of the weights."""
        return self.decode(self.encode(inputs, rows), decoder_inputs, rows)

    def encode(self, inputs: Tensor, rows: PairRows | None = None) -> Tensor:
        """Return the encoder's states [b, s, d_model]."""
        return cast(Tensor, self.encoder(self.shared(inputs), None, rows))

    def decode(self, memory: Tensor, decoder_inputs: Tensor, rows: PairRows | None = None) -> Tensor:
        """Return the same logits as ``logits``, given the encoder's states."""
        hidden = self.decoder(self.shared(decoder_inputs), memory, rows)
        if self.shape.tied:
            return cast(Tensor, self.shared(hidden * self.shape.d_model**-0.5, is_output=True))
        return cast(Tensor, self.lm_head(hidden))

    def _flat_logits(self, inputs: Tensor, targets: Tensor, rows: PairRows | None = None) -> Tensor:
        decoder_inputs = shift_right(targets, self.decoder_start_id, None if rows is None else rows.target_segments)
        return self.logits(inputs, decoder_inputs, rows).float().view(-1, self.shape.vocab_size)

    def _sums_of_losses(self, logits: Tensor, targets: Tensor, rows: PairRows) -> tuple[Tensor, Tensor]:
        """Return the loss to train with, and its cross-entropy alone, which takes no second pass over the logits.

        The operations, and so the bits, are those of torch's cross-entropy with label smoothing.
        """
        labels = _labels(targets, rows)
        log_probabilities = logits.log_softmax(-1)
        plain = functional.nll_loss(log_probabilities, labels, reduction="sum")
        loss = plain
        if self.label_smoothing:
            spread = (-log_probabilities.sum(-1)).masked_fill(labels == _IGNORED, 0).sum()
            loss = plain * (1 - self.label_smoothing) + spread * (self.label_smoothing / self.shape.vocab_size)
        if self.z_loss:
            squares = logits.logsumexp(-1).square()
            loss = loss + self.z_loss * torch.where(labels != _IGNORED, squares, 0).sum()
        return loss, plain


def _token_losses(logits: Tensor, targets: Tensor, rows: PairRows | None) -> Tensor:
    return functional.cross_entropy(logits, _labels(targets, rows), reduction="none").view(targets.shape)


def _labels(targets: Tensor, rows: PairRows | None) -> Tensor:
    """Return the targets, flat, without padding."""
    return (targets if rows is None else targets.masked_fill(rows.target_segments == 0, _IGNORED)).reshape(-1)


class SharedEmbedding(nn.Embedding):
    """Embeds ids; in a tied model it also computes the logits.

    Both go through ``forward``, because at ZeRO 3 this module's hooks gather the weight, also in evaluation.
    """

    def forward(self, tokens: Tensor, is_output: bool = False) -> Tensor:
        """Map ids [b, n] to [b, n, d_model]; if ``is_output``, [b, n, d_model] to logits [b, n, vocab_size]."""
        return functional.linear(tokens, self.weight) if is_output else super().forward(tokens)


def shift_right(targets: Tensor, start_id: int, segments: Tensor | None = None) -> Tensor:
    """Return decoder inputs [b, t]: the start id, then the targets without the last one; in each of the segments."""
    start = targets.new_full((targets.shape[0], 1), start_id)
    shifted = torch.cat([start, targets[:, :-1]], dim=1)
    if segments is None:
        return shifted
    begins = segments.diff(dim=1, prepend=torch.full_like(start, -1)) != 0
    return shifted.masked_fill(begins, start_id)


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
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(self, embedded: Tensor, memory: Tensor | None = None, rows: PairRows | None = None) -> Tensor:
        """Map ``embedded`` [b, n, d_model] to the same shape; a decoder attends to ``memory`` [b, m, d_model]."""
        if rows is not None:
            return self._forward_rows(embedded, memory, rows)
        bias = cast(Block, self.block[0]).position_bias(embedded.shape[1])
        hidden = self.dropout(embedded)
        for block in self.block:
            hidden = block(hidden, bias, memory)
        return cast(Tensor, self.dropout(self.final_layer_norm(hidden)))

    def _forward_rows(self, embedded: Tensor, memory: Tensor | None, rows: PairRows) -> Tensor:
        segments = rows.target_segments if self.is_decoder else rows.input_segments
        keys = rows.target_keys if self.is_decoder else rows.input_keys
        position_bias = cast(Block, self.block[0]).position_bias
        bias, mask = position_bias(embedded.shape[1], segments), None
        if memory is not None and not position_bias.by_distance:
            lowest = torch.finfo(memory.dtype).min
            mask = torch.where(sees(segments, rows.input_segments), memory.new_zeros(()), lowest)
        hidden = self.dropout(embedded, branch(keys, _EMBEDDED))
        known = AttentionRows(segments, rows.input_segments, keys, rows.input_keys)
        for number, block in enumerate(self.block):
            hidden = block(hidden, bias, memory, mask, known.below(_BLOCKS + number))
        return cast(Tensor, self.dropout(self.final_layer_norm(hidden), branch(keys, _FINAL)))


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

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor,
        memory: Tensor | None,
        mask: Tensor | None = None,
        rows: AttentionRows | None = None,
    ) -> Tensor:
        """Run the block; shapes as in Stack. In rows of pairs, ``mask`` is that of CrossAttentionStep.

        With recomputation, activations of experts are still kept: a second pass would count their tokens twice, and
        all ranks must exchange tokens in the same order.
        """
        if not self.recompute:
            return self._whole(hidden, bias, memory, mask, rows)
        if self.is_sparse:
            return self._feed_forward(recomputed(self._attend, hidden, bias, memory, mask, rows), rows)
        return recomputed(self._whole, hidden, bias, memory, mask, rows)

    def _whole(
        self, hidden: Tensor, bias: Tensor, memory: Tensor | None, mask: Tensor | None, rows: AttentionRows | None
    ) -> Tensor:
        return self._feed_forward(self._attend(hidden, bias, memory, mask, rows), rows)

    def _attend(
        self, hidden: Tensor, bias: Tensor, memory: Tensor | None, mask: Tensor | None, rows: AttentionRows | None
    ) -> Tensor:
        hidden = self.layer[0](hidden, bias, None if rows is None else rows.below(0).of_itself())
        if memory is None:
            return hidden
        return cast(Tensor, self.layer[1](hidden, memory, mask, None if rows is None else rows.below(1)))

    def _feed_forward(self, hidden: Tensor, rows: AttentionRows | None) -> Tensor:
        return cast(Tensor, self.layer[-1](hidden, None if rows is None else branch(rows.keys, 2)))


class SelfAttentionStep(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, shape: T5Shape, position_bias: PositionBias | None, causal: bool) -> None:
        super().__init__()
        self.SelfAttention = Attention(shape, position_bias, causal)
        self.layer_norm = RMSNorm(shape.d_model)
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, bias: Tensor, rows: AttentionRows | None = None) -> Tensor:
        """Shapes as in Attention; keys of ``rows`` are those of this step."""
        normed = self.layer_norm(hidden)
        if rows is None:
            return cast(Tensor, hidden + self.dropout(self.SelfAttention(normed, normed, bias)))
        attention = self.SelfAttention(normed, normed, bias, rows.below(_INNER))
        return cast(Tensor, hidden + self.dropout(attention, branch(rows.keys, _OUTPUT)))


class CrossAttentionStep(nn.Module):
    """x + attention(norm(x), memory), without a bias."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.EncDecAttention = Attention(shape)
        self.layer_norm = RMSNorm(shape.d_model)
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        rows: AttentionRows | None = None,
    ) -> Tensor:
        """Shapes as in Attention; ``mask`` [b, 1, q, k], of rows of pairs without kernels, is added to the scores."""
        bias = self._bias(hidden, memory) if mask is None else mask
        if rows is None:
            return cast(Tensor, hidden + self.dropout(self.EncDecAttention(self.layer_norm(hidden), memory, bias)))
        attention = self.EncDecAttention(self.layer_norm(hidden), memory, bias, rows.below(_INNER))
        return cast(Tensor, hidden + self.dropout(attention, branch(rows.keys, _OUTPUT)))

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
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """[b, n, d_model] to the same shape."""
        layer, normed = self.get_submodule(self.name), self.layer_norm(hidden)
        inner = layer(normed) if keys is None else layer(normed, branch(keys, _INNER))
        return cast(Tensor, hidden + self.dropout(inner, branch(keys, _OUTPUT)))


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

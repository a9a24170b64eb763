"""The FLOPs of a training step: the matrix products of a T5, forward and backward."""

from t5train.data.samples.span_corruption import geometry
from t5train.model.model_shape import T5Shape
from t5train.spec import ObjectiveSpec


def training_flops(shape: T5Shape, input_tokens: int, target_tokens: int, is_frozen: bool = False) -> int:
    """Return the FLOPs of the matrix products of one sequence, forward and backward.

    The convention is that of Kaplan et al. 2020 (section 2.1) and of model FLOPs utilization in PaLM (Chowdhery et al.
    2022, appendix B): 6 for each parameter and token (2 forward, 4 backward), and 12 for each pair of positions that
    attend and each dimension of the heads; a causal mask saves nothing. A T5 has two kinds of tokens, so each weight
    counts for the tokens that it multiplies: keys and values of cross-attention for the encoder's tokens, the logits
    for the decoder's. Of the experts, only the ``top_k`` that a token is routed to count, and the router. Norms,
    softmax, the optimizer's update, and what activation checkpointing computes again are left out. Weights that are
    frozen, beside adapters, count 4, as they have no gradients; adapters are left out.
    """
    projection = shape.d_model * shape.inner
    feed_forward = (3 if shape.gated else 2) * shape.d_model * shape.d_ff
    encoder = shape.num_layers * (4 * projection + feed_forward) + _sparse(shape, shape.num_layers, feed_forward)
    decoder = shape.num_decoder_layers * (6 * projection + feed_forward)
    decoder += _sparse(shape, shape.num_decoder_layers, feed_forward) + shape.vocab_size * shape.d_model
    keys_and_values = shape.num_decoder_layers * 2 * projection
    weights = (encoder + keys_and_values) * input_tokens + decoder * target_tokens
    pairs = shape.num_layers * input_tokens**2
    pairs += shape.num_decoder_layers * target_tokens * (target_tokens + input_tokens)
    return (4 if is_frozen else 6) * weights + 12 * shape.inner * pairs


def flops_per_token(shape: T5Shape, objective: ObjectiveSpec) -> float:
    """Return the training FLOPs per token, counting the tokens of encoder and decoder alike, as tokens/s does."""
    target_tokens = geometry(objective).target_tokens
    tokens = objective.input_tokens + target_tokens
    return training_flops(shape, objective.input_tokens, target_tokens) / tokens


def _sparse(shape: T5Shape, num_layers: int, feed_forward: int) -> int:
    """Parameters that experts add to a stack per token: the router, and a feed-forward for each expert but one."""
    router = shape.d_model * shape.moe.num_experts
    return shape.count_sparse(num_layers) * ((shape.moe.top_k - 1) * feed_forward + router)

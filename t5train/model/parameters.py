"""Name and shape of every parameter of a T5, without torch: as Hugging Face's models have them, ties once."""

from collections.abc import Iterator

from t5train.model.shape import RELATIVE_BUCKETS, T5Shape

Named = Iterator[tuple[str, tuple[int, ...]]]


def parameter_shapes(shape: T5Shape) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    found: dict[str, tuple[int, ...]] = {"shared.weight": (shape.vocab_size, shape.d_model)}
    found |= dict(_stack("encoder", shape, shape.num_layers))
    found |= dict(_stack("decoder", shape, shape.num_decoder_layers))
    return found if shape.tied else found | {"lm_head.weight": (shape.vocab_size, shape.d_model)}


def _stack(stack: str, shape: T5Shape, num_layers: int) -> Named:
    attentions = ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
    for index in range(num_layers):
        block = f"{stack}.block.{index}.layer"
        for number, attention in enumerate(attentions):
            yield from _attention(f"{block}.{number}.{attention}", shape)
            yield f"{block}.{number}.layer_norm.weight", (shape.d_model,)
        if index == 0:
            bias = f"{block}.0.SelfAttention.relative_attention_bias.weight"
            yield bias, (RELATIVE_BUCKETS, shape.num_heads)
        yield from _feed_forward(f"{block}.{len(attentions)}", shape, is_sparse=shape.is_sparse(index))
        yield f"{block}.{len(attentions)}.layer_norm.weight", (shape.d_model,)
    yield f"{stack}.final_layer_norm.weight", (shape.d_model,)


def _attention(path: str, shape: T5Shape) -> Named:
    for projection in ("q", "k", "v"):
        yield f"{path}.{projection}.weight", (shape.inner, shape.d_model)
    yield f"{path}.o.weight", (shape.d_model, shape.inner)


def _feed_forward(layer: str, shape: T5Shape, *, is_sparse: bool) -> Named:
    if not is_sparse:
        yield from _projections(f"{layer}.{'mlp' if shape.moe.num_experts else 'DenseReluDense'}", shape)
        return
    yield f"{layer}.mlp.router.classifier.weight", (shape.moe.num_experts, shape.d_model)
    for expert in range(shape.moe.num_experts):
        yield from _projections(f"{layer}.mlp.experts.expert_{expert}", shape)


def _projections(path: str, shape: T5Shape) -> Named:
    for projection in ("wi_0", "wi_1") if shape.gated else ("wi",):
        yield f"{path}.{projection}.weight", (shape.d_ff, shape.d_model)
    yield f"{path}.wo.weight", (shape.d_model, shape.d_ff)

"""T5's attention in Triton kernels for 16-bit training on NVIDIA GPUs: unscaled scores plus a learned bias by distance.

torch's kernels take a dense bias [1, heads, n, n] and sum its gradient over the batch. These take a short vector for
each head and return its gradient; on an H200 a layer of T5 base takes a third of the time. Both passes are custom
operators, so ``torch.compile`` keeps the graph whole.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from t5train.model.attention import Attention, PositionBias
from t5train.model.kernels import attention_kernels
from t5train.model.kernels.operators import HOPPER, ROUNDING, operator

_BLOCK = 64  # rows of queries and of keys in a tile
_PROGRAMS = 1900  # about, of bias_tiles; a constant, because the order of the sums over the batch depends on it
_DIAGONAL_WIDTH = 1024


def use_in(model: nn.Module) -> None:
    """Let all attention of ``model`` use these kernels in training."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = biased_attention
        elif isinstance(module, PositionBias):
            module.table_of = table_of


def table_of(bias: Tensor) -> Tensor:
    """Return the table of ``biased_attention`` for a bias [heads, 2 * far + 1].

    Entry far + x is the bias of keys x after their query; keys farther than far take the end's entry.
    """
    padded = functional.pad(bias.float(), (attention_kernels.PAD.value,) * 2, mode="replicate")
    return padded.unfold(1, 2, 1).contiguous()


def biased_attention(
    query: Tensor | None, packed: Tensor, table: Tensor | None, causal: bool = False, lengths: Tensor | None = None
) -> Tensor:
    """Return softmax(q k^T + bias) v, [b, nq, heads, d].

    ``query`` is [b, nq, heads, d] and ``packed`` [b, nk, 2, heads, d] holds keys and values; without ``query``,
    ``packed`` [b, n, 3, heads, d] holds queries, too. ``table`` is that of ``table_of``; None for no bias. ``lengths``
    [b], int32, at least 1, is the number of keys of each sequence that are no padding. The tensors are bf16 or fp16,
    and d is one of KERNEL_HEAD_WIDTHS. Two calls give the same bits.
    """
    output: Tensor = _attention(query, packed, table, lengths, causal)[0]
    return output


@operator
def _attention(
    query: Tensor | None, packed: Tensor, table: Tensor | None, lengths: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each query's scores in base 2, [b, heads, whole blocks], fp32."""
    q, k, v = _unpacked(query, packed)
    (b, nq, h, d), nk = q.shape, k.shape[1]
    options = _options(d)["forward"]
    padded, keys = _padded(nq), options["BK"]
    out, lse = q.new_empty(b, nq, h, d), q.new_empty(b, h, padded, dtype=torch.float32)
    attention_kernels.queries_forward[(padded // _BLOCK * b * h,)](
        _rows(q), _rows(k, keys), _rows(v, keys), _rows(out), table, lengths, lse, h, nq, nk, padded, FAR=_far(table),
        D=d, BQ=_BLOCK, CAUSAL=causal, EVEN=nk % keys == 0 and lengths is None, **options,
    )  # fmt: skip
    return out, lse


@_attention.register_fake
def _(query: Tensor | None, packed: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    b, n, h, d = packed[:, :, 0].shape if query is None else query.shape
    return packed.new_empty(b, n, h, d), packed.new_empty(b, h, _padded(n), dtype=torch.float32)


# torch derives the operator's schema from these parameters, and a schema has no tuples to put tensors of several kinds
# into, so there are more of them than ruff allows.
@operator
def _attention_backward(  # noqa: PLR0913, PLR0917 - see above
    dout: Tensor,
    query: Tensor | None,
    packed: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, packed and table; those of what is not there are empty."""
    dquery = packed.new_empty(0) if query is None else query.new_empty(query.shape)
    dpacked = packed.new_empty(packed.shape)
    q, k, v = _unpacked(query, packed)
    dq, dk, dv = _unpacked(None if query is None else dquery, dpacked)
    (b, nq, h, d), nk, padded, far = q.shape, k.shape[1], lse.shape[2], _far(table)
    dout, out, delta = _readable(dout), out.contiguous(), torch.empty_like(lse)
    options, blocks = _options(d), padded // _BLOCK
    beyond = lse.new_empty(b, h, blocks, 2)
    sizes = (h, nq, nk, padded)
    flags: dict[str, Any] = {"D": d, "CAUSAL": causal, "EVEN": nk % _BLOCK == 0 and lengths is None}
    blocked = {"FAR": far, "BQ": _BLOCK, "BK": _BLOCK, **flags}
    tiles = [_rows(x) for x in (q, k, v, dout)]
    attention_kernels.queries_backward[(blocks * b * h,)](
        *tiles[:3], out, tiles[3], _rows(dq), table, lengths, lse, delta, beyond, *sizes, **blocked, **options["dq"]
    )
    attention_kernels.keys_backward[(triton.cdiv(nk, _BLOCK) * b * h,)](
        *tiles, _rows(dk), _rows(dv), _line(lse), _line(delta), table, lengths, *sizes[:3], **blocked, **options["dkdv"]
    )
    if table is None:
        return dquery, dpacked, lse.new_empty(0)
    offsets = _offsets(blocks, triton.cdiv(nk, _BLOCK), far, causal)
    part = max(b * h * len(offsets) // _PROGRAMS, triton.cdiv(8, blocks))
    parts = triton.cdiv(b, part)
    sums = lse.new_empty(parts, h, len(offsets), _BLOCK, _BLOCK)
    attention_kernels.bias_tiles[(len(offsets), h, parts)](
        *tiles, table, lengths, lse, delta, sums, b, h, nq, nk, padded, offsets.start, part, B=_BLOCK, FAR=far,
        **flags, **options["tiles"],
    )  # fmt: skip
    dtable = torch.zeros_like(table)
    attention_kernels.bias_diagonals[(h, 2 * far + 1)](
        sums.sum(0), beyond, dtable, b, h, blocks, offsets.start, len(offsets),
        FAR=far, B=_BLOCK, WIDTH=_DIAGONAL_WIDTH, **ROUNDING,
    )  # fmt: skip
    return dquery, dpacked, dtable


@_attention_backward.register_fake
def _(
    _dout: Tensor, query: Tensor | None, packed: Tensor, table: Tensor | None, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dquery = packed.new_empty(0) if query is None else query.new_empty(query.shape)
    dtable = packed.new_empty(0, dtype=torch.float32) if table is None else torch.empty_like(table)
    return dquery, packed.new_empty(packed.shape), dtable


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, packed, table, lengths, out, lse = ctx.saved_tensors
    dquery, dpacked, dtable = _attention_backward(dout, query, packed, table, lengths, out, lse, ctx.causal)
    return None if query is None else dquery, dpacked, None if table is None else dtable, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _options(d: int) -> dict[str, dict[str, Any]]:
    """Return the fastest of the shapes tried on an H200; fewer registers a thread let more programs run at a time.

    On other GPUs, registers are left to the compiler, and fewer tiles are fetched ahead: there may be only 99 KiB of
    shared memory, before Hopper (8.6) and after it (12.0). Before it, Triton replaces descriptors by ordinary loads.
    """
    small, is_hopper = d <= 64, capability() // 10 == HOPPER
    capped = small and is_hopper
    options: dict[str, dict[str, Any]] = {
        "forward": {"BK": 128 if small else 64, "STAGES": 2 if small else 3},
        "dq": {"STAGES": 2, "maxnreg": 128 if capped else None},
        "dkdv": {"STAGES": 3 if capped else 2, "maxnreg": 168 if capped else None},
        "tiles": {"STAGES": 3 if is_hopper else 2},
    }
    return {kernel: {"num_warps": 4, **ROUNDING, **chosen} for kernel, chosen in options.items()}


def capability() -> int:
    """Return the compute capability of the GPU, such as 90; the interpreter's is that of Hopper."""
    return 90 if attention_kernels.INTERPRETED.value else int(triton.runtime.driver.active.get_current_target().arch)


def _offsets(query_blocks: int, key_blocks: int, far: int, causal: bool) -> range:
    """Return how many blocks after their queries those keys lie whose distances the bias tells apart."""
    nearest = (far - 2) // _BLOCK + 1  # a block this far off the diagonal still holds a distance below far
    return range(max(1 - query_blocks, -nearest), min(1 if causal else key_blocks, nearest + 1))


def _far(table: Tensor | None) -> int:
    """Return the farthest distance with an entry of its own."""
    return 0 if table is None else int(table.shape[1]) // 2 - int(attention_kernels.PAD.value)


def _unpacked(query: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each [b, n, heads, d]."""
    packed = _readable(packed)
    *queries, keys, values = packed.unbind(2)
    return queries[0] if query is None else _readable(query), keys, values


def _padded(n: int) -> int:
    return -(-n // _BLOCK) * _BLOCK


def _readable(x: Tensor) -> Tensor:
    """Return ``x``, or a copy: descriptors need contiguous rows that start at multiples of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor, rows: int = _BLOCK) -> TensorDescriptor:
    """Return a descriptor of [b, n, heads, d] for ``rows`` rows of one (batch, head) at a time."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]])


def _line(x: Tensor) -> TensorDescriptor:
    """Return a descriptor of [b, heads, whole blocks] for one block of a (batch, head) at a time."""
    b, h, padded = x.shape
    return TensorDescriptor(x, [b * h, padded], [padded, 1], [1, _BLOCK])

"""T5's attention in Triton kernels for 16-bit training on NVIDIA GPUs: unscaled scores plus a learned bias by distance.

torch's kernels take a dense bias [1, heads, n, n] and sum its gradient over the batch. These take a short vector for
each head and return its gradient; on an H200 a layer of T5 base takes a third of the time. Both passes are custom
operators, so ``torch.compile`` keeps the graph whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from t5train.model.attention import Attention, AttentionRows, PositionBias
from t5train.model.counted_dropout import lowest_kept
from t5train.model.kernels import attention_kernels
from t5train.model.kernels.operators import HOPPER, ROUNDING, operator
from t5train.model.kernels.segment_tiles import BLOCK as _BLOCK
from t5train.model.kernels.segment_tiles import STEP, segment_tiles

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
    query: Tensor | None,
    packed: Tensor,
    table: Tensor | None,
    causal: bool = False,
    rows: AttentionRows | None = None,
    dropout_rate: float = 0.0,
) -> Tensor:
    """Return softmax(q k^T + bias) v, [b, nq, heads, d].

    ``query`` is [b, nq, heads, d] and ``packed`` [b, nk, 2, heads, d] holds keys and values; without ``query``,
    ``packed`` [b, n, 3, heads, d] holds queries, too. ``table`` is that of ``table_of``; None for no bias. With
    ``rows``, a query sees the keys of its segment; padding, and a segment without keys, gives 0. If they have keys of
    dropout, a share ``dropout_rate`` of the probabilities is dropped, the same as without kernels. The tensors are bf16
    or fp16, and d is one of KERNEL_HEAD_WIDTHS. Two calls give the same bits.
    """
    known = _tensors(packed, table, causal, rows, dropout_rate)
    output: Tensor = _attention(query, packed, table, known, causal, dropout_rate)[0]
    return output


class _Rows(NamedTuple):
    """The tensors of AttentionRows and SegmentTiles, all None without rows of pairs, and those of dropout without it.

    They are made outside the operators, where ``torch.compile`` makes them once for all layers.
    """

    segments: Tensor | None = None
    memory_segments: Tensor | None = None
    of_queries: Tensor | None = None
    of_keys: Tensor | None = None
    near: Tensor | None = None
    num_near: Tensor | None = None
    dropout: Tensor | None = None
    memory_dropout: Tensor | None = None

    def visited(self, seen: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the arguments of a kernel whose blocks visit what ``seen`` says."""
        return self.segments, self.memory_segments, seen, self.dropout, self.memory_dropout


_TEXT = _Rows()


def _tensors(
    packed: Tensor, table: Tensor | None, causal: bool, rows: AttentionRows | None, dropout_rate: float
) -> list[Tensor]:
    """Return the leading fields of _Rows that are there. Keys may be for the dropout of adapters alone."""
    if rows is None:
        return []
    nq, nk = rows.segments.shape[1], packed.shape[1]
    offsets = range(0) if table is None else _offsets(nq, nk, _far(table), causal)
    tiles = segment_tiles(rows.segments, rows.memory_segments, offsets)
    keys = [each.contiguous() for each in (rows.keys, rows.memory_keys) if dropout_rate and each is not None]
    return [rows.segments.contiguous(), rows.memory_segments.contiguous(), *tiles, *keys]


@operator
def _attention(
    query: Tensor | None,
    packed: Tensor,
    table: Tensor | None,
    rows: Sequence[Tensor],
    causal: bool,
    dropout_rate: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each query's scores in base 2, [b, heads, whole blocks], fp32."""
    q, k, v = _unpacked(query, packed)
    (b, nq, h, d), nk, known = q.shape, k.shape[1], _Rows(*rows)
    options = _options(d, known)["forward"]
    padded, keys = _padded(nq), options["BK"]
    out, lse = q.new_empty(b, nq, h, d), q.new_empty(b, h, padded, dtype=torch.float32)
    attention_kernels.queries_forward[(padded // _BLOCK * b * h,)](
        _rows(q), _rows(k, keys), _rows(v, keys), _rows(out), table, *known.visited(known.of_queries), lse, h, nq, nk,
        padded, FAR=_far(table), D=d, BQ=_BLOCK, CAUSAL=causal, **_masks(known, nk % keys == 0, dropout_rate),
        **options,
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
    rows: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    dropout_rate: float,
    is_bias_frozen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, packed and table; those of what is not there, or is frozen, are empty."""
    dquery = packed.new_empty(0) if query is None else query.new_empty(query.shape)
    dpacked = packed.new_empty(packed.shape)
    q, k, v = _unpacked(query, packed)
    dq, dk, dv = _unpacked(None if query is None else dquery, dpacked)
    (b, nq, h, d), nk, padded, far, known = q.shape, k.shape[1], lse.shape[2], _far(table), _Rows(*rows)
    dout, out, delta = _readable(dout), out.contiguous(), torch.empty_like(lse)
    options, blocks = _options(d, known), padded // _BLOCK
    beyond = lse.new_empty(b, h, blocks, 2)
    sizes = (h, nq, nk, padded)
    flags: dict[str, Any] = {"D": d, "CAUSAL": causal, **_masks(known, nk % _BLOCK == 0, dropout_rate)}
    step_k, step_q = options["dq"]["BK"], options["dkdv"]["BQ"]
    q_rows, k_rows, v_rows, dout_rows = (_rows(x) for x in (q, k, v, dout))
    attention_kernels.queries_backward[(blocks * b * h,)](
        q_rows, _rows(k, step_k), _rows(v, step_k), out, dout_rows, _rows(dq), table,
        *known.visited(known.of_queries), lse, delta, beyond, *sizes, FAR=far, BQ=_BLOCK, **flags, **options["dq"],
    )  # fmt: skip
    attention_kernels.keys_backward[(triton.cdiv(nk, _BLOCK) * b * h,)](
        _rows(q, step_q), k_rows, v_rows, _rows(dout, step_q), _rows(dk), _rows(dv), _line(lse, step_q),
        _line(delta, step_q), table, *known.visited(known.of_keys), *sizes[:3], FAR=far, BK=_BLOCK, **flags,
        **options["dkdv"],
    )  # fmt: skip
    if table is None or is_bias_frozen:
        return dquery, dpacked, lse.new_empty(0)
    offsets = _offsets(nq, nk, far, causal)
    part = max(b * h * len(offsets) // _PROGRAMS, triton.cdiv(8, blocks))
    parts = triton.cdiv(b, part)
    sums = lse.new_empty(parts, h, len(offsets), _BLOCK, _BLOCK)
    attention_kernels.bias_tiles[(len(offsets), h, parts)](
        q_rows, k_rows, v_rows, dout_rows, table, *known.visited(known.near), known.num_near, lse, delta, sums, b,
        *sizes, offsets.start, part, B=_BLOCK, FAR=far, **flags, **options["tiles"],
    )  # fmt: skip
    dtable = torch.zeros_like(table)
    attention_kernels.bias_diagonals[(h, 2 * far + 1)](
        sums.sum(0), beyond, dtable, b, h, blocks, offsets.start, len(offsets),
        FAR=far, B=_BLOCK, WIDTH=_DIAGONAL_WIDTH, **ROUNDING,
    )  # fmt: skip
    return dquery, dpacked, dtable


@_attention_backward.register_fake
def _(
    _dout: Tensor, query: Tensor | None, packed: Tensor, table: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dquery = packed.new_empty(0) if query is None else query.new_empty(query.shape)
    is_bias_frozen = others[-1]
    if table is None or is_bias_frozen:
        return dquery, packed.new_empty(packed.shape), packed.new_empty(0, dtype=torch.float32)
    return dquery, packed.new_empty(packed.shape), torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, packed, table, rows, ctx.causal, ctx.dropout_rate = inputs
    ctx.save_for_backward(query, packed, table, *output, *rows)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Any, ...]:
    query, packed, table, out, lse, *rows = ctx.saved_tensors
    learns_bias = ctx.needs_input_grad[2]  # not if only adapters learn
    dquery, dpacked, dtable = _attention_backward(
        dout, query, packed, table, rows, out, lse, ctx.causal, ctx.dropout_rate, not learns_bias
    )
    of_inputs = None if query is None else dquery, dpacked, dtable if learns_bias else None
    return *of_inputs, [None] * len(rows), None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _masks(rows: _Rows, is_even: bool, dropout_rate: float) -> dict[str, Any]:
    """Return the settings of a kernel's masks; ``is_even`` if keys fill their tiles. Segments mask what lies past."""
    rate = 0.0 if rows.dropout is None else dropout_rate
    return {"EVEN": is_even or rows.segments is not None, "LOWEST": lowest_kept(rate), "SCALE": 1 / (1 - rate)}


def _options(d: int, rows: _Rows = _TEXT) -> dict[str, dict[str, Any]]:
    """Return the fastest of the shapes tried on an H200; fewer registers a thread let more programs run at a time.

    On other GPUs, registers are left to the compiler, and fewer tiles are fetched ahead: there may be only 99 KiB of
    shared memory, before Hopper (8.6) and after it (12.0). Before it, Triton replaces descriptors by ordinary loads.

    For rows of pairs, narrow steps visit fewer tokens of other segments, for which dropout would be hashed, too.
    """
    small, is_hopper, is_text = d <= 64, capability() // 10 == HOPPER, rows.segments is None
    step, capped = _BLOCK if is_text else STEP, small and is_hopper
    options: dict[str, dict[str, Any]] = {
        "forward": {"BK": 128 if small and is_text else step, "STAGES": 2 if small else 3},
        "dq": {"BK": step, "STAGES": 2, "maxnreg": 128 if capped else None},
        "dkdv": {"BQ": step, "STAGES": 2, "maxnreg": None},
        "tiles": {"STAGES": 2},
    }
    if is_hopper:
        options["tiles"] |= {"STAGES": 3} if is_text else {"num_warps": 8, "maxnreg": 128}
    if capped:
        options["dkdv"] |= {"STAGES": 3, "maxnreg": 168} if is_text else {"maxnreg": 128}
        options["dq"] |= {} if is_text else {"STAGES": 3, "maxnreg": None}
    return {kernel: {"num_warps": 4, **ROUNDING, **chosen} for kernel, chosen in options.items()}


def capability() -> int:
    """Return the compute capability of the GPU, such as 90; the interpreter's is that of Hopper."""
    return 90 if attention_kernels.INTERPRETED.value else int(triton.runtime.driver.active.get_current_target().arch)


def _offsets(nq: int, nk: int, far: int, causal: bool) -> range:
    """Return how many blocks after their queries those keys lie whose distances the bias tells apart."""
    query_blocks, key_blocks = _padded(nq) // _BLOCK, _padded(nk) // _BLOCK
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


def _line(x: Tensor, numbers: int) -> TensorDescriptor:
    """Return a descriptor of [b, heads, whole blocks] for some numbers of one (batch, head) at a time."""
    b, h, padded = x.shape
    return TensorDescriptor(x, [b * h, padded], [padded, 1], [1, numbers])

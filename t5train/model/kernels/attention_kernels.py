"""Kernels of T5's attention; ``biased_attention`` launches them.

scores[i, j] = q[i] . k[j] + bias[head, j - i]. The bias enters as one short vector a head and its gradient leaves as
one; no matrix of n x n numbers ever lies in memory. Every sum has a fixed order, so two runs give the same bits.

Forward: one program for each (batch, head, block of queries), softmax on the fly (Dao et al. 2022). It keeps for each
query lse = log2(sum over keys of 2^(log2(e) * score)), from which the backward has any probability p again.

Backward; dscores = p * (dout . v - delta), where delta[i] = out[i] . dout[i]:

1. ``queries_backward``, for each block of queries: delta, dq, and the plain sums of dscores over the tiles that lie
   wholly beyond the farthest distance that the bias tells apart (all of such a tile shares one bias).
2. ``keys_backward``, for each block of keys: dk and dv.
3. ``bias_tiles``: tiles equally far off the diagonal hold the same distances, so for each such offset near the diagonal
   it computes dscores again and adds tile on tile, along the diagonal and over a part of the batch.
4. ``bias_diagonals``, after a sum over the parts: sums those few tiles along their diagonals, and adds step 1's.

Descriptors (the copy engine's on Hopper) pad sequences to whole tiles: rows past the end read as zeros and are not
written. A query past the end has q = dout = delta = 0, so it adds nothing to any gradient; keys past it are masked.

Rows of pairs: a query sees the keys of its own segment, and ``segment_tiles`` says which tiles share one; no others are
read. Padding sees nothing and gives 0. Dropout hashes keys of tokens as ``t5train.model.counted_dropout`` does, in each
kernel again: m = 0 or 1 / (1 - rate) for each probability. Then out = (m p) v and dv = (m p)^T dout, and
dscores = p (m (dout . v) - delta) with the same delta.
"""

import triton
import triton.language as tl

from t5train.model.kernels.pair_kernels import (
    dropout_of_keys,
    dropout_of_queries,
    kept_of,
    of_tokens,
    segments_of_queries,
    visited,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PAD: tl.constexpr = tl.constexpr(256)
"""Distances beyond the farthest in the table of the bias: every tile with a nearer one stays within."""
UNSEEN: tl.constexpr = tl.constexpr(-1e30)
"""Below any score; the highest score of a query that sees nothing. Infinity minus infinity would not be a number."""
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(rows, b, h, first, N: tl.constexpr, D: tl.constexpr):
    """N rows of one (batch, head) from ``first`` on, fetched by the copy engine."""
    return rows.load([b, h, first, 0]).reshape(N, D)


@triton.jit
def _store(rows, tile, b, h, first, N: tl.constexpr, D: tl.constexpr):
    rows.store([b, h, first, 0], tile.to(rows.dtype).reshape(1, 1, N, D))


@triton.jit
def _read2(pointers):
    """Two float32 that lie side by side, for each of the pointers; read-only data.

    tl.load would choose a layout of its own and then pass the tile through shared memory into that of the matrix
    product. This is an instruction like any other, so its addresses are computed where the product has its elements,
    and since those of a thread repeat along the diagonals, the compiler drops most of the loads.
    """
    if INTERPRETED:
        return tl.load(pointers), tl.load(pointers + 1)
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=r,=r,l", [pointers], (tl.float32, tl.float32), True, 1
    )


@triton.jit
def _of_head(table, h, FAR: tl.constexpr):
    """A head's bias at distance 0, in a table that holds pairs of float32: the bias of a distance and of the next."""
    return table + (2 * h + 1) * 2 * (FAR + PAD)


@triton.jit
def _near_bias(table, shift, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MIRRORED: tl.constexpr):
    """A tile of the bias for the distances shift + column - row; if ``MIRRORED``, for the negative ones."""
    shift += 2 * tl.arange(0, COLUMNS // 2)[None, :] - tl.arange(0, ROWS)[:, None]
    if MIRRORED:
        two, one = _read2(table - 2 * shift - 2)
    else:
        one, two = _read2(table + 2 * shift)
    return tl.join(one, two).reshape(ROWS, COLUMNS)


@triton.jit
def _bias(
    table, shift, FAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MIRRORED: tl.constexpr = False
):  # fmt: skip
    """The same, but a tile wholly beyond FAR takes its one value from the table's end."""
    if (shift - (ROWS - 1) < FAR) & (shift + (COLUMNS - 1) > -FAR):
        bias = _near_bias(table, shift, ROWS, COLUMNS, MIRRORED)
    else:
        ahead: tl.constexpr = -FAR if MIRRORED else FAR
        bias = tl.zeros([ROWS, COLUMNS], tl.float32) + tl.load(table + 2 * tl.where(shift > 0, ahead, -ahead))
    return bias


@triton.jit
def _place(blocks, heads):
    """This program's (batch, head), its batch, head and block."""
    pair = tl.program_id(0) // blocks
    return pair, pair // heads, pair % heads, tl.program_id(0) % blocks


@triton.jit
def queries_forward(
    q_rows, k_rows, v_rows, out_rows, table, segments, memory_segments, seen, dropout, memory_dropout, lse_base,
    heads, nq, nk, padded,
    FAR: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, LOWEST: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the output and the log-sum-exp of a block of queries."""
    pair, b, h, block = _place(tl.cdiv(nq, BQ), heads)
    if table is not None:
        table = _of_head(table, h, FAR)
    first_q = block * BQ
    queries = first_q + tl.arange(0, BQ)
    q = _load(q_rows, b, h, first_q, BQ, D)
    highest = tl.full([BQ], float("-inf") if segments is None else UNSEEN, tl.float32)  # score so far, times log2(e)
    total = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, D], tl.float32)
    begin, end = visited(seen, b, block, tl.cdiv(nq, BQ), nk)
    if CAUSAL:
        end = tl.minimum(end, first_q + BQ)
    if segments is not None:
        mine = segments_of_queries(segments, b, nq, queries)
    if dropout is not None:
        low, high = dropout_of_queries(dropout, b, nq, queries, h)
    for first_k in tl.range(begin, end, BK, num_stages=STAGES):
        k = _load(k_rows, b, h, first_k, BK, D)
        s = tl.dot(q, tl.trans(k))
        if table is not None:
            s += _bias(table, first_k - first_q, FAR, BQ, BK)
        keys = first_k + tl.arange(0, BK)
        if CAUSAL:
            s = tl.where(keys[None, :] <= queries[:, None], s, float("-inf"))
        if not EVEN:
            s = tl.where(keys[None, :] < nk, s, float("-inf"))
        if segments is not None:
            s = tl.where(mine[:, None] == of_tokens(memory_segments, b, nk, keys)[None, :], s, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(s, 1) * LOG2E)
        p = tl.exp2(s * LOG2E - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(p, 1)
        if dropout is not None:
            columns = dropout_of_keys(memory_dropout, b, nk, keys)
            p = tl.where(kept_of(low[:, None], high[:, None], columns[None, :], LOWEST), p, 0.0)
        v = _load(v_rows, b, h, first_k, BK, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        highest = new_highest
    if segments is not None:
        highest = tl.where(total > 0, highest, float("inf"))  # what sees nothing has the probability 0 of anything
        total = tl.where(total > 0, total, 1.0)
    _store(out_rows, acc * (SCALE / total)[:, None], b, h, first_q, BQ, D)
    tl.store(lse_base + pair * padded + queries, highest + tl.log2(total))


@triton.jit
def queries_backward(
    q_rows, k_rows, v_rows, out_base, dout_rows, dq_rows, table, segments, memory_segments, seen, dropout,
    memory_dropout, lse_base, delta_base, far_base, heads, nq, nk, padded,
    FAR: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, LOWEST: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write delta, dq and the sums beyond the farthest distance of a block of queries."""
    pair, b, h, block = _place(tl.cdiv(nq, BQ), heads)
    if table is not None:
        table = _of_head(table, h, FAR)
    first_q = block * BQ
    queries = first_q + tl.arange(0, BQ)
    # Not by the copy engine: its copies would be waited for one after another.
    rows = out_base + ((b.to(tl.int64) * nq + queries) * heads + h)[:, None] * D + tl.arange(0, D)[None, :]
    out = tl.load(rows, mask=queries[:, None] < nq, other=0.0)
    lse = tl.load(lse_base + pair * padded + queries)
    q = _load(q_rows, b, h, first_q, BQ, D)
    dout = _load(dout_rows, b, h, first_q, BQ, D)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_base + pair * padded + queries, delta)
    dq = tl.zeros([BQ, D], tl.float32)
    before = tl.zeros([BQ], tl.float32)  # sums of the tiles far before and far after the query
    after = tl.zeros([BQ], tl.float32)
    begin, end = visited(seen, b, block, tl.cdiv(nq, BQ), nk)
    if CAUSAL:
        end = tl.minimum(end, first_q + BQ)
    if segments is not None:
        mine = segments_of_queries(segments, b, nq, queries)
    if dropout is not None:
        low, high = dropout_of_queries(dropout, b, nq, queries, h)
    for first_k in tl.range(begin, end, BK, num_stages=STAGES):
        k = _load(k_rows, b, h, first_k, BK, D)
        v = _load(v_rows, b, h, first_k, BK, D)
        s = tl.dot(q, tl.trans(k))
        shift = first_k - first_q
        if table is not None:
            s += _bias(table, shift, FAR, BQ, BK)
        p = tl.exp2(s * LOG2E - lse[:, None])
        keys = first_k + tl.arange(0, BK)
        if CAUSAL:
            p = tl.where(keys[None, :] <= queries[:, None], p, 0.0)
        if not EVEN:
            p = tl.where(keys[None, :] < nk, p, 0.0)
        if segments is not None:
            p = tl.where(mine[:, None] == of_tokens(memory_segments, b, nk, keys)[None, :], p, 0.0)
        dp = tl.dot(dout, tl.trans(v))
        if dropout is not None:
            columns = dropout_of_keys(memory_dropout, b, nk, keys)
            dp = tl.where(kept_of(low[:, None], high[:, None], columns[None, :], LOWEST), dp * SCALE, 0.0)
        ds = p * (dp - delta[:, None])
        if table is not None:
            of_tile = first_k // BQ * BQ - first_q  # bias_tiles has the tiles of BQ keys that are not wholly beyond
            if of_tile + (BQ - 1) <= -FAR:
                before += tl.sum(ds, 1)
            # Two conditions: Triton decides the outer one when it compiles, so a causal kernel lacks the inner one.
            if not CAUSAL:  # noqa: SIM102 - see above
                if of_tile - (BQ - 1) >= FAR:
                    after += tl.sum(ds, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    _store(dq_rows, dq, b, h, first_q, BQ, D)
    if table is not None:
        tl.store(far_base + 2 * tl.program_id(0), tl.sum(before, 0))
        tl.store(far_base + 2 * tl.program_id(0) + 1, tl.sum(after, 0))


@triton.jit
def keys_backward(
    q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, lse_rows, delta_rows, table, segments, memory_segments, seen,
    dropout, memory_dropout, heads, nq, nk,
    FAR: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, LOWEST: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a block of keys.

    Tiles are [keys, queries] here: p and ds are left operands of the products and so need not leave the registers.
    """
    pair, b, h, block = _place(tl.cdiv(nk, BK), heads)
    if table is not None:
        table = _of_head(table, h, FAR)
    first_k = block * BK
    keys = first_k + tl.arange(0, BK)
    k = _load(k_rows, b, h, first_k, BK, D)
    v = _load(v_rows, b, h, first_k, BK, D)
    dk = tl.zeros([BK, D], tl.float32)
    dv = tl.zeros([BK, D], tl.float32)
    begin, end = visited(seen, b, block, tl.cdiv(nk, BK), nq)
    if CAUSAL:
        begin = (first_k // BQ) * BQ if seen is None else tl.maximum(begin, (first_k // BQ) * BQ)
    if segments is not None:
        mine = of_tokens(memory_segments, b, nk, keys)
    if dropout is not None:
        columns = dropout_of_keys(memory_dropout, b, nk, keys)
    for first_q in tl.range(begin, end, BQ, num_stages=STAGES):
        q = _load(q_rows, b, h, first_q, BQ, D)
        dout = _load(dout_rows, b, h, first_q, BQ, D)
        queries = first_q + tl.arange(0, BQ)
        lse, delta = lse_rows.load([pair, first_q]).reshape(BQ), delta_rows.load([pair, first_q]).reshape(BQ)
        s = tl.dot(k, tl.trans(q))
        if table is not None:
            s += _bias(table, first_q - first_k, FAR, BK, BQ, MIRRORED=True)
        p = tl.exp2(s * LOG2E - lse[None, :])
        if CAUSAL:
            p = tl.where(keys[:, None] <= queries[None, :], p, 0.0)
        if not EVEN:
            p = tl.where(keys[:, None] < nk, p, 0.0)
        if segments is not None:
            p = tl.where(mine[:, None] == segments_of_queries(segments, b, nq, queries)[None, :], p, 0.0)
        kept_p = p
        if dropout is not None:
            low, high = dropout_of_queries(dropout, b, nq, queries, h)
            kept = kept_of(low[None, :], high[None, :], columns[:, None], LOWEST)
            kept_p = tl.where(kept, p, 0.0)
        dv = tl.dot(kept_p.to(q.dtype), dout, dv)
        dp = tl.dot(v, tl.trans(dout))
        if dropout is not None:
            dp = tl.where(kept, dp * SCALE, 0.0)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    _store(dk_rows, dk, b, h, first_k, BK, D)
    _store(dv_rows, dv * SCALE if dropout is not None else dv, b, h, first_k, BK, D)


@triton.jit
def bias_tiles(
    q_rows, k_rows, v_rows, dout_rows, table, segments, memory_segments, near, dropout, memory_dropout, num_near,
    lse_base, delta_base, tiles_base, batch, heads, nq, nk, padded, first_offset, part,
    FAR: tl.constexpr, D: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    LOWEST: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds up, over a part of the batch, one head's tiles whose key block lies ``offset`` after the query block.

    In rows of pairs, the part is one of the tiles that share a segment.
    """
    index, offsets, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    offset = first_offset + index
    low = tl.maximum(-offset, 0)  # the first query block that has such a tile
    count = tl.minimum(tl.cdiv(nq, B), tl.cdiv(nk, B) - offset) - low
    first_b = tl.program_id(2) * part
    bias = _near_bias(_of_head(table, h, FAR), offset * B, B, B, False)
    total = tl.zeros([B, B], tl.float32)
    if near is None:
        begin, end = 0, (tl.minimum(first_b + part, batch) - first_b) * count
    else:
        num, parts = tl.load(num_near + index), tl.num_programs(2)
        begin, end = num * tl.program_id(2) // parts, num * (tl.program_id(2) + 1) // parts
    for step in tl.range(begin, end, num_stages=STAGES):
        if near is None:
            b = first_b + step // count
            first_q = (low + step % count) * B
        else:
            tile = tl.load(near + index * batch * tl.cdiv(nq, B) + step)
            b, first_q = tile // tl.cdiv(nq, B), tile % tl.cdiv(nq, B) * B
        first_k = first_q + offset * B
        q = _load(q_rows, b, h, first_q, B, D)
        k = _load(k_rows, b, h, first_k, B, D)
        v = _load(v_rows, b, h, first_k, B, D)
        dout = _load(dout_rows, b, h, first_q, B, D)
        queries, keys = first_q + tl.arange(0, B), first_k + tl.arange(0, B)
        at = (b * heads + h) * padded + queries
        p = tl.exp2((tl.dot(q, tl.trans(k)) + bias) * LOG2E - tl.load(lse_base + at)[:, None])
        if CAUSAL:
            p = tl.where(keys[None, :] <= queries[:, None], p, 0.0)
        if not EVEN:
            p = tl.where(keys[None, :] < nk, p, 0.0)
        if segments is not None:
            mine = segments_of_queries(segments, b, nq, queries)
            p = tl.where(mine[:, None] == of_tokens(memory_segments, b, nk, keys)[None, :], p, 0.0)
        dp = tl.dot(dout, tl.trans(v))
        if dropout is not None:
            low_half, high_half = dropout_of_queries(dropout, b, nq, queries, h)
            columns = dropout_of_keys(memory_dropout, b, nk, keys)
            dp = tl.where(kept_of(low_half[:, None], high_half[:, None], columns[None, :], LOWEST), dp * SCALE, 0.0)
        total += p * (dp - tl.load(delta_base + at)[:, None])
    at = ((tl.program_id(2) * heads + h) * offsets + index).to(tl.int64) * B * B
    tl.store(tiles_base + at + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], total)


@triton.jit
def bias_diagonals(
    tiles_base, far_base, dtable_base, batch, heads, blocks, first_offset, offsets,
    FAR: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of one head's bias for one distance; the two farthest also get all that lies beyond them."""
    h, distance = tl.program_id(0), tl.program_id(1) - FAR
    farthest = (distance == FAR) | (distance == -FAR)
    total = tl.zeros([WIDTH], tl.float32)
    for index in range(offsets):
        tile = tiles_base + (h * offsets + index) * B * B
        shift = (first_offset + index) * B
        if farthest:
            for start in range(0, B * B, WIDTH):
                at = start + tl.arange(0, WIDTH)
                here = shift + at % B - at // B
                wanted = (here >= FAR) if distance > 0 else (here <= -FAR)
                total += tl.load(tile + at, mask=wanted, other=0.0)
        else:
            query = tl.arange(0, WIDTH)
            key = query + distance - shift
            total += tl.load(tile + query * B + key, mask=(query < B) & (key >= 0) & (key < B), other=0.0)
    if farthest:
        side = (distance > 0).to(tl.int32)
        for start in range(0, batch * blocks, WIDTH):
            at = start + tl.arange(0, WIDTH)
            program = (at // blocks * heads + h) * blocks + at % blocks
            total += tl.load(far_base + 2 * program + side, mask=at < batch * blocks, other=0.0)
    tl.store(_of_head(dtable_base, h, FAR) + 2 * distance, tl.sum(total, 0))

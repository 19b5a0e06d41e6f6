"""Triton kernels: attention over lists of runs, the merge of its parts, and writes of K and V.

Cells are read where they lie, by the runs of a device plan (see
:mod:`kvcellar.backends.torch.gpu.attend.plans`), whose integers are all that changes from one
decode step to the next. The algorithms are known ones:

- many queries: a tile of queries walks the cells with an online softmax (FlashAttention-2, Dao
  2023);
- few queries: the cells of a list are split between programs, and the parts are merged by their
  log-sum-exp (Flash-Decoding, Dao et al. 2023);
- cells that several sequences see whole are one list with the queries of all of them, so they are
  read once (Hydragen, Juravsky et al. 2024; cascade attention of FlashInfer, Ye et al. 2025).

A GPU's compiler takes this file as a restricted language: no Python at run time, sizes of tiles in
capitals are fixed when a kernel is compiled, and every load and store has its mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcellar.backends.torch.gpu.attend import lists, plans

LIST = tl.constexpr(plans.LIST_INTS)
RUN = tl.constexpr(plans.RUN_INTS)
CAUSAL = tl.constexpr(lists.CAUSAL)
BAND = tl.constexpr(lists.BAND)
MASK = tl.constexpr(lists.MASK)
BESIDE = tl.constexpr(plans.BESIDE)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def places(cells, head, s_head, s_cell, s_block, BLOCK: tl.constexpr):
    """Return where rows of some cells begin, in pools of one piece (BLOCK 0) or of blocks."""
    if BLOCK:
        at = head * s_head + (cells // BLOCK) * s_block + (cells % BLOCK) * s_cell
    else:
        at = head * s_head + cells * s_cell
    return at


@triton.jit
def _from_byte_floats(stored, IS_BYTES: tl.constexpr, FRACTION: tl.constexpr):
    """Return the numbers of floats of 8 bits, which the device knows, or float32 of their bytes.

    These are those of a float16 with a byte's exponent and fraction in its middle, but for the
    biases of the exponents.
    """
    if IS_BYTES:
        MORE: tl.constexpr = 2 ** (16 - 2 ** (6 - FRACTION))
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << (10 - FRACTION))
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * MORE
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers)
    else:
        numbers = stored.to(tl.float16)
    return numbers


@triton.jit
def _read_rows(
    data, affine, cells, ok, head, s_head, s_cell, s_block, a_head, a_cell, a_block,
    DIM: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, COMPUTE: tl.constexpr, AS_CODES: tl.constexpr,
):  # fmt: skip
    """Return the rows of N cells of one head, ``[N, PAD]``; zeros where not ok and behind DIM.

    As codes they are rows of one group each, not yet scaled; behind them come ``[N]`` scales and
    biases, which are zeros otherwise.
    """
    row_scale = tl.zeros((N,), tl.float32)
    row_bias = tl.zeros((N,), tl.float32)
    at = places(cells, head, s_head, s_cell, s_block, BLOCK)[:, None]
    d = tl.arange(0, PAD)[None, :]
    if SIZE <= 0:
        values = tl.load(data + at + d, mask=ok[:, None] & (d < DIM), other=0.0)
        if SIZE < 0:
            values = _from_byte_floats(values, data.dtype.element_ty == tl.uint8, -SIZE)
    else:
        if BITS == 8:
            numbers = tl.load(data + at + d, mask=ok[:, None] & (d < DIM), other=0)
        else:
            b = tl.arange(0, PAD // 2)[None, :]
            pairs = tl.load(data + at + b, mask=ok[:, None] & (b < (DIM + 1) // 2), other=0)
            numbers = tl.reshape(tl.join(pairs & 15, pairs >> 4), (N, PAD))
        first = affine + places(cells, head, a_head, a_cell, a_block, BLOCK)
        if AS_CODES:
            both = tl.load(first.to(tl.pointer_type(tl.uint32)), mask=ok, other=0)
            row_scale = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            row_bias = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            values = numbers
        else:
            SPREAD: tl.constexpr = PAD if SIZE == DIM else SIZE
            N_GROUPS: tl.constexpr = PAD // SPREAD
            group = tl.arange(0, N_GROUPS)[None, :]
            scales = first[:, None] + 2 * group
            there = ok[:, None] & (group < DIM // SIZE)
            scale = tl.load(scales, mask=there, other=0.0).to(tl.float32)
            bias = tl.load(scales + 1, mask=there, other=0.0).to(tl.float32)
            grouped = tl.reshape(numbers.to(tl.float32), (N, N_GROUPS, SPREAD))
            grouped = grouped * scale[:, :, None] + bias[:, :, None]
            values = tl.reshape(grouped, (N, PAD))
    return values.to(COMPUTE), row_scale, row_bias


@triton.jit
def _count_before(runs, first, n, limit, OF: tl.constexpr):
    """Count the runs of a list whose end (OF 2) or begin (OF 1) is at most ``limit``."""
    found = 0
    for base in range(0, n, 64):
        run = base + tl.arange(0, 64)
        bounds = tl.load(runs + (first + run) * RUN + OF, mask=run < n, other=2147483647)
        found += tl.sum((bounds <= limit).to(tl.int32), 0)
    return found


@triton.jit
def _finish(
    out, part_out, part_lse, sinks, most, total, acc, q_heads, token, slot, split, row_ok,
    out_head, out_token,
    N_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a tile: the result where it is whole, else a part and its log-sum-exp."""
    some = tl.where(total == 0.0, 1.0, total)
    acc = acc / some[:, None]
    lse = most + tl.log2(some)
    whole = acc
    if HAS_SINKS:
        sink = tl.load(sinks + q_heads, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        whole = acc / (1.0 + tl.exp2(sink - lse))[:, None]
    dv = tl.arange(0, DV_PAD)
    is_whole = row_ok & (slot < 0)
    to = out + q_heads * out_head + token * out_token
    inside = (dv < DV)[None, :]
    tl.store(to[:, None] + dv[None, :], whole, mask=is_whole[:, None] & inside)
    is_part = row_ok & (slot >= 0)
    part = (slot + split) * N_HEADS + q_heads
    tl.store(part_lse + part, lse, mask=is_part)
    tl.store(part_out + part[:, None] * DV + dv[None, :], acc, mask=is_part[:, None] & inside)


@triton.jit
def _weigh(logits, see, most, total, acc):
    """Return the weights of a tile's cells, and the sums before it brought to their scale."""
    logits = tl.where(see, logits * LOG2_E, float("-inf"))
    now = tl.maximum(most, tl.max(logits, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(most - base)
    return weights, now, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def _tile(
    queries, lat, of_queries, of_lat, k, k_affine, v, v_affine, cells, ok, i, t, row_ok, head,
    see_from, see_to, n_free, kind, masks, mask_at, aux, scale, softcap, most, total, acc,
    k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
    v_head, v_cell, v_block, va_head, va_cell, va_block,
    LATENT: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, K_SIZE: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, V_BITS: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_MASKS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries over N cells of a pool; return what is known of them so far."""
    # Scales of whole rows are those of their products, which are fewer for few queries; float16 has
    # no weights as small as those that are scaled.
    K_CODES: tl.constexpr = K_SIZE == D and queries.shape[0] < D
    V_CODES: tl.constexpr = V_SIZE == DV and queries.shape[0] < DV and tl.float16 != COMPUTE
    keys, k_scale, k_bias = _read_rows(
        k, k_affine, cells, ok, head, k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
        D, D_PAD, K_BITS, K_SIZE, BLOCK, N, COMPUTE, K_CODES,
    )  # fmt: skip
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if K_CODES:
        logits = logits * k_scale[None, :] + of_queries[:, None] * k_bias[None, :]
    values, v_scale, v_bias = _read_rows(
        v, v_affine, cells, ok, head, v_head, v_cell, v_block, va_head, va_cell, va_block,
        DV, DV_PAD, V_BITS, V_SIZE, BLOCK, N, COMPUTE, V_CODES,
    )  # fmt: skip
    if LATENT:
        of_values = tl.dot(lat, tl.trans(values), input_precision="ieee")
        if V_CODES:
            of_values = of_values * v_scale[None, :] + of_lat[:, None] * v_bias[None, :]
        logits += of_values
    logits *= scale
    if HAS_SOFTCAP:  # the hyperbolic tangent, of a function that is everywhere
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    see = ok[None, :] & (i[None, :] > see_from[:, None]) & (i[None, :] <= see_to[:, None])
    if HAS_MASKS:
        column = i - n_free
        there = row_ok[:, None] & (ok & (column >= 0) & (kind == MASK))[None, :]
        mask = masks + mask_at + t[:, None] * aux + column[None, :]
        see &= tl.load(mask, mask=there, other=1) != 0
    weights, most, total, acc = _weigh(logits, see, most, total, acc)
    if V_CODES:
        acc += tl.sum(weights * v_bias[None, :], 1)[:, None]
        weights *= v_scale[None, :]
    acc = tl.dot(weights.to(COMPUTE), values, acc, input_precision="ieee")
    return most, total, acc


@triton.jit
def attend_lists(
    q, out, part_out, part_lse, sinks,
    k, k_affine, v, v_affine, bk, bk_affine, bv, bv_affine,
    tiles, lists, runs, tokens, index, masks,
    scale, softcap,
    q_head, q_token, out_head, out_token,
    k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
    v_head, v_cell, v_block, va_head, va_cell, va_block,
    bk_head, bk_cell, bk_block, bka_head, bka_cell, bka_block,
    bv_head, bv_cell, bv_block, bva_head, bva_cell, bva_block,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, K_SIZE: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, V_BITS: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BK_BITS: tl.constexpr, BK_SIZE: tl.constexpr, BV_BITS: tl.constexpr, BV_SIZE: tl.constexpr,
    HAS_BESIDE: tl.constexpr, COMPUTE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_MASKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend one tile of the queries of a list over one split of its cells, for one KV head.

    The grid is (tiles, KV heads). A row of a tile is a query head of a token: all query heads of a
    KV head are side by side. Rows with a slot leave their part there; the others, whose part is the
    only one, are the result. Cells from BESIDE on are another pool's, of one piece.
    """
    tile = tiles + 3 * tl.program_id(0)
    of_list = tl.load(tile)
    if of_list < 0:
        return
    first_row, split = tl.load(tile + 1), tl.load(tile + 2)
    head = tl.program_id(1).to(tl.int64)
    facts = lists + of_list * LIST
    n_splits = tl.load(facts + 9)
    n_tokens = tl.load(facts + 1)
    n_free, kind = tl.load(facts + 5), tl.load(facts + 6)
    mask_at, aux = tl.load(facts + 7), tl.load(facts + 8)

    rows = first_row + tl.arange(0, M)
    t = rows // GROUP
    row_ok = t < n_tokens
    of_row = tokens + 2 * (tl.load(facts) + t)
    token = tl.load(of_row, mask=row_ok, other=0).to(tl.int64)
    slot = tl.load(of_row + 1, mask=row_ok, other=-1).to(tl.int64)
    q_heads = head * GROUP + rows % GROUP
    q_rows = q + q_heads * q_head + token * q_token
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    if LATENT:
        lat_mask = row_ok[:, None] & (dv < DV)[None, :]
        lat = tl.load(q_rows[:, None] + dv[None, :], mask=lat_mask, other=0.0).to(COMPUTE)
        q_rows += DV
    q_mask = row_ok[:, None] & (d < D)[None, :]
    queries = tl.load(q_rows[:, None] + d[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    if not LATENT:
        lat = queries
    of_queries, of_lat = tl.sum(queries.to(tl.float32), 1), tl.sum(lat.to(tl.float32), 1)

    # What the tile's queries see of the list, and of that what this split has.
    low, high = 0, tl.load(facts + 4)
    see_from = tl.full((M,), -1, tl.int32)
    see_to = tl.full((M,), 2147483647, tl.int32)
    if (kind == CAUSAL) | (kind == BAND):
        see_to = n_free + t
        high = tl.minimum(high, n_free + (first_row + M - 1) // GROUP + 1)
    if kind == BAND:
        see_from = n_free + t - aux
        low = tl.maximum(low, n_free + first_row // GROUP - aux + 1)
    share = tl.cdiv(tl.cdiv(high - low, n_splits), N) * N
    low += split * share
    high = tl.minimum(high, low + share)

    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DV_PAD), tl.float32)
    first_run, n_runs = tl.load(facts + 2), tl.load(facts + 3)
    run_from = _count_before(runs, first_run, n_runs, low, 2)
    run_stop = _count_before(runs, first_run, n_runs, high - 1, 1)
    for run in range(first_run + run_from, first_run + run_stop):
        start = tl.load(runs + run * RUN)
        begin = tl.load(runs + run * RUN + 1)
        stop = tl.minimum(tl.load(runs + run * RUN + 2), high)
        stop_here, stop_beside = stop, begin
        if HAS_BESIDE:  # a run is of one pool alone: one of the two loops has nothing to do
            first = tl.load(index - 1 - start, mask=start < 0, other=0)
            is_beside = tl.maximum(start, first) >= BESIDE
            stop_here = tl.where(is_beside, begin, stop)
            stop_beside = tl.where(is_beside, stop, begin)
        for at in range(tl.maximum(begin, low), stop_here, N):
            i = at + tl.arange(0, N)
            ok = i < stop
            listed = tl.load(index - 1 - start + i - begin, mask=ok & (start < 0), other=0)
            cells = tl.where(start < 0, listed, start + i - begin).to(tl.int64)
            most, total, acc = _tile(
                queries, lat, of_queries, of_lat, k, k_affine, v, v_affine,
                cells, ok, i, t, row_ok, head,
                see_from, see_to, n_free, kind, masks, mask_at, aux, scale, softcap,
                most, total, acc,
                k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
                v_head, v_cell, v_block, va_head, va_cell, va_block,
                LATENT, D, D_PAD, K_BITS, K_SIZE, DV, DV_PAD, V_BITS, V_SIZE,
                BLOCK, COMPUTE, HAS_SOFTCAP, HAS_MASKS, N,
            )  # fmt: skip
        if HAS_BESIDE:
            for at in range(tl.maximum(begin, low), stop_beside, N):
                i = at + tl.arange(0, N)
                ok = i < stop
                listed = tl.load(index - 1 - start + i - begin, mask=ok & (start < 0), other=0)
                cells = tl.where(start < 0, listed, start + i - begin).to(tl.int64) - BESIDE
                most, total, acc = _tile(
                    queries, lat, of_queries, of_lat, bk, bk_affine, bv, bv_affine,
                    cells, ok, i, t, row_ok, head,
                    see_from, see_to, n_free, kind, masks, mask_at, aux, scale, softcap,
                    most, total, acc,
                    bk_head, bk_cell, bk_block, bka_head, bka_cell, bka_block,
                    bv_head, bv_cell, bv_block, bva_head, bva_cell, bva_block,
                    LATENT, D, D_PAD, BK_BITS, BK_SIZE, DV, DV_PAD, BV_BITS, BV_SIZE,
                    0, COMPUTE, HAS_SOFTCAP, HAS_MASKS, N,
                )  # fmt: skip

    _finish(
        out, part_out, part_lse, sinks, most, total, acc, q_heads, token, slot, split, row_ok,
        out_head, out_token, N_HEADS, DV, DV_PAD, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def merge_parts(
    out, part_out, part_lse, sinks, merged, out_head, out_token,
    N_HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one token and query head; the grid is (tokens with parts, heads)."""
    token = tl.load(merged + 3 * tl.program_id(0)).to(tl.int64)
    if token < 0:
        return
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(merged + 3 * tl.program_id(0) + 1)
    stop = tl.load(merged + 3 * tl.program_id(0) + 2)
    dv = tl.arange(0, DV_PAD)
    most = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((DV_PAD,), tl.float32)
    for at in range(first, stop, S):
        slot = at + tl.arange(0, S)
        part = slot.to(tl.int64) * N_HEADS + head
        lse = tl.load(part_lse + part, mask=slot < stop, other=float("-inf"))
        there = (slot < stop) & (lse != float("-inf"))
        mask = there[:, None] & (dv < DV)[None, :]
        rows = tl.load(part_out + part[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        now = tl.maximum(most, tl.max(lse, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * rows, 0)
        most = now
    if HAS_SINKS:
        base = tl.where(most == float("-inf"), 0.0, most)
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - base)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * out_head + token * out_token + dv, acc, mask=dv < DV)

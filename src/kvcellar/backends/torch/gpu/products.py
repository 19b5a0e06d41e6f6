"""Triton kernels of linear layers whose weights stay in few bits: products, and rows read back.

Weights are read as :mod:`kvcellar.backends.torch.gpu.matrices` puts them, and are numbers in
registers alone. For a few rows of inputs a product is bound by the weights' bytes: each program
multiplies some outputs with all inputs in float32. For more, weights become the inputs' type on
their way to the tensor cores. Experts are matrices behind one another: either each row has its own,
or rows are sorted by expert and cut into tiles, of which each has one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcellar.backends.torch.gpu import matrices

IQ4 = tl.constexpr(matrices.IQ4)
E2M1 = tl.constexpr(matrices.E2M1)
E2M1_UNIT = tl.constexpr(16384.0)
"""Number by which a code of MXFP4 is larger than the float16 with its bits."""


@triton.jit
def _numbers(
    numbers, table, outputs, ok, k0, n_in, row,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the numbers of N outputs from input k0 on, float32 ``[N, K]``; not yet scaled."""
    if BITS == 4:
        at = k0 // 2 + tl.arange(0, K // 2)
        there = ok[:, None] & (at < row)[None, :]
        pairs = tl.load(numbers + outputs[:, None] * row + at[None, :], mask=there, other=0)
        held = tl.reshape(tl.join(pairs & 15, pairs >> 4), (N, K))
    else:
        at = k0 + tl.arange(0, K)
        there = ok[:, None] & (at < n_in)[None, :]
        held = tl.load(numbers + outputs[:, None] * row + at[None, :], mask=there, other=0)
    if CODES == IQ4:
        values = tl.load(table + held.to(tl.int32))
    elif CODES == E2M1:
        code = held.to(tl.int16)
        small = ((code & 8) << 12) | ((code & 7) << 9)
        values = small.to(tl.float16, bitcast=True).to(tl.float32) * E2M1_UNIT
    elif ZERO != 0:
        values = held.to(tl.float32) - ZERO
    else:
        values = held.to(tl.float32)
    return values


@triton.jit
def _steps(
    steps, tops, outputs, ok, group, n_groups, WHICH: tl.constexpr,
    TOP: tl.constexpr, PAIR: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Return steps (WHICH 0) or minima (1) of groups of N outputs, float32 ``[N, groups]``."""
    there = ok[:, None] & (group < n_groups)[None, :]
    at = (outputs[:, None] * n_groups + group[None, :]) * PAIR + WHICH
    if EXPONENTS:
        exponents = tl.load(steps + at, mask=there, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 0x00400000, exponents << 23)
        found = bits.to(tl.float32, bitcast=True)
    else:
        found = tl.load(steps + at, mask=there, other=0).to(tl.float32)
    if TOP:
        above = (outputs[:, None] * (n_groups // TOP) + (group // TOP)[None, :]) * PAIR + WHICH
        found *= tl.load(tops + above, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _weights(
    numbers, steps, tops, table, outputs, ok, k0, n_in, row,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr, SPREAD: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the weights of N outputs for K inputs from k0 on, float32 ``[N, K]``."""
    values = _numbers(numbers, table, outputs, ok, k0, n_in, row, BITS, ZERO, CODES, N, K)
    if BITS != 16:
        PARTS: tl.constexpr = K // SPREAD
        PAIR: tl.constexpr = 2 if MINIMA else 1
        group = (k0 + tl.arange(0, PARTS) * SPREAD) // GROUP
        n_groups = (n_in + GROUP - 1) // GROUP
        found = _steps(steps, tops, outputs, ok, group, n_groups, 0, TOP, PAIR, EXPONENTS)
        values = tl.reshape(values, (N, PARTS, SPREAD)) * found[:, :, None]
        if MINIMA:
            least = _steps(steps, tops, outputs, ok, group, n_groups, 1, TOP, PAIR, EXPONENTS)
            values += least[:, :, None]
        values = tl.reshape(values, (N, K))
    return values


@triton.jit
def multiply_few(
    x, out, bias, add, norm, numbers, steps, tops, table, chosen,
    n_rows, n_experts, n_out, n_in, row, x_row, out_row, add_row, per, eps,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr, SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_EXPERTS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows by N outputs; the grid is (outputs / N, rows / ROWS).

    Row i is of input row ``i // per``. With experts it has one row and the expert that it chose; of
    one that is not there the result is zeros. Gated, an output is the silu of the matrix's own,
    times the one that is as far behind it as the result has outputs. With a norm inputs are
    divided by the root of their mean square and multiplied by its weights before: every program
    reads all of them anyway.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    ok = n < n_out
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    first = tl.zeros((), tl.int64)
    if HAS_EXPERTS:
        expert = tl.load(chosen + tl.program_id(1))
        is_there = (expert >= 0) & (expert < n_experts)
        first = tl.where(is_there, expert, 0) * (2 * n_out if IS_GATED else n_out)
        ok = ok & is_there
    outputs = first + n.to(tl.int64)
    squares = tl.zeros((ROWS,), tl.float32)
    if HAS_NORM:
        for k0 in range(0, n_in, K):
            k = k0 + tl.arange(0, K)
            for r in tl.static_range(ROWS):
                i = tl.program_id(1) * ROWS + r
                inputs = x + (i // per).to(tl.int64) * x_row
                there = (i < n_rows) & (k < n_in)
                some = tl.load(inputs + k, mask=there, other=0.0).to(tl.float32)
                squares += tl.where(tl.arange(0, ROWS) == r, tl.sum(some * some, 0), 0.0)
    scales = tl.rsqrt(squares / n_in + eps)
    acc = tl.zeros((ROWS, N), tl.float32)
    ups = tl.zeros((ROWS, N), tl.float32)
    for k0 in range(0, n_in, K):
        k = k0 + tl.arange(0, K)
        w = _weights(
            numbers, steps, tops, table, outputs, ok, k0, n_in, row,
            BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, SPREAD, N, K,
        )  # fmt: skip
        if IS_GATED:
            up = _weights(
                numbers, steps, tops, table, outputs + n_out, ok, k0, n_in, row,
                BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, SPREAD, N, K,
            )  # fmt: skip
        for r in tl.static_range(ROWS):  # one at a time, so that weights stay in their registers
            i = tl.program_id(1) * ROWS + r
            inputs = x + (i // per).to(tl.int64) * x_row
            some = tl.load(inputs + k, mask=(i < n_rows) & (k < n_in), other=0.0).to(tl.float32)
            if HAS_NORM:
                scale = tl.sum(tl.where(tl.arange(0, ROWS) == r, scales, 0.0), 0)
                some *= scale * tl.load(norm + k, mask=k < n_in, other=0.0).to(tl.float32)
                some = some.to(x.dtype.element_ty).to(tl.float32)
            is_row = tl.arange(0, ROWS)[:, None] == r
            acc += tl.where(is_row, tl.sum(w * some[None, :], 1)[None, :], 0.0)
            if IS_GATED:
                ups += tl.where(is_row, tl.sum(up * some[None, :], 1)[None, :], 0.0)
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=ok, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            ups += tl.load(bias + outputs + n_out, mask=ok, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        acc = acc * tl.sigmoid(acc) * ups
    there = row_ok[:, None] & (n < n_out)[None, :]
    places = rows.to(tl.int64)[:, None]
    if HAS_ADD:
        acc += tl.load(add + places * add_row + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out + places * out_row + n[None, :], acc, mask=there)


@triton.jit
def multiply_tiles(
    x, out, bias, add, numbers, steps, tops, table, order, tiles,
    n_rows, n_out, n_in, row, x_row, out_row, add_row, per,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr, SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_EXPERTS: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by N outputs; the grid is (outputs / N, tiles).

    With experts a tile is three integers: an expert, or -1 for no tile, and from where to where its
    rows are in ``order``. Row i is of input row ``i // per``.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    ok = n < n_out
    outputs = n.to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if HAS_EXPERTS:
        expert = tl.load(tiles + 3 * tl.program_id(1))
        if expert < 0:
            return
        i = tl.load(tiles + 3 * tl.program_id(1) + 1) + tl.arange(0, ROWS)
        row_ok = i < tl.load(tiles + 3 * tl.program_id(1) + 2)
        rows = tl.load(order + i, mask=row_ok, other=0)
        outputs += expert * n_out
    else:
        rows = i.to(tl.int64)
        row_ok = i < n_rows
    inputs = x + (rows // per) * x_row
    acc = tl.zeros((N, ROWS), tl.float32)
    for k0 in range(0, n_in, K):
        k = k0 + tl.arange(0, K)
        inside = row_ok[:, None] & (k < n_in)[None, :]
        some = tl.load(inputs[:, None] + k[None, :], mask=inside, other=0.0).to(COMPUTE)
        w = _weights(
            numbers, steps, tops, table, outputs, ok, k0, n_in, row,
            BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, SPREAD, N, K,
        )  # fmt: skip
        acc = tl.dot(w.to(COMPUTE), tl.trans(some), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=ok, other=0.0).to(tl.float32)[:, None]
    there = ok[:, None] & row_ok[None, :]
    if HAS_ADD:
        at = rows[None, :] * add_row + n[:, None]
        acc += tl.load(add + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + rows[None, :] * out_row + n[:, None], acc, mask=there)


@triton.jit
def take_rows(
    ids, out, numbers, steps, tops, table, n_out, n_in, row,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr, SPREAD: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Store the weights of one output, of those that are there; the grid is (ids, inputs / K)."""
    outputs = tl.load(ids + tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    ok = (outputs >= 0) & (outputs < n_out)
    k0 = tl.program_id(1) * K
    w = _weights(
        numbers, steps, tops, table, outputs, ok, k0, n_in, row,
        BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, SPREAD, 1, K,
    )  # fmt: skip
    k = k0 + tl.arange(0, K)
    to = out + tl.program_id(0).to(tl.int64) * n_in + k
    tl.store(to[None, :], w, mask=(k < n_in)[None, :])

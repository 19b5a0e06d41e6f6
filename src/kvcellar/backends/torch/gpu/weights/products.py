"""Triton kernels of linear layers whose weights stay in few bits: products, and rows read back.

Weights are read as :mod:`kvcellar.backends.torch.gpu.weights.matrices` puts them, and are numbers
in registers alone. For a few rows of inputs a product is bound by the weights' bytes, and after
that by what is computed for each of them: a program multiplies some outputs with all inputs in
float32, and in few bits each thread reads chunks of 16 bytes, turns a field into a float in two
operations, and scales the sum of a chunk's products, never the weights. For more rows weights
become the inputs' type on their way to the tensor cores, and for many they are unpacked before.
Experts are matrices behind one another: either each row has its own, or rows are sorted by expert
and cut into tiles, of which each has one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcellar.backends.torch.gpu.weights import matrices

IQ4 = tl.constexpr(matrices.IQ4)
E2M1 = tl.constexpr(matrices.E2M1)
E2M1_UNIT = tl.constexpr(16384.0)
"""Number by which a code of MXFP4 is larger than the float16 with its bits."""
WHOLE = tl.constexpr(8388608.0)
"""2 ** 23: with a whole number in its lower bits it is larger by so much.

Kernels are told its bits, so that a register holds them and both masks are one operation.
"""


@triton.jit
def _field(
    words, table, whole, J: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    CODES: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Return field J of words as float32, larger by ``2 ** AT`` where it is no code."""
    if CODES == IQ4:
        found = tl.load(table + ((words >> (BITS * J)) & 15))
    elif CODES == E2M1:
        code = (words >> (BITS * J)).to(tl.int16)
        small = ((code & 8) << 12) | ((code & 7) << 9)
        found = small.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        shifted = words >> (BITS * J - AT) if BITS * J > AT else words
        bits = (shifted & (((1 << BITS) - 1) << AT)) | whole
        found = bits.to(tl.float32, bitcast=True) - (WHOLE + ZERO * (1 << AT))
    return found


@triton.jit
def _steps(
    steps, tops, outputs, ok, group, n_groups, WHICH: tl.constexpr, CODES: tl.constexpr,
    TOP: tl.constexpr, PAIR: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """Return steps (WHICH 0) or minima (1) of outputs' groups as float32, in both their shape."""
    there = ok & (group < n_groups)
    at = (outputs * n_groups + group) * PAIR + WHICH
    if EXPONENTS:
        exponents = tl.load(steps + at, mask=there, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 0x00400000, exponents << 23)
        found = bits.to(tl.float32, bitcast=True)
    else:
        found = tl.load(steps + at, mask=there, other=0).to(tl.float32)
    if TOP:
        above = (outputs * (n_groups // TOP) + group // TOP) * PAIR + WHICH
        found *= tl.load(tops + above, mask=there, other=0.0).to(tl.float32)
    if CODES == E2M1:
        found *= E2M1_UNIT
    return found


@triton.jit
def _weights(
    numbers, steps, tops, table, whole, outputs, ok, k0, n_in,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the weights of N outputs for K inputs from k0 on, float32 ``[N, K]``."""
    if BITS == 16:
        k = k0 + tl.arange(0, K)
        there = ok[:, None] & (k < n_in)[None, :]
        found = tl.load(numbers + outputs[:, None] * n_in + k[None, :], mask=there, other=0)
        found = found.to(tl.float32)
    else:
        CHUNK: tl.constexpr = 128 // BITS
        PAIR: tl.constexpr = 2 if MINIMA else 1
        n_parts, n_groups = n_in // CHUNK, (n_in + GROUP - 1) // GROUP
        outputs, ok = outputs[:, None, None], ok[:, None, None]
        part = (k0 // CHUNK + tl.arange(0, K // CHUNK))[None, :, None]
        at = (outputs * n_parts + part) * 4 + tl.arange(0, 4)[None, None, :]
        words = tl.load(numbers + at, mask=ok & (part < n_parts), other=0)
        group = part * CHUNK // GROUP
        step = _steps(steps, tops, outputs, ok, group, n_groups, 0, CODES, TOP, PAIR, EXPONENTS)
        least = step
        if MINIMA:
            least = _steps(
                steps, tops, outputs, ok, group, n_groups, 1, CODES, TOP, PAIR, EXPONENTS
            )  # fmt: skip
        if BITS == 8:
            found = tl.join(
                _joined(words, table, whole, step, least, 0, 2, BITS, ZERO, CODES, MINIMA),
                _joined(words, table, whole, step, least, 1, 2, BITS, ZERO, CODES, MINIMA),
            )  # fmt: skip
            found = tl.permute(found, (0, 1, 3, 4, 2))
        else:
            found = tl.join(
                tl.join(
                    _joined(words, table, whole, step, least, 0, 4, BITS, ZERO, CODES, MINIMA),
                    _joined(words, table, whole, step, least, 2, 4, BITS, ZERO, CODES, MINIMA),
                ),
                tl.join(
                    _joined(words, table, whole, step, least, 1, 4, BITS, ZERO, CODES, MINIMA),
                    _joined(words, table, whole, step, least, 3, 4, BITS, ZERO, CODES, MINIMA),
                ),
            )  # fmt: skip
            found = tl.permute(found, (0, 1, 3, 4, 5, 2))
        found = tl.reshape(found, (N, K))
    return found


@triton.jit
def _joined(
    words, table, whole, step, least, J: tl.constexpr, APART: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Return the weights of fields J and ``J + APART``, ``[N, chunks, 4, 2]``."""
    one = _scaled(words, table, whole, step, least, J, BITS, ZERO, CODES, MINIMA)
    return tl.join(
        one, _scaled(words, table, whole, step, least, J + APART, BITS, ZERO, CODES, MINIMA)
    )


@triton.jit
def _scaled(
    words, table, whole, step, least, J: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Return the weights of field J, ``[N, chunks, 4]``."""
    found = _field(words, table, whole, J, BITS, ZERO, CODES, 0) * step
    return found + least if MINIMA else found


@triton.jit
def _scales_of_rows(inputs, row_ok, n_in, eps, ROWS: tl.constexpr, K: tl.constexpr):
    """Return what inputs are multiplied by before a norm's weights, float32 ``[ROWS]``."""
    squares = tl.zeros((ROWS,), tl.float32)
    for k0 in range(0, n_in, K):
        k = k0 + tl.arange(0, K)
        there = row_ok[:, None] & (k < n_in)[None, :]
        some = tl.load(inputs[:, None] + k[None, :], mask=there, other=0.0).to(tl.float32)
        squares += tl.sum(some * some, 1)
    return tl.rsqrt(squares / n_in + eps)


@triton.jit
def multiply_packed(
    x, out, bias, add, norm, numbers, steps, tops, table, whole, chosen,
    n_rows, n_experts, n_out, n_in, x_row, out_row, add_row, per, eps,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_EXPERTS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows by N outputs in few bits; see ``multiply_few``."""
    CHUNK: tl.constexpr = 128 // BITS
    PAIR: tl.constexpr = 2 if MINIMA else 1
    BOTH: tl.constexpr = 2 if IS_GATED else 1
    lane = tl.arange(0, N * BOTH)
    n = tl.program_id(0) * N + lane // BOTH
    ok = n < n_out
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    outputs = (n + lane % BOTH * n_out).to(tl.int64)
    if HAS_EXPERTS:
        expert = tl.load(chosen + tl.program_id(1))
        is_there = (expert >= 0) & (expert < n_experts)
        outputs += tl.where(is_there, expert, 0) * (BOTH * n_out)
        ok = ok & is_there
    inputs = x + (rows // per).to(tl.int64) * x_row
    if HAS_NORM:
        scales = _scales_of_rows(inputs, row_ok, n_in, eps, ROWS, K)[:, None, None, None]
    n_parts, n_groups = n_in // CHUNK, (n_in + GROUP - 1) // GROUP
    # All tiles are [rows, outputs, chunks, words], of 1 where they have no such axis: one layout.
    of_lanes, is_lane = outputs[None, :, None, None], ok[None, :, None, None]
    inputs, is_row = inputs[:, None, None, None], row_ok[:, None, None, None]
    word = tl.arange(0, 4)[None, None, None, :]
    acc = tl.zeros((ROWS, N * BOTH, K // CHUNK, 4), tl.float32)
    for k0 in range(0, n_in, K):
        part = (k0 // CHUNK + tl.arange(0, K // CHUNK))[None, None, :, None]
        is_part = part < n_parts
        at = (of_lanes * n_parts + part) * 4 + word
        words = tl.load(numbers + at, mask=is_lane & is_part, other=0)
        dots = tl.zeros((ROWS, N * BOTH, K // CHUNK, 4), tl.float32)
        sums = tl.zeros((ROWS, 1, K // CHUNK, 4), tl.float32)
        for j in tl.static_range(32 // BITS):
            k = part * CHUNK + 4 * j + word
            some = tl.load(inputs + k, mask=is_row & is_part, other=0.0).to(tl.float32)
            if HAS_NORM:
                some *= scales * tl.load(norm + k, mask=is_part, other=0.0).to(tl.float32)
                some = some.to(x.dtype.element_ty).to(tl.float32)
            if MINIMA:
                sums += some
            if CODES == 0:
                some *= 1.0 / (1 << (BITS * j % 16))  # by which the field is larger
            dots += _field(words, table, whole, j, BITS, ZERO, CODES, BITS * j % 16) * some
        group = part * CHUNK // GROUP
        acc += dots * _steps(
            steps, tops, of_lanes, is_lane, group, n_groups, 0, CODES, TOP, PAIR, EXPONENTS
        )  # fmt: skip
        if MINIMA:
            acc += sums * _steps(
                steps, tops, of_lanes, is_lane, group, n_groups, 1, CODES, TOP, PAIR, EXPONENTS
            )  # fmt: skip
    found = tl.sum(tl.sum(acc, 3), 2)
    if HAS_BIAS:
        found += tl.load(bias + outputs, mask=ok, other=0.0).to(tl.float32)[None, :]
    n = tl.program_id(0) * N + tl.arange(0, N)
    if IS_GATED:
        gates, ups = tl.split(tl.reshape(found, (ROWS, N, 2)))
        found = gates * tl.sigmoid(gates) * ups
    there = row_ok[:, None] & (n < n_out)[None, :]
    places = rows.to(tl.int64)[:, None]
    if HAS_ADD:
        at = places * add_row + n[None, :]
        found += tl.load(add + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + places * out_row + n[None, :], found, mask=there)


@triton.jit
def multiply_few(
    x, out, bias, add, norm, numbers, chosen, cos, sin,
    n_rows, n_experts, n_out, n_in, x_row, out_row, add_row, per, eps,
    n_turned, half, side_row,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_EXPERTS: tl.constexpr, IS_GATED: tl.constexpr, IS_TURNED: tl.constexpr,
    IS_PAIRED: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows by N outputs of 16 bits; the grid is (outputs / N, rows / ROWS).

    Row i is of input row ``i // per``. With experts it has one row and the expert that it chose; of
    one that is not there the result is zeros. Gated, an output is the silu of the matrix's own,
    times the one that is as far behind it as the result has outputs. With a norm inputs are
    divided by the root of their mean square and multiplied by its weights before: every program
    reads all of them anyway. Turned, outputs are heads of twice ``half`` numbers, of which N pairs,
    halves or neighbours (IS_PAIRED), are computed, and rotated if they are of the first
    ``n_turned``; ``n_out`` counts pairs.
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
    own, other = n, n + n_out
    if IS_TURNED:
        own = n // half * (2 * half) + n % half * (2 if IS_PAIRED else 1)
        other = own + (1 if IS_PAIRED else half)
    outputs, others = first + own.to(tl.int64), first + other.to(tl.int64)
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
        there = ok[:, None] & (k < n_in)[None, :]
        at = outputs[:, None] * n_in + k[None, :]
        w = tl.load(numbers + at, mask=there, other=0.0).to(tl.float32)
        if IS_GATED or IS_TURNED:
            at = others[:, None] * n_in + k[None, :]
            up = tl.load(numbers + at, mask=there, other=0.0).to(tl.float32)
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
            if IS_GATED or IS_TURNED:
                ups += tl.where(is_row, tl.sum(up * some[None, :], 1)[None, :], 0.0)
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=ok, other=0.0).to(tl.float32)[None, :]
        if IS_GATED or IS_TURNED:
            ups += tl.load(bias + others, mask=ok, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        acc = acc * tl.sigmoid(acc) * ups
    there = row_ok[:, None] & (n < n_out)[None, :]
    places = rows.to(tl.int64)[:, None]
    if IS_TURNED:
        a = acc.to(x.dtype.element_ty).to(tl.float32)
        b = ups.to(x.dtype.element_ty).to(tl.float32)
        sides = places * side_row + (n % half)[None, :] * SIDE
        turns = there & (n < n_turned)[None, :]
        c = tl.load(cos + sides, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + sides, mask=turns, other=0.0).to(tl.float32)
        acc = a * c - b * s
        tl.store(out + places * out_row + other[None, :], b * c + a * s, mask=there)
    if HAS_ADD:
        acc += tl.load(add + places * add_row + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out + places * out_row + own[None, :], acc, mask=there)


@triton.jit
def multiply_tiles(
    x, out, bias, add, numbers, steps, tops, table, whole, order, tiles,
    n_rows, n_out, n_in, x_row, out_row, add_row, per, split, part_size,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_EXPERTS: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by N outputs; the grid is (outputs / N, tiles, parts of the inputs).

    A part has ``split`` inputs, and results ``part_size`` numbers behind those of the one before.
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
    first = tl.program_id(2) * split
    for k0 in range(first, tl.minimum(first + split, n_in), K):
        k = k0 + tl.arange(0, K)
        inside = row_ok[:, None] & (k < n_in)[None, :]
        some = tl.load(inputs[:, None] + k[None, :], mask=inside, other=0.0).to(COMPUTE)
        w = _weights(
            numbers, steps, tops, table, whole, outputs, ok, k0, n_in,
            BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, N, K,
        )  # fmt: skip
        acc = tl.dot(w.to(COMPUTE), tl.trans(some), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=ok, other=0.0).to(tl.float32)[:, None]
    there = ok[:, None] & row_ok[None, :]
    if HAS_ADD:
        at = rows[None, :] * add_row + n[:, None]
        acc += tl.load(add + at, mask=there, other=0.0).to(tl.float32)
    out += tl.program_id(2).to(tl.int64) * part_size
    tl.store(out + rows[None, :] * out_row + n[:, None], acc, mask=there)


@triton.jit
def sum_parts(
    parts, out, bias, add, n_parts, n_rows, n_out, out_row, add_row,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add float32 parts ``[parts, rows, outputs]`` in order; the grid is (outputs / N, rows)."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    ok, row = n < n_out, tl.program_id(1).to(tl.int64)
    found = tl.zeros((N,), tl.float32)
    for part in range(n_parts):
        at = (part * n_rows + row) * n_out + n
        found += tl.load(parts + at, mask=ok, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    if HAS_ADD:
        found += tl.load(add + row * add_row + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + n, found, mask=ok)


@triton.jit
def take_rows(
    ids, first, out, numbers, steps, tops, table, whole, n, n_out, n_in,
    BITS: tl.constexpr, ZERO: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr,
    HAS_IDS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store the weights of n outputs, or zeros of one that is not there.

    The grid is (n / N, inputs / K). The outputs are those of ``ids``, or the first one on.
    """
    i = tl.program_id(0) * N + tl.arange(0, N)
    outputs = first + i.to(tl.int64)
    if HAS_IDS:
        outputs = tl.load(ids + i, mask=i < n, other=-1).to(tl.int64)
    ok = (outputs >= 0) & (outputs < n_out)
    k0 = tl.program_id(1) * K
    w = _weights(
        numbers, steps, tops, table, whole, outputs, ok, k0, n_in,
        BITS, ZERO, CODES, GROUP, TOP, MINIMA, EXPONENTS, N, K,
    )  # fmt: skip
    k = k0 + tl.arange(0, K)
    to = out + i.to(tl.int64)[:, None] * n_in + k[None, :]
    tl.store(to, w, mask=(i < n)[:, None] & (k < n_in)[None, :])

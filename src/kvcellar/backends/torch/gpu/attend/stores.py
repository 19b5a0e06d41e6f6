"""Triton kernels that write: a step's K and V into cells, and cells to other cells.

Quantised rows get the bytes of :mod:`kvcellar.kv_dtype`: the same float32 operations, in the same
order, each rounded as IEEE 754 says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcellar.backends.torch.gpu.attend.kernels import places
from kvcellar.kv_dtype import STORED_TYPES

ROUNDER = tl.constexpr(12582912.0)
"""1.5 times 2 to the 23rd: added and taken away again, it rounds to the nearest even integer."""

_FORMS = [one.byte_float for one in STORED_TYPES.values() if one.byte_float]
LARGEST = tl.constexpr(
    tuple(sum(form.most for form in _FORMS if form.n_fraction == n) for n in range(7))
)
"""Largest float of 8 bits, by the bits of its fraction."""


@triton.jit
def _quantise(grouped, ok, BITS: tl.constexpr):
    """Return the integers (as float32), scales and biases of groups ``[H, groups, size]``.

    A group with a NaN has a scale and a bias that are NaN, and integers that are zero.
    """
    MOST: tl.constexpr = 2**BITS - 1
    is_nan = tl.max((ok & (grouped != grouped)).to(tl.int32), 2) > 0
    low = tl.where(is_nan, float("nan"), tl.min(tl.where(ok, grouped, float("inf")), 2))
    high = tl.max(tl.where(ok, grouped, float("-inf")), 2)
    bias = (low - tl.abs(low) * (1 / 1024)).to(tl.float16)
    start = bias.to(tl.float32)
    scale = ((high - start) * (1025 / 1024) * (1 / MOST)).to(tl.float16)
    steps = scale.to(tl.float32)
    inverse = tl.where(steps > 0, tl.div_rn(1.0, tl.where(steps > 0, steps, 1.0)), 0.0)
    found = (grouped - start[:, :, None]) * inverse[:, :, None]
    found = tl.where(ok & (found == found), found, 0.0)
    return (tl.minimum(tl.maximum(found, 0.0), MOST) + ROUNDER) - ROUNDER, scale, bias


@triton.jit
def _to_byte_floats(numbers, FRACTION: tl.constexpr):
    """Round numbers (float32) to floats of 8 bits; see :class:`kvcellar.kv_dtype.ByteFloat`."""
    CUT: tl.constexpr = 23 - FRACTION
    BIAS: tl.constexpr = 2 ** (6 - FRACTION) - 1
    HALF: tl.constexpr = 2 ** (CUT - 1) - 1
    BASE: tl.constexpr = (127 - BIAS) * 2**FRACTION
    STEPS: tl.constexpr = 2.0 ** (BIAS - 1 + FRACTION)
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    MOST: tl.constexpr = LARGEST[FRACTION]
    size = tl.minimum(tl.abs(numbers), MOST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + HALF + ((bits >> CUT) & 1)) >> CUT) - BASE
    small = ((size * STEPS + ROUNDER) - ROUNDER).to(tl.int32)
    found = tl.where(size < LEAST, small, normal)
    found = tl.where(numbers != numbers, 0x7F, found)
    is_negative = numbers.to(tl.int32, bitcast=True) < 0
    return (found | tl.where(is_negative, 0x80, 0)).to(tl.uint8)


@triton.jit
def _store_side(
    rows, token, cell, data, affine, r_head, r_token, s_head, s_cell, s_block,
    a_head, a_cell, a_block, N_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store one token's rows of all heads in a cell."""
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    there = head < N_HEADS
    d = tl.arange(0, PAD)[None, :]
    ok = there & (d < DIM)
    row = tl.load(rows + head * r_head + token * r_token + d, mask=ok, other=0.0)
    to = data + places(cell, head, s_head, s_cell, s_block, BLOCK)
    if SIZE <= 0:
        if SIZE < 0:
            row = _to_byte_floats(row.to(tl.float32), -SIZE)
        tl.store(to + d, row, mask=ok)
    else:
        SPREAD: tl.constexpr = PAD if SIZE == DIM else SIZE
        GROUPS: tl.constexpr = PAD // SPREAD
        grouped = tl.reshape(row.to(tl.float32), (HEADS, GROUPS, SPREAD))
        numbers, scale, bias = _quantise(grouped, tl.reshape(ok, (HEADS, GROUPS, SPREAD)), BITS)
        group = tl.arange(0, GROUPS)[None, :]
        pairs = affine + places(cell, head, a_head, a_cell, a_block, BLOCK) + 2 * group
        tl.store(pairs, scale, mask=there & (group < DIM // SIZE))
        tl.store(pairs + 1, bias, mask=there & (group < DIM // SIZE))
        packed = tl.reshape(numbers.to(tl.uint8), (HEADS, PAD))
        if BITS == 8:
            tl.store(to + d, packed, mask=ok)
        else:
            first, second = tl.split(tl.reshape(packed, (HEADS, PAD // 2, 2)))
            b = tl.arange(0, PAD // 2)[None, :]
            tl.store(to + b, first | (second << 4), mask=there & (b < (DIM + 1) // 2))


@triton.jit
def write_rows(
    k_rows, v_rows, cells, k, k_affine, v, v_affine, kr_head, kr_token, vr_head, vr_token,
    k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
    v_head, v_cell, v_block, va_head, va_cell, va_block,
    N_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, K_SIZE: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, V_BITS: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write K (second axis 0) or V (1) of one token to its cell; the grid is (tokens, 2)."""
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + token).to(tl.int64)
    if cell < 0:
        return
    if tl.program_id(1) == 0:
        _store_side(
            k_rows, token, cell, k, k_affine, kr_head, kr_token, k_head, k_cell, k_block,
            ka_head, ka_cell, ka_block, N_HEADS, HEADS, D, D_PAD, K_BITS, K_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _store_side(
            v_rows, token, cell, v, v_affine, vr_head, vr_token, v_head, v_cell, v_block,
            va_head, va_cell, va_block, N_HEADS, HEADS, DV, DV_PAD, V_BITS, V_SIZE, BLOCK,
        )  # fmt: skip


@triton.jit
def _copy_side(
    cell, to_cell, data, affine, s_head, s_cell, s_block, a_head, a_cell, a_block,
    N_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of all heads of a cell to another one, as they are stored."""
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    d = tl.arange(0, PAD)[None, :]
    WIDTH: tl.constexpr = (DIM + 1) // 2 if BITS == 4 else DIM
    ok = (head < N_HEADS) & (d < WIDTH)
    source = data + places(cell, head, s_head, s_cell, s_block, BLOCK) + d
    target = data + places(to_cell, head, s_head, s_cell, s_block, BLOCK) + d
    tl.store(target, tl.load(source, mask=ok), mask=ok)
    if SIZE > 0:
        ok = (head < N_HEADS) & (d < 2 * (DIM // SIZE))
        source = affine + places(cell, head, a_head, a_cell, a_block, BLOCK) + d
        target = affine + places(to_cell, head, a_head, a_cell, a_block, BLOCK) + d
        tl.store(target, tl.load(source, mask=ok), mask=ok)


@triton.jit(do_not_specialize=["base"])
def move_rows(
    cells, base, k, k_affine, v, v_affine,
    k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
    v_head, v_cell, v_block, va_head, va_cell, va_block,
    N_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, K_BITS: tl.constexpr, K_SIZE: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, V_BITS: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy K (second axis 0) or V (1) of a cell to one from ``base`` on; no cell is in both."""
    cell = tl.load(cells + tl.program_id(0)).to(tl.int64)
    to_cell = base + tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _copy_side(
            cell, to_cell, k, k_affine, k_head, k_cell, k_block, ka_head, ka_cell, ka_block,
            N_HEADS, HEADS, D, D_PAD, K_BITS, K_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _copy_side(
            cell, to_cell, v, v_affine, v_head, v_cell, v_block, va_head, va_cell, va_block,
            N_HEADS, HEADS, DV, DV_PAD, V_BITS, V_SIZE, BLOCK,
        )  # fmt: skip


PLANE = tl.constexpr(9)
"""Numbers by which ``copy_planes`` is told a plane.

Its address, how far cells and blocks are apart, numbers of a row, numbers that lie together in the
pool and how far apart these are, numbers of each token before the plane, numbers from token to
token, and where in a token's row the plane begins.
"""


@triton.jit(do_not_specialize=["n_tokens", "first", "begin", "end", "start"])
def copy_planes(
    table, cells, staged, n_tokens, first, begin, end, start,
    NUMBER: tl.constexpr, TOKENS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
    IS_PLAIN: tl.constexpr, IS_READ: tl.constexpr,
):  # fmt: skip
    """Copy rows of some planes to or from ``staged``; the grid is (planes, tokens / TOKENS).

    Numbers are counted over all planes, each with ``n_tokens`` rows; the one at ``start`` comes
    first in ``staged``.
    """
    plane = table + (first + tl.program_id(0)).to(tl.int64) * PLANE
    token = begin + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, PAD)[None, :]
    ok = (token < end)[:, None] & (d < tl.load(plane + 3))
    cell = tl.load(cells + token, mask=token < end, other=0)
    there = places(cell, 0, 0, tl.load(plane + 1), tl.load(plane + 2), BLOCK)[:, None]
    if IS_PLAIN:
        there += d
    else:
        together = tl.load(plane + 4)
        there += d // together * tl.load(plane + 5) + d % together
    there = tl.load(plane).to(tl.pointer_type(NUMBER)) + there
    row = tl.load(plane + 6) * n_tokens - start + tl.load(plane + 8)
    here = staged + (row + token.to(tl.int64) * tl.load(plane + 7))[:, None] + d
    if IS_READ:
        tl.store(here, tl.load(there, mask=ok), mask=ok)
    else:
        tl.store(there, tl.load(here, mask=ok), mask=ok)

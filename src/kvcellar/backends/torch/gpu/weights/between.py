"""Triton kernels of what lies between products: norms, rotations of heads, gates.

A model of transformers launches some thirty small operations a layer for them. Each is one pass
here, computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rows(x, out, weight, eps, dim, n_each, x_token, x_row, N: tl.constexpr):
    """Normalise a row by the root of its mean square; the grid is (tokens * rows of each)."""
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, N)
    ok = d < dim
    at = x + (i // n_each) * x_token + (i % n_each) * x_row
    row = tl.load(at + d, mask=ok, other=0.0).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / dim + eps)
    row *= tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + i * dim + d, row, mask=ok)


@triton.jit
def turn_heads(
    heads, cos, sin, q_weight, k_weight, q_eps, k_eps, n_q, token_step, dim, side_step,
    N_TURNED: tl.constexpr, IS_PAIRED: tl.constexpr, SIDE: tl.constexpr, HAS_NORMS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a head of q or k, in place; the grid is (tokens, heads of q and k).

    The first N_TURNED numbers turn: neighbours against each other (IS_PAIRED) or halves. Cosines
    lie SIDE apart.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = heads + token * token_step + head * dim
    i = tl.arange(0, HALF)
    ok = i < N_TURNED // 2
    at_a = 2 * i if IS_PAIRED else i
    at_b = 2 * i + 1 if IS_PAIRED else i + N_TURNED // 2
    rest = N_TURNED + tl.arange(0, REST)
    rest_ok = rest < dim
    a = tl.load(row + at_a, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(row + at_b, mask=ok, other=0.0).to(tl.float32)
    if HAS_NORMS:
        c = tl.load(row + rest, mask=rest_ok, other=0.0).to(tl.float32)
        total = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
        scale = tl.rsqrt(total / dim + tl.where(head < n_q, q_eps, k_eps))
        weight = k_weight
        if head < n_q:
            weight = q_weight
        a *= scale * tl.load(weight + at_a, mask=ok, other=0.0).to(tl.float32)
        b *= scale * tl.load(weight + at_b, mask=ok, other=0.0).to(tl.float32)
        c *= scale * tl.load(weight + rest, mask=rest_ok, other=0.0).to(tl.float32)
        tl.store(row + rest, c, mask=rest_ok)
    sides = token * side_step + i * SIDE
    x = tl.load(cos + sides, mask=ok, other=1.0).to(tl.float32)
    y = tl.load(sin + sides, mask=ok, other=0.0).to(tl.float32)
    tl.store(row + at_a, a * x - b * y, mask=ok)
    tl.store(row + at_b, b * x + a * y, mask=ok)


@triton.jit
def gate_rows(both, out, n, N: tl.constexpr):
    """Multiply the silu of a row's first half with its second; the grid is (rows, n / N)."""
    i = tl.program_id(1) * N + tl.arange(0, N)
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(both + row * 2 * n + i, mask=i < n, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * n + n + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + i, gate * tl.sigmoid(gate) * up, mask=i < n)

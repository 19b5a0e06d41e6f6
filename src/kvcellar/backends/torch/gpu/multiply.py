"""Launches of the products on torch's tensors: linear layers, experts, and rows of an embedding."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvcellar.backends.torch.gpu import products
from kvcellar.backends.torch.gpu.launch import TYPES, is_interpreted, on_device
from kvcellar.backends.torch.gpu.matrices import IQ4_NUMBERS, CardMatrices
from kvcellar.backends.torch.gpu.plans import rounded_up

FEW = 4
"""Rows up to which a product is computed in float32 by programs that have all inputs."""

FEW_PAIRS = 32
"""Rows with an expert each up to which each of them reads its expert by itself."""

OUTPUTS_AT_ONCE, NUMBERS_AT_ONCE = 4, 8192
"""Outputs of a program of few rows, and bits of each that it reads at once: 32 bytes a thread."""

LEAST_TILE, MOST_TILE = 16, 128
"""Rows of a tile; float32 has half as many at most, since tiles are twice as large."""


class Sorted(NamedTuple):
    """Rows of experts sorted by these, and cut into tiles.

    Attributes:
        order: int64 ``[n_rows]``, the rows of each expert one behind the other.
        tiles: int64 ``[n_tiles, 3]``: an expert, or -1, and from where to where in ``order``.
        size: rows of a tile.
    """

    order: Tensor
    tiles: Tensor
    size: int


class Norm(NamedTuple):
    """RMSNorm of inputs: its weights ``[n_in]``, and what is added to the mean of squares."""

    weight: Tensor
    eps: float


class Result(NamedTuple):
    """Result of a product, and what is added to it.

    Attributes:
        n_rows: how many rows.
        n_out: numbers of each.
        out: where they go; None: anywhere.
        add: what is added to them, or None.
        bias: what is added to each of them, or to those of an expert; or None.
    """

    n_rows: int
    n_out: int
    out: Tensor | None
    add: Tensor | None
    bias: Tensor | None


def multiply(
    weights: CardMatrices,
    x: Tensor,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Multiply rows by one matrix.

    Args:
        weights: the matrix.
        x: ``[n_rows, n_in]``.
        bias: ``[n_out]`` or None.
        add: ``[n_rows, n_out]`` that is added to the result; or None.
        out: ``[n_rows, n_out]`` where the result goes; None: anywhere.
        norm: of the inputs, for at most ``FEW`` rows; or None.
        is_gated: true for the silu of the first half of the outputs times the second half; for at
            most ``FEW`` rows.

    Returns:
        ``[n_rows, n_out]``, or half of the outputs where it is gated, in the type of x.
    """
    n_rows = len(x)
    to = Result(n_rows, weights.n_out // (1 + is_gated), out, add, bias)
    if not n_rows:  # the head, in a chunk of a prompt whose logits nobody wants
        return _empty(to, x)
    if n_rows <= FEW:
        return _few(weights, x, to, 1, None, norm, is_gated=is_gated)
    assert not is_gated and norm is None, "those are for few rows"
    return _tiles(weights, x, to, 1, None, min(max(LEAST_TILE, rounded_up(n_rows)), _most_tile(x)))


def multiply_chosen(
    weights: CardMatrices,
    x: Tensor,
    chosen: Tensor,
    bias: Tensor | None,
    rows: Sorted | None,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Multiply rows by the expert that each has chosen.

    Args:
        weights: of all experts.
        x: ``[n, n_in]``; row i of the result is of row ``i * n / n_rows`` of them.
        chosen: int64 ``[n_rows]``; of an expert that is not there the result is zeros.
        bias: ``[n_experts, n_out]`` or None.
        rows: the same sorted, for many rows; None for few.
        is_gated: as in ``multiply``; for few rows.

    Returns:
        ``[n_rows, n_out]``, or half of the outputs where it is gated, in the type of x.
    """
    n_out, per = weights.n_out // (1 + is_gated), len(chosen) // max(1, len(x))
    to = Result(len(chosen), n_out, None, None, bias)
    if not len(chosen):
        return _empty(to, x)
    if rows is None:
        return _few(weights, x, to, per, chosen, None, is_gated=is_gated)
    assert not is_gated, "those are for few rows"
    return _tiles(weights, x, to, per, rows, rows.size)


def sorted_rows(chosen: Tensor, n_experts: int, x: Tensor) -> Sorted:
    """Sort rows by the expert that each has chosen; nothing waits for the device.

    Args:
        chosen: int64 ``[n_rows]``; rows of an expert that is not there are in no tile.
        n_experts: how many there are.
        x: inputs, whose type says how large tiles may be.
    """
    n_rows, device = len(chosen), chosen.device
    is_there = (chosen >= 0) & (chosen < n_experts)
    keys, order = torch.where(is_there, chosen, n_experts).sort(stable=True)
    size = min(max(LEAST_TILE, rounded_up(-(-n_rows // n_experts))), _most_tile(x) // 2)
    ends = torch.searchsorted(keys, torch.arange(n_experts, device=device), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    stops = torch.cumsum((ends - starts + size - 1) // size, 0)
    tile = torch.arange(min(n_rows, n_rows // size + n_experts), device=device)
    expert = torch.searchsorted(stops, tile, right=True)
    is_tile, expert = expert < n_experts, expert.clamp(max=n_experts - 1)
    before = torch.where(expert > 0, stops[expert - 1], 0)
    begin = starts[expert] + (tile - before) * size
    end = torch.minimum(begin + size, ends[expert])
    return Sorted(order, torch.stack([torch.where(is_tile, expert, -1), begin, end], 1), size)


def take(weights: CardMatrices, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix, ``[n] -> [n, n_in]``; zeros for a row that is not there."""
    kind = torch.float32 if is_interpreted() else dtype
    out = torch.empty((len(ids), weights.n_in), dtype=kind, device=ids.device)
    k = min(1024, triton.next_power_of_2(weights.n_in))
    if len(ids):
        with on_device(ids.device):
            products.take_rows[(len(ids), triton.cdiv(weights.n_in, k))](
                ids, out, *_places(weights), weights.n_out, weights.n_in, _row(weights),
                *_fixed(weights, k), k,
            )  # fmt: skip
    return out.to(dtype)


def _few(
    weights: CardMatrices,
    x: Tensor,
    to: Result,
    per: int,
    chosen: Tensor | None,
    norm: Norm | None,
    *,
    is_gated: bool,
) -> Tensor:
    out, x = _room(to, x), _by_rows(x)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    bias, add = (x if one is None else _by_rows(one) for one in (to.bias, to.add))
    rows = 1 if chosen is not None else rounded_up(to.n_rows)
    numbers = NUMBERS_AT_ONCE // weights.form.bits // (1 + is_gated)
    n, k = OUTPUTS_AT_ONCE, min(numbers, triton.next_power_of_2(weights.n_in))
    with on_device(x.device):
        products.multiply_few[(triton.cdiv(to.n_out, n), triton.cdiv(to.n_rows, rows))](
            x, out, bias, add, norm_weight, *_places(weights), x if chosen is None else chosen,
            to.n_rows, weights.n_experts, to.n_out, weights.n_in, _row(weights),
            x.stride(0), out.stride(0), add.stride(0), per, eps, *_fixed(weights, k),
            to.bias is not None, to.add is not None, norm is not None, chosen is not None,
            is_gated, rows, n, k,
        )  # fmt: skip
    return _rounded(out, to, x)


def _tiles(
    weights: CardMatrices, x: Tensor, to: Result, per: int, of_experts: Sorted | None, size: int
) -> Tensor:
    out, x = _room(to, x), _by_rows(x)
    bias, add = (x if one is None else _by_rows(one) for one in (to.bias, to.add))
    if of_experts is not None:
        out.zero_()  # rows of experts that are not there are in no tile
    order, tiles = (x, x) if of_experts is None else (of_experts.order, of_experts.tiles)
    n_tiles = triton.cdiv(to.n_rows, size) if of_experts is None else len(tiles)
    n, k = (32, 128) if size <= 32 else (64, 64) if size <= 64 else (128, 64)
    computes = torch.float32 if is_interpreted() else x.dtype
    if computes is torch.float32:
        k //= 2
    with on_device(x.device):
        products.multiply_tiles[(triton.cdiv(to.n_out, n), n_tiles)](
            x, out, bias, add, *_places(weights), order, tiles,
            to.n_rows, to.n_out, weights.n_in, _row(weights),
            x.stride(0), out.stride(0), add.stride(0), per, *_fixed(weights, k),
            to.bias is not None, to.add is not None, of_experts is not None, TYPES[computes],
            size, n, k, num_warps=8 if size > 64 else 4, num_stages=4 if size <= 32 else 3,
        )  # fmt: skip
    return _rounded(out, to, x)


def _empty(to: Result, x: Tensor) -> Tensor:
    """Return the product of no rows."""
    return x.new_empty((0, to.n_out)) if to.out is None else to.out


def _room(to: Result, x: Tensor) -> Tensor:
    """Return room for a result; interpreted, in float32, which torch rounds rightly then."""
    if to.out is not None and not is_interpreted():
        return to.out
    dtype = torch.float32 if is_interpreted() else x.dtype
    return torch.empty((to.n_rows, to.n_out), dtype=dtype, device=x.device)


def _rounded(out: Tensor, to: Result, x: Tensor) -> Tensor:
    """Return a result in the type of x, where it was wanted."""
    if to.out is None or out is to.out:
        return out.to(x.dtype)
    return to.out.copy_(out)


def _most_tile(x: Tensor) -> int:
    return MOST_TILE if x.dtype != torch.float32 else MOST_TILE // 2


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _places(weights: CardMatrices) -> tuple[Tensor, ...]:
    return (*weights.parts, _table(weights.parts.numbers.device))


def _row(weights: CardMatrices) -> int:
    return weights.parts.numbers.shape[2]


def _fixed(weights: CardMatrices, k: int) -> tuple[int | bool, ...]:
    """Return what a kernel is compiled for; groups are met in powers of two of inputs."""
    form = weights.form
    spread = min(k, form.group & -form.group) if form.group else k
    return (*form, spread)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the numbers that IQ4's codes stand for, on a device."""
    with torch.inference_mode(False):
        return torch.tensor(IQ4_NUMBERS, dtype=torch.float32, device=device)

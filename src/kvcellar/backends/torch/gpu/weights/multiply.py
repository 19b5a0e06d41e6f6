"""Launches of the products on torch's tensors: linear layers, experts, and rows of an embedding."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvcellar.backends.torch.gpu.attend.launch import TYPES, is_interpreted, on_device, programs_of
from kvcellar.backends.torch.gpu.attend.plans import rounded_up
from kvcellar.backends.torch.gpu.weights import products
from kvcellar.backends.torch.gpu.weights.matrices import IQ4_NUMBERS, CardMatrices
from kvcellar.backends.torch.gpu.weights.ways import PLAIN, PROGRAMS, TORCH, Way

FEW = 4
"""Rows up to which a product is computed in float32 by programs that have all inputs."""

FEW_PAIRS = 32
"""Rows with an expert each up to which each of them reads its expert by itself."""

MANY = 128
"""Rows from which weights in few bits are unpacked before torch multiplies.

Unpacking costs each weight about 5 bytes of traffic, 1.5 ps on a card of 3.3 TB/s, and then each
row 3.3 fs at 600 TFLOP/s. Tiles cost each weight some ten operations for every 128 rows, which is
0.3 ps, and each row twice what torch takes. By that both take as long at 260 rows, and at 128 where
what is unpacked stays in the second cache; neither has been measured.
"""

UNPACKED_BYTES = 32 << 20
"""Bytes of weights that are unpacked at a time: they stay in a card's second cache."""

OUTPUTS_AT_ONCE, NUMBERS_AT_ONCE = 4, 8192
"""Outputs of a program of few rows, and bits of each that it reads at once: 32 bytes a thread."""

CHUNKS_AT_ONCE = 128
"""Chunks of an output in few bits that a program reads at once: one of each output a thread.

Outputs are twice as many there for a row alone: what is done to inputs is done for all of them.
"""

PARTS = 16
"""Parts that inputs are split into at most, so that a product of few tiles fills a card."""

TAKEN = 16
"""Weights of a program that unpacks, in thousands of bits."""

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


class HeadTurn(NamedTuple):
    """Rotation of heads that are outputs, each whole.

    Attributes:
        cos, sin: ``[T, n]``, of a row's pairs ``spread`` apart.
        n_turned: heads that turn, the first ones.
        dim: numbers of a head.
        is_paired: true where neighbours turn against each other, false where halves do.
        spread: how far cosines are apart.
    """

    cos: Tensor
    sin: Tensor
    n_turned: int
    dim: int
    is_paired: bool
    spread: int


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
    turn: HeadTurn | None = None,
    way: Way = PLAIN,
) -> Tensor:
    """Multiply rows by one matrix.

    Args:
        weights: the matrix.
        x: ``[n_rows, n_in]``.
        bias: ``[n_out]`` or None.
        add: ``[n_rows, n_out]`` that is added to the result; or None.
        out: ``[n_rows, n_out]`` where the result goes; None: anywhere.
        norm: of the inputs, or None.
        is_gated: true for the silu of the first half of the outputs times the second half.
        turn: of the outputs, of weights of 16 bits; or None.
        way: of at most ``FEW`` rows. Norms, gates and turns are for them, by programs.

    Returns:
        ``[n_rows, n_out]``, or half of the outputs where it is gated, in the type of x.
    """
    n_rows = len(x)
    to = Result(n_rows, weights.n_out // (1 + is_gated), out, add, bias)
    if not n_rows:  # the head, in a chunk of a prompt whose logits nobody wants
        return _empty(to, x)
    if n_rows <= FEW and way.by == PROGRAMS:
        return _few(weights, x, to, 1, None, norm, is_gated=is_gated, turn=turn, way=way)
    assert not is_gated and norm is None and turn is None, "those are for programs of few rows"
    is_plain = weights.parts.numbers.dtype == x.dtype
    if way.by == TORCH if n_rows <= FEW else n_rows >= MANY or is_plain:
        return _many(weights, x, to)
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
    _unpack(weights, ids, 0, out)
    return out.to(dtype)


def _unpack(weights: CardMatrices, ids: Tensor | None, first: int, out: Tensor) -> None:
    """Write weights of outputs, those of ``ids`` or the first one on, as rows ``[n, n_in]``."""
    if not len(out):
        return
    k = min(1024, triton.next_power_of_2(weights.n_in))
    n = 1 if ids is not None else TAKEN * 1024 // weights.form.bits // k
    with on_device(out.device):
        products.take_rows[(triton.cdiv(len(out), n), triton.cdiv(weights.n_in, k))](
            out if ids is None else ids, first, out, *_places(weights), len(out), weights.n_out,
            weights.n_in, *weights.form, ids is not None, n, k,
        )  # fmt: skip


def _many(weights: CardMatrices, x: Tensor, to: Result) -> Tensor:
    """Multiply by torch; weights in few bits, or of another type, are unpacked a part at a time."""
    out = x.new_empty((to.n_rows, to.n_out)) if to.out is None else to.out
    n_out, plain = to.n_out, weights.parts.numbers[0]
    if plain.dtype == x.dtype:
        return _by_torch(x, plain, to, slice(None), out)
    at_once = max(1, UNPACKED_BYTES // (weights.n_in * x.itemsize))
    kind = torch.float32 if is_interpreted() else x.dtype
    room = x.new_empty((min(at_once, n_out), weights.n_in), dtype=kind)
    for first in range(0, n_out, at_once):
        part = room[: n_out - first]
        _unpack(weights, None, first, part)
        _by_torch(x, part.to(x.dtype), to, slice(first, first + len(part)), out)
    return out


def _by_torch(x: Tensor, weight: Tensor, to: Result, outputs: slice, out: Tensor) -> Tensor:
    """Multiply rows by weights of their type, for some outputs of a result."""
    found = out[:, outputs]
    add = None if to.add is None else to.add[:, outputs]
    bias = None if to.bias is None else to.bias[outputs]
    first = bias if add is None else add
    if first is None:
        torch.mm(x, weight.T, out=found)
        return out
    torch.addmm(first, x, weight.T, out=found)
    if add is not None and bias is not None:
        found += bias
    return out


def _few(
    weights: CardMatrices,
    x: Tensor,
    to: Result,
    per: int,
    chosen: Tensor | None,
    norm: Norm | None,
    *,
    is_gated: bool,
    turn: HeadTurn | None = None,
    way: Way = PLAIN,
) -> Tensor:
    out, x = _room(to, x), _by_rows(x)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    bias, add = (x if one is None else _by_rows(one) for one in (to.bias, to.add))
    rows = 1 if chosen is not None else rounded_up(to.n_rows)
    n, bits = _doubled(OUTPUTS_AT_ONCE, way.outputs), weights.form.bits
    experts = x if chosen is None else chosen
    sizes = (
        to.n_rows, weights.n_experts, to.n_out, weights.n_in,
        x.stride(0), out.stride(0), add.stride(0), per, eps,
    )  # fmt: skip
    has = (
        to.bias is not None, to.add is not None, norm is not None, chosen is not None, is_gated,
    )  # fmt: skip
    with on_device(x.device):
        if bits == 16:
            k = _doubled(NUMBERS_AT_ONCE // bits // (1 + is_gated), way.inputs)
            k = min(k, rounded_up(weights.n_in))
            cos, sin, turned, fixed = x, x, (0, 1, 0), (False, 1)
            n_own = to.n_out
            if turn is not None:  # as many outputs of a program, in pairs
                n, n_own, half = max(1, n // 2), to.n_out // 2, turn.dim // 2
                cos, sin, fixed = turn.cos, turn.sin, (turn.is_paired, turn.spread)
                turned = turn.n_turned * half, half, cos.stride(0)
                sizes = (*sizes[:2], n_own, *sizes[3:])
            products.multiply_few[(triton.cdiv(n_own, n), triton.cdiv(to.n_rows, rows))](
                x, out, bias, add, norm_weight, weights.parts.numbers, experts, cos, sin,
                *sizes, *turned, *has, turn is not None, *fixed, rows, n, k,
            )  # fmt: skip
            return _rounded(out, to, x)
        assert turn is None, "it is for 16 bits"
        n = max(1, (2 * n if rows == 1 else n) // (1 + is_gated))
        chunk = 128 // bits
        chunks = min(_doubled(CHUNKS_AT_ONCE, way.inputs), rounded_up(weights.n_in // chunk))
        products.multiply_packed[(triton.cdiv(to.n_out, n), triton.cdiv(to.n_rows, rows))](
            x, out, bias, add, norm_weight, *_places(weights), experts, *sizes, *weights.form,
            *has, rows, n, chunks * chunk, num_warps=max(1, chunks // 32),
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
    steps, n_programs = triton.cdiv(weights.n_in, k), triton.cdiv(to.n_out, n) * n_tiles
    n_parts = 1
    if of_experts is None:
        n_parts = max(1, min(PARTS, steps // 2, programs_of(x.device) // (2 * n_programs)))
    split = triton.cdiv(steps, n_parts) * k
    n_parts = triton.cdiv(weights.n_in, split)
    room = out
    if n_parts > 1:
        room = torch.empty((n_parts, to.n_rows, to.n_out), dtype=torch.float32, device=x.device)
    is_whole = n_parts == 1
    with on_device(x.device):
        products.multiply_tiles[(triton.cdiv(to.n_out, n), n_tiles, n_parts)](
            x, room, bias, add, *_places(weights), order, tiles,
            to.n_rows, to.n_out, weights.n_in,
            x.stride(0), room.stride(-2), add.stride(0), per, split, to.n_rows * to.n_out,
            *weights.form, is_whole and to.bias is not None, is_whole and to.add is not None,
            of_experts is not None, TYPES[computes],
            size, n, k, num_warps=8 if size > 64 else 4, num_stages=4 if size <= 32 else 3,
        )  # fmt: skip
        if not is_whole:
            products.sum_parts[(triton.cdiv(to.n_out, 512), to.n_rows)](
                room, out, bias, add, n_parts, to.n_rows, to.n_out, out.stride(0), add.stride(0),
                to.bias is not None, to.add is not None, 512,
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


def _doubled(n: int, times: int) -> int:
    return n << times if times >= 0 else max(1, n >> -times)


def _most_tile(x: Tensor) -> int:
    return MOST_TILE if x.dtype != torch.float32 else MOST_TILE // 2


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _places(weights: CardMatrices) -> tuple[Tensor | int, ...]:
    return (*weights.parts, _table(weights.parts.numbers.device), _WHOLE)


_WHOLE = 0x4B000000
"""Bits of 2 ** 23 as float32, which a kernel has in a register."""


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the numbers that IQ4's codes stand for, on a device."""
    with torch.inference_mode(False):
        return torch.tensor(IQ4_NUMBERS, dtype=torch.float32, device=device)

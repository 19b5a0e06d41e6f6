"""Launches of the kernels on torch's tensors: a layer's writes, its attention, and the merge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcellar.backends.torch.cache.codecs import AffineCodec, ByteFloatCodec, Codec, Parts
from kvcellar.backends.torch.cache.pools import Placed
from kvcellar.backends.torch.gpu.attend import kernels, stores
from kvcellar.backends.torch.gpu.attend.lists import idle_lists, lists_of
from kvcellar.backends.torch.gpu.attend.plans import (
    SECTIONS,
    PackedPlan,
    PlanForm,
    Tiling,
    pack,
    rounded_up,
)
from kvcellar.kv_dtype import STORED_TYPES
from kvcellar.sight import Sight
from kvcellar.types import StepPlan, Write

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

LEAST_BUFFER = 16_384
"""Integers of the smallest plan buffer: the plans of a hundred sequences' decode steps fit."""

LARGE_SHARED = 160_000
"""Bytes of shared memory from which tiles are larger and more of them are fetched ahead."""

MANY_NUMBERS = 128 * 128
"""Numbers of a tile's result from which eight warps share it in place of four."""

PROGRAMS_PER_CORE = 4
"""Programs that few queries are split into, for each multiprocessor."""


class KernelSide(NamedTuple):
    """K or V of a layer as the kernels are told it.

    Attributes:
        data: the numbers.
        affine: scales and biases; of a float side the numbers again.
        strides: of heads, cells and blocks of the numbers, then of scales and biases.
        dim: numbers of a row.
        pad: the power of two that a tile has room for.
        bits: of a number.
        size: numbers that share a scale; 0 of floats, which have none; below 0 of floats of 8 bits,
            how many bits of a byte are the fraction.
    """

    data: Tensor
    affine: Tensor
    strides: tuple[int, ...]
    dim: int
    pad: int
    bits: int
    size: int

    @property
    def fixed(self) -> tuple[int, int, int, int]:
        """Numbers that a kernel is compiled for."""
        return self.dim, self.pad, self.bits, self.size


class PoolArguments(NamedTuple):
    """A layer's pool as the kernels are told it, until it grows."""

    k: KernelSide
    v: KernelSide
    block: int
    """Cells of a block; 0 for pools of one piece."""
    beside: PoolArguments | None = None
    """Pool of the cells that are named from ``plans.BESIDE`` on, of one piece; None: none are."""


def is_interpreted() -> bool:
    """Return true if Triton interprets kernels, without a GPU."""
    return bool(triton.knobs.runtime.interpret)


def pool_arguments(placed: Placed) -> PoolArguments:
    """Describe where a layer's K and V lie."""
    k, v = (
        _side(parts, codec, placed.block_size)
        for parts, codec in zip((placed.k, placed.v), placed.codecs, strict=True)
    )
    return PoolArguments(k, v, placed.block_size)


def _side(parts: Parts, codec: Codec, block: int) -> KernelSide:
    pad = max(16, rounded_up(codec.dim))
    axes = (1, 2, 0)
    strides = [tuple(part.stride(axis) for axis in axes) for part in parts]
    if isinstance(codec, AffineCodec):
        size = codec.group_size
        flat = (*strides[0], *strides[1])
        return KernelSide(parts[0], parts[1], flat, codec.dim, pad, codec.bits, size)
    flat = (*strides[0], *strides[0])
    bits = 8 * parts[0].element_size()
    size = -codec.form.n_fraction if isinstance(codec, ByteFloatCodec) else 0
    return KernelSide(parts[0], parts[0], flat, codec.dim, pad, bits, size)


class PlanOnDevice(Protocol):
    """Protocol of a plan whose integers lie on the device."""

    @property
    def form(self) -> PlanForm | None:
        """Form of the plan; None: there is none yet."""
        ...

    @property
    def sections(self) -> Mapping[str, Tensor]:
        """Integers of the plan by the names of ``SECTIONS``."""
        ...


def sections_of(form: PlanForm, numbers: Tensor) -> dict[str, Tensor]:
    """Return views of a plan's integers by section."""
    found = dict(zip(SECTIONS, numbers.split(form.sections), strict=True))
    return found | {"masks": found["masks"].view(torch.uint8)}


class DevicePlan:
    """Plan of a layer group on the device: one buffer, whose address stays while it is enough.

    Plans of equal form have their sections at equal places.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a buffer on a device, without a plan."""
        self.form: PlanForm | None = None
        self.sections: dict[str, Tensor] = {}
        self._buffer = torch.empty(LEAST_BUFFER, dtype=torch.int32, device=device)

    def update(self, packed: PackedPlan) -> None:
        """Copy a plan to the device, in one transfer."""
        n = len(packed.numbers)
        if n > len(self._buffer):
            with torch.inference_mode(False):
                self._buffer = self._buffer.new_empty(rounded_up(n))
            self.form = None
        self._buffer[:n].copy_(torch.from_numpy(packed.numbers), non_blocking=True)
        if packed.form != self.form:
            self.form = packed.form
            self.sections = sections_of(packed.form, self._buffer[:n])


def tiling_of(
    n_heads: int, pool: PoolArguments, dtype: torch.dtype, device: torch.device
) -> Tiling:
    """Return the sizes of tiles for queries of a type over a layer's pool."""
    n_kv_heads = pool.k.data.shape[1]
    width = max(pool.k.pad, pool.v.pad) * (2 if _computes(dtype, pool) is torch.float32 else 1)
    is_large = shared_bytes(device) >= LARGE_SHARED
    cells = 64 if width <= 128 else 32 if width <= 256 else 16
    few = 64 if width <= 256 else 32
    many = 128 if is_large and width <= 128 else few
    stages = 3 if is_large and width <= 128 else 2
    group = n_heads // n_kv_heads
    return Tiling(group, n_kv_heads, few, many, cells, stages, programs_of(device))


def programs_of(device: torch.device) -> int:
    """Return how many programs fill a device."""
    if device.type == "cuda":
        return PROGRAMS_PER_CORE * torch.cuda.get_device_properties(device).multi_processor_count
    return 256


def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; 0 where torch does not say."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0))


def compiled(
    plan: StepPlan,
    sight: Sight,
    tiling: Tiling,
    n_tokens: int | None = None,
    exact: Sequence[Write] = (),
    *,
    stores: bool = True,
) -> PackedPlan:
    """Return what the kernels do for a plan; they give zeros to tokens that pad it to n_tokens.

    Args:
        plan: of a step.
        sight: of the layers.
        tiling: sizes of the launches.
        n_tokens: of the batch with those that pad it; None: nothing pads it.
        exact: writes to exact cells, counted from 0.
        stores: false for layers that write nothing.
    """
    lists = lists_of(plan, sight)
    if n_tokens is not None:
        lists = [*lists, *idle_lists(plan.n_tokens, n_tokens)]
    return pack(plan, lists, tiling, n_tokens, exact, stores=stores)


def write(plan: PlanOnDevice, pool: PoolArguments, k: Tensor, v: Tensor) -> None:
    """Write rows ``[1, n_kv_heads, T, dim]`` to the cells of the plan, and to its exact ones.

    One launch for each of the two that the plan has.
    """
    _write(plan.sections["writes"], pool, k, v)
    if pool.beside is not None:
        _write(plan.sections["exact"], pool.beside, k, v)


def _write(cells: Tensor, pool: PoolArguments, k: Tensor, v: Tensor) -> None:
    if not len(cells):
        return
    k, v = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (k, v))
    if is_interpreted():  # which cuts numbers off where a GPU rounds them to bfloat16
        k, v = (
            rows if side.size else rows.to(side.data.dtype)
            for rows, side in ((k, pool.k), (v, pool.v))
        )
    n_heads, n_tokens = k.shape[1:3]
    with on_device(k.device):
        stores.write_rows[(n_tokens, 2)](
            k, v, cells, pool.k.data, pool.k.affine, pool.v.data, pool.v.affine,
            *_row_strides(k), *_row_strides(v), *pool.k.strides, *pool.v.strides,
            n_heads, rounded_up(n_heads), *pool.k.fixed, *pool.v.fixed, pool.block,
        )  # fmt: skip


def move(pool: PoolArguments, base: int, cells: Tensor) -> None:
    """Copy ``cells [n]`` to cells ``[base, base + n)``, of which it has none; one launch."""
    if not len(cells):
        return
    n_heads = pool.k.data.shape[1]
    with on_device(cells.device):
        stores.move_rows[(len(cells), 2)](
            cells, base, pool.k.data, pool.k.affine, pool.v.data, pool.v.affine,
            *pool.k.strides, *pool.v.strides, n_heads, rounded_up(n_heads),
            *pool.k.fixed, *pool.v.fixed, pool.block,
        )  # fmt: skip


def attend(
    plan: PlanOnDevice,
    pool: PoolArguments,
    tiling: Tiling,
    q: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the plan's queries; at most three launches.

    Args:
        plan: whose lists cover the queries.
        pool: of the layer, with this step's K and V.
        tiling: that the plan was made with.
        q: ``[1, n_heads, T, q_dim]``; longer than K's rows where they are latent.
        scale: factor on the logits.
        out_dtype: type of the result.
        softcap: cap on the logits, or None.
        sinks: ``[n_heads]``, or None.

    Returns:
        ``[1, n_heads, T, v_head_dim]``.
    """
    assert plan.form is not None, "the plan was updated"
    form, at = plan.form, plan.sections
    q = q if q.stride(3) == 1 else q.contiguous()
    n_heads, n_tokens = q.shape[1:3]
    dtype = torch.float32 if is_interpreted() else out_dtype
    out = q.new_empty((1, n_tokens, n_heads, pool.v.dim), dtype=dtype).transpose(1, 2)
    part_out = q.new_empty((form.n_slots, n_heads, pool.v.dim), dtype=torch.float32)
    part_lse = q.new_empty((form.n_slots, n_heads), dtype=torch.float32)
    logit_sinks = q if sinks is None else sinks.contiguous()
    is_latent = q.shape[3] > pool.k.dim
    computes = _computes(q.dtype, pool)
    other = pool.beside or pool
    pools = [
        part for side in (pool.k, pool.v, other.k, other.v) for part in _read_parts(side, q.device)
    ]
    common = (
        at["lists"], at["runs"], at["tokens"], at["index"], at["masks"], scale, softcap or 1.0,
        *_row_strides(q), *_row_strides(out), *pool.k.strides, *pool.v.strides,
        *other.k.strides, *other.v.strides, n_heads, tiling.group, is_latent,
        *pool.k.fixed, *pool.v.fixed, pool.block, *other.k.fixed[2:], *other.v.fixed[2:],
        pool.beside is not None, TYPES[computes], softcap is not None, sinks is not None,
        form.has_masks,
    )  # fmt: skip
    with on_device(q.device):
        for name, rows in (("few", form.rows), ("many", tiling.many)):
            n_tiles = len(at[name]) // 3
            if not n_tiles:
                continue
            kernels.attend_lists[(n_tiles, tiling.n_kv_heads)](
                q, out, part_out, part_lse, logit_sinks, *pools, at[name], *common, rows,
                tiling.cells,
                num_warps=8 if rows * pool.v.pad >= MANY_NUMBERS else 4, num_stages=tiling.stages,
            )  # fmt: skip
        if len(at["merged"]):
            kernels.merge_parts[(len(at["merged"]) // 3, n_heads)](
                out, part_out, part_lse, logit_sinks, at["merged"], *_row_strides(out),
                n_heads, pool.v.dim, pool.v.pad, sinks is not None, 16,
            )  # fmt: skip
    return out.to(out_dtype)


def _computes(dtype: torch.dtype, pool: PoolArguments) -> torch.dtype:
    """Return the type of the operands: the queries', or float32 beside another float type."""
    stored = {side.data.dtype for side in (pool.k, pool.v) if side.bits > 8}
    if is_interpreted() or not stored <= {dtype}:
        return torch.float32  # interpreted products of bfloat16 are wrong
    return dtype


def _read_parts(side: KernelSide, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the parts of a side as they are read: fp8 as that where the device knows it."""
    fp8 = STORED_TYPES["fp8"].byte_float
    if fp8 is not None and side.size == -fp8.n_fraction and has_fp8(device):
        return side.data.view(torch.float8_e4m3fn), side.affine
    return side.data, side.affine


def has_fp8(device: torch.device) -> bool:
    """Return true if a device has instructions for fp8, of four bits for exponents."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) >= (8, 9)


def _row_strides(rows: Tensor) -> tuple[int, int]:
    return rows.stride(1), rows.stride(2)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Launch on a device: Triton takes the current one."""
    if device.type == "cpu":
        yield
        return
    with torch.get_device_module(device).device(device):
        yield

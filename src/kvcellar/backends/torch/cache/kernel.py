"""The CPU kernel on torch's tensors: one call writes a layer's K and V and attends."""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.codecs import AffineCodec, Codec, Parts
from kvcellar.cache_config import FROZEN
from kvcellar.errors import BackendError
from kvcellar.kernel import attend as native
from kvcellar.kernel import levels
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import AttendKind, AttendSpec, StepPlan, Write

FEW_QUERIES = 8
"""Up to this many queries of a read the kernel is faster than torch's matrix multiplications.

Not so at the x86 levels without a matrix unit, where it always is.
"""

FEW_QUERIES_MASKED = 32
"""Queries of reads with a mask, as trees of guesses have: torch's way gathers and adds it."""

FEW_QUERIES_AMX = 64
"""Queries where torch uses a matrix unit."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of queries, new rows and results."""


@functools.cache
def dtype_of(dtype: torch.dtype) -> native.Dtype:
    """Return the kernel's name of one of torch's types."""
    return native.Dtype[str(dtype).removeprefix("torch.")]


def address_of(tensor: Tensor) -> int:
    """Return where a tensor's numbers lie, for the CPU kernel, which reads whatever is there.

    Raises:
        BackendError: the tensor is not in main memory; the kernel was not called.
    """
    if not tensor.is_cpu:
        asked, _, _ = sys._getframe(1).f_code.co_qualname.partition(".<locals>")
        raise BackendError(
            f"{asked} would have the CPU kernel read or write a tensor {list(tensor.shape)} of "
            f"{tensor.dtype} that lies on {tensor.device}; move it to the CPU, or load the model "
            f"for that device"
        )
    return tensor.data_ptr()


class TensorLayout:
    """Strides and types of q, k, v and the result, as the kernel is told them.

    The same in all layers of a group and in one decode step after the other; made anew where
    something differs.
    """

    __slots__ = ("dtype", "layout", "out_dtype", "strides")

    def __init__(self) -> None:
        """Create a layout that is made with the first tensors."""
        self.layout: native.Layout | None = None
        self.strides: tuple[tuple[int, ...], ...] = ()
        self.dtype: torch.dtype | None = None
        self.out_dtype: torch.dtype | None = None

    def layout_of(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> native.Layout:
        """Describe these tensors to the kernel; ``out`` has no gaps, so it tells the heads."""
        strides = (q.stride(), k.stride(), v.stride(), out.stride())
        if (
            self.layout is None
            or strides != self.strides
            or q.dtype != self.dtype
            or out.dtype != self.out_dtype
        ):
            self.strides, self.dtype, self.out_dtype = strides, q.dtype, out.dtype
            self.layout = native.Layout(
                q.shape[1],
                dtype_of(q.dtype),
                dtype_of(out.dtype),
                *((rows[1], rows[2]) for rows in strides),
            )
        return self.layout


def attend(
    plan: native.Plan,
    pool: native.Pool,
    rows: TensorLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    softcap: float | None,
    sinks: Tensor | None,
    to_exact: tuple[native.Plan, native.Pool] | None = None,
) -> Tensor:
    """Write k and v and attend the queries of the plan; shapes as in ``update_and_attend``.

    A K that is stored rotated, and its queries, come rotated. Queries that the plan has no read for
    get no result. ``to_exact``: what else is written to exact cells, and their pool.
    """
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        q, k, v = q.float(), k.float(), v.float()
    if not (q.stride(3) == k.stride(3) == v.stride(3) == 1):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    _, n_heads, n_tokens, _ = q.shape
    if n_tokens == 1:
        out = torch.empty((1, n_heads, 1, v.shape[3]), dtype=out_dtype)
    else:  # as the projection that follows wants it
        out = torch.empty((1, n_tokens, n_heads, v.shape[3]), dtype=out_dtype).transpose(1, 2)
    layout = rows.layout_of(q, k, v, out)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if to_exact is not None:
        to_exact[0].write(to_exact[1], layout, address_of(k), address_of(v))
    plan.step(
        pool,
        layout,
        address_of(q),
        address_of(k),
        address_of(v),
        address_of(out),
        scale,
        softcap or 0.0,
        0 if sinks is None else address_of(sinks),
    )
    return out


def takes(device: torch.device, kv: KvDtype) -> bool:
    """Return true if the kernel is there for tensors of this device, and reads rows stored so."""
    is_read = kv.k.byte_float is None and kv.v.byte_float is None
    return device.type == "cpu" and is_read and levels.is_available()


def most_queries(kv: KvDtype, dtype: torch.dtype) -> int | None:
    """Up to how many queries of a read are the kernel's; None: any number.

    Args:
        kv: how K and V are stored.
        dtype: of the queries.
    """
    level = levels.level().name
    if level in {"avx2", "avx_vnni", "vnni", "bf16"}:
        # Torch takes 1.1 (AVX2, 512 behind 7,000 cells) to 4 times as long: with bf16 in floats.
        return None
    if level != "amx" or {kv.k.name, kv.v.name} & {"float32", "float16"}:
        return FEW_QUERIES
    return None if dtype == torch.float32 else FEW_QUERIES_AMX  # torch has none for float32


def is_long(read: AttendSpec, n_queries: int) -> bool:
    """Return true if a read is faster by torch, where ``n_queries`` is the most for the kernel.

    Where a mask has to be added that takes more.
    """
    if read.kind is AttendKind.EXPLICIT:
        n_queries = max(n_queries, FEW_QUERIES_MASKED)
    return read.q_len > n_queries


def compile_plan(
    plan: StepPlan, n_queries: int | None
) -> tuple[native.Plan, tuple[AttendSpec, ...]]:
    """Compile all writes, and reads of up to ``n_queries``, for the kernel; return the others.

    Those are for torch's matrix multiplications.
    """

    def is_left(read: AttendSpec) -> bool:
        is_apart = read.runs[0].start >= FROZEN  # in memory that the kernel's pool does not have
        return is_apart or (n_queries is not None and is_long(read, n_queries))

    left = tuple(read for read in plan.reads if is_left(read))
    if left:
        taken = tuple(read for read in plan.reads if not is_left(read))
        plan = StepPlan(plan.n_tokens, plan.writes, taken, plan.n_cells)
    return native.Plan(plan), left


def compile_writes(n_tokens: int, writes: tuple[Write, ...], n_cells: int) -> native.Plan:
    """Writes of some tokens, and nothing to attend."""
    return native.Plan(StepPlan(n_tokens, writes, (), n_cells))


def make_pool(
    k: Parts,
    v: Parts,
    codecs: tuple[Codec, Codec],
    exact: native.Pool | None,
    *,
    is_joined: bool = False,
) -> native.Pool:
    """Describe parts ``[1, n_kv_heads, cells, ...]`` to the kernel, and exact cells beside them.

    Joined, a K row is V's and K's together.
    """
    k_side, v_side = _sides(k, v, codecs, (1, 2), is_joined)
    return native.Pool(k[0].shape[1], k[0].shape[2], k_side, v_side, exact=exact)


def make_paged_pool(
    k: Parts,
    v: Parts,
    codecs: tuple[Codec, Codec],
    exact: native.Pool | None,
    *,
    is_joined: bool = False,
) -> native.Pool:
    """Describe parts ``[n_blocks, n_kv_heads, block_size, ...]``, as ``make_pool`` does."""
    k_side, v_side = _sides(k, v, codecs, (1, 2, 0), is_joined)
    n_blocks, n_heads, block_size = k[0].shape[:3]
    return native.Pool(n_heads, n_blocks * block_size, k_side, v_side, block_size, exact)


def _sides(
    k: Parts, v: Parts, codecs: tuple[Codec, Codec], axes: tuple[int, ...], is_joined: bool
) -> tuple[native.Side, native.Side]:
    """Describe K and V, whose rows are one where they are joined."""
    of_k, of_v = codecs
    v_side = _side(v, of_v, of_v.dim, axes)
    if is_joined:
        return _side(v, of_v, of_v.dim + of_k.dim, axes), v_side
    return _side(k, of_k, of_k.dim, axes), v_side


def _side(parts: Parts, codec: Codec, dim: int, axes: tuple[int, ...]) -> native.Side:
    """Describe one side, with rows of ``dim``.

    ``axes``: those of heads, cells and, if there are any, blocks.
    """
    strides = [[part.stride(axis) * part.itemsize for axis in axes] for part in parts]
    heads, cells, *blocks = strides[0]
    if not isinstance(codec, AffineCodec):
        dtype = dtype_of(parts[0].dtype)
        return native.Side(dtype, dim, address_of(parts[0]), heads, cells, *blocks)
    affine_heads, affine_cells, *affine_blocks = strides[1]
    return native.Side(
        native.Dtype[f"int{codec.bits}"],
        dim,
        address_of(parts[0]),
        heads,
        cells,
        sum(blocks),
        address_of(parts[1]),
        affine_heads,
        affine_cells,
        sum(affine_blocks),
        codec.group_size,
    )

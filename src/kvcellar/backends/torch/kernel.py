"""The CPU kernel on torch's tensors: one call writes a layer's K and V and attends."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcellar import kernel as kernels
from kvcellar.backends.torch.codecs import AffineCodec, Codec, Parts
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import AttendKind, AttendSpec, StepPlan, Write

FEW_QUERIES = 8
"""Up to this many queries of a read the kernel is faster than torch's matrix multiplications.

Not so with AVX2, VNNI and bf16, where it always is, and over bfloat16, int8 and int4 with AMX.
"""

FEW_QUERIES_MASKED = 32
"""The same for reads with a mask, as trees of guesses have: torch's way gathers and adds it."""

FEW_QUERIES_AMX = 64
"""The same where torch uses a matrix unit."""

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class RowLayout:
    """How q, k and v lie in memory and what type they and the result have.

    The same in all layers of a group and in one decode step after the other; made anew where
    something differs.
    """

    __slots__ = ("dtype", "layout", "out_dtype", "strides")

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.layout: kernels.Layout | None = None
        self.strides: tuple[tuple[int, ...], ...] = ()
        self.dtype: torch.dtype | None = None
        self.out_dtype: torch.dtype | None = None

    def layout_of(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> kernels.Layout:
        """The kernel's description of these tensors; ``out`` has no gaps, so it tells the heads."""
        strides = (q.stride(), k.stride(), v.stride(), out.stride())
        if (
            self.layout is None
            or strides != self.strides
            or q.dtype != self.dtype
            or out.dtype != self.out_dtype
        ):
            self.strides, self.dtype, self.out_dtype = strides, q.dtype, out.dtype
            self.layout = kernels.make_layout(
                q.shape[1],
                DTYPE_NAMES[q.dtype],
                DTYPE_NAMES[out.dtype],
                *((rows[1], rows[2]) for rows in strides),
            )
        return self.layout


def attend(
    plan: kernels.Plan,
    pool: kernels.Pool,
    rows: RowLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    softcap: float | None,
    sinks: Tensor | None,
    to_exact: tuple[kernels.Plan, kernels.Pool] | None = None,
) -> Tensor:
    """Write k and v and attend the queries of the plan; shapes as in ``update_and_attend``.

    A K that is stored rotated, and its queries, come rotated. Queries that the plan has no read for
    get no result. ``to_exact``: what else is written to exact cells, and their pool.
    """
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPE_NAMES:
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
        to_exact[0].write(to_exact[1], layout, k.data_ptr(), v.data_ptr())
    plan.step(
        pool,
        layout,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        scale,
        softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
    )
    return out


def takes(device: torch.device) -> bool:
    """Whether the kernel is there for tensors of this device."""
    return device.type == "cpu" and kernels.is_available()


def most_queries(kv: KvDtype, dtype: torch.dtype) -> int | None:
    """Up to how many queries of a read are the kernel's; None: any number.

    Args:
        kv: how K and V are stored.
        dtype: of the queries.
    """
    stored = {kv.k.name, kv.v.name}
    if kernels.level() in {"avx2", "avx_vnni", "vnni", "fp16", "bf16"}:
        # Torch takes 1.1 (AVX2, 512 behind 7,000 cells) to 4 times as long: with bf16 in floats.
        return None
    if kernels.level() != "amx" or stored & {"float32", "float16"}:
        return FEW_QUERIES
    return None if dtype == torch.float32 else FEW_QUERIES_AMX  # torch has none for float32


def is_long(read: AttendSpec, n_queries: int) -> bool:
    """Whether a read of so many queries is faster by torch, if ``n_queries`` is the most.

    Where a mask has to be added that takes more.
    """
    if read.kind is AttendKind.EXPLICIT:
        n_queries = max(n_queries, FEW_QUERIES_MASKED)
    return read.q_len > n_queries


def compile_plan(
    plan: StepPlan, n_queries: int | None
) -> tuple[kernels.Plan, tuple[AttendSpec, ...]]:
    """All writes and the reads of up to ``n_queries`` for the kernel; the other reads are left.

    Those are for torch's matrix multiplications.
    """
    if n_queries is None:
        return kernels.compile_plan(plan), ()
    long = tuple(read for read in plan.reads if is_long(read, n_queries))
    if long:
        short = tuple(read for read in plan.reads if not is_long(read, n_queries))
        plan = StepPlan(plan.n_tokens, plan.writes, short, plan.n_cells)
    return kernels.compile_plan(plan), long


def compile_writes(n_tokens: int, writes: tuple[Write, ...], n_cells: int) -> kernels.Plan:
    """Writes of some tokens, and nothing to attend."""
    return kernels.compile_plan(StepPlan(n_tokens, writes, (), n_cells))


def make_pool(
    k: Parts, v: Parts, codecs: tuple[Codec, Codec], exact: kernels.Pool | None
) -> kernels.Pool:
    """Where the kernel finds parts ``[1, n_kv_heads, cells, ...]``, and exact cells beside them."""
    k_side, v_side = (
        _side(parts, codec, (1, 2)) for parts, codec in zip((k, v), codecs, strict=True)
    )
    return kernels.make_pool(k[0].shape[1], k[0].shape[2], k_side, v_side, exact=exact)


def make_paged_pool(
    k: Parts, v: Parts, codecs: tuple[Codec, Codec], exact: kernels.Pool | None
) -> kernels.Pool:
    """The same for parts ``[n_blocks, n_kv_heads, block_size, ...]``."""
    k_side, v_side = (
        _side(parts, codec, (1, 2, 0)) for parts, codec in zip((k, v), codecs, strict=True)
    )
    n_blocks, n_heads, block_size = k[0].shape[:3]
    return kernels.make_pool(n_heads, n_blocks * block_size, k_side, v_side, block_size, exact)


def _side(parts: Parts, codec: Codec, axes: tuple[int, ...]) -> kernels.SideLayout:
    """One side; ``axes`` are those of the heads, the cells and, in pages, the blocks."""
    strides = [[part.stride(axis) * part.itemsize for axis in axes] for part in parts]
    heads, cells, *blocks = strides[0]
    name = f"int{codec.bits}" if isinstance(codec, AffineCodec) else DTYPE_NAMES[parts[0].dtype]
    side = kernels.SideLayout(name, codec.dim, parts[0].data_ptr(), heads, cells, *blocks)
    if not isinstance(codec, AffineCodec):
        return side
    heads, cells, *blocks = strides[1]
    return side._replace(
        affine=parts[1].data_ptr(),
        affine_head_stride=heads,
        affine_cell_stride=cells,
        affine_block_stride=sum(blocks),
        group_size=codec.group_size,
    )

"""The CPU kernel: writes a step's K and V into cells and attends over runs of cells.

It knows addresses and strides, no tensors: any backend whose bytes lie in host memory can use it.
What a call costs in Python is kept low by three objects that outlive it:

- a :class:`Pool` says where one layer's K and V lie; made anew when the pool (re)allocates;
- a :class:`Layout` says how a forward's q, k, v and result lie; made once per shape;
- a :class:`Plan` is a ``StepPlan`` flattened, with the work already split; made once per forward
  and layer group.

Then ``plan.step(pool, layout, q, k, v, out, scale, softcap, sinks)`` is one layer, all addresses as
integers; ``softcap`` 0.0 and ``sinks`` 0 mean none. Whoever makes these objects keeps the memory
alive and the pool large enough: a plan that reaches past ``n_cells`` is refused.

The extension is built with the package. Where it is not there ``is_available()`` is false, backends
attend by their runtime's own means, and ``why_not()`` says what would help.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcellar.errors import ConfigError
from kvcellar.types import AttendKind, StepPlan

if TYPE_CHECKING:
    from kvcellar.kernel._native import (
        Decoder,
        DecoderLayer,
        Eagle3Weights,
        Layout,
        LinearWeights,
        Plan,
        Pool,
    )

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Eagle3Weights",
    "Layout",
    "LinearWeights",
    "Plan",
    "Pool",
    "SideLayout",
    "compile_plan",
    "gate",
    "is_available",
    "level",
    "levels",
    "make_decoder",
    "make_decoder_layer",
    "make_eagle3_weights",
    "make_layout",
    "make_linear_weights",
    "make_pool",
    "move_cells",
    "norm",
    "num_threads",
    "rotate",
    "set_level",
    "set_num_threads",
    "set_parallel_for",
    "step_function",
    "stream_read",
    "threads_of",
    "warn_if_missing",
    "why_not",
]

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
"""Storage types and their numbers in the extension; q, k, v and results have one of the first 3."""

_FORMATS = {16: 0, 8: 1, 4: 2, 12: 3}
"""Bits of linear layers' weights and their numbers in the extension."""

LEVEL_VARIABLE = "KVCELLAR_KERNEL"
"""Environment: an instruction set to use in place of the best, or ``off``."""


def _said_of(error: ImportError) -> str:
    """What is missing, what that costs, and the way out, in one sentence for people."""
    is_built = any(Path(__file__).parent.glob("_native*.so"))
    state = f"cannot be loaded ({error})" if is_built else "was not built when it was installed"
    root = Path(__file__).parents[3]
    again = "--force-reinstall --no-cache-dir --no-binary kvcellar kvcellar"
    if (root / "setup.py").is_file():
        again = f"-e {root}"
    return (
        f"the compiled CPU kernel of kvcellar {state}, so models run several times slower, on the "
        f"runtime's own operations; install a C++17 compiler (Debian and Ubuntu: apt install g++; "
        f"macOS: xcode-select --install), then: pip install --no-deps {again}"
    )


_reason = ""
_forced = os.environ.get(LEVEL_VARIABLE, "")
if _forced == "off":
    _reason = f"{LEVEL_VARIABLE}=off"
else:
    try:
        from kvcellar.kernel import _native

        if not TYPE_CHECKING:
            from kvcellar.kernel._native import (
                Decoder,
                DecoderLayer,
                Eagle3Weights,
                Layout,
                LinearWeights,
                Plan,
                Pool,
            )
    except ImportError as error:
        _reason = _said_of(error)


def is_available() -> bool:
    """Whether the extension is there."""
    return not _reason


def why_not() -> str:
    """Why the kernel is not available and what to do; empty where it is."""
    return _reason


@functools.cache
def warn_if_missing() -> None:
    """Say once, in the log, that the kernel is missing; nothing where somebody switched it off."""
    if _reason and _forced != "off":
        logging.getLogger(__name__).warning(_reason)


class SideLayout(NamedTuple):
    """Where K, or V, of one layer lies. Strides in bytes.

    Head h of cell c is at ``data + h * head_stride + c * cell_stride``; in pages of ``block_size``
    cells at ``data + h * head_stride + (c // block_size) * block_stride + (c % block_size) *
    cell_stride``. The ``affine`` fields say the same of the float16 (scale, bias) pairs,
    ``[n_groups, 2]`` for each row, of a quantised side.

    Attributes:
        dtype: a name of ``kv_dtype.KV_DTYPES``.
        dim: numbers of a row.
        data: address of the first head's first cell.
        head_stride: from head to head.
        cell_stride: from cell to cell.
        block_stride: from block to block, in pages.
        affine: address of the first scale.
        affine_head_stride: from head to head.
        affine_cell_stride: from cell to cell.
        affine_block_stride: from block to block, in pages.
        group_size: numbers that share a scale and a bias.
    """

    dtype: str
    dim: int
    data: int
    head_stride: int
    cell_stride: int
    block_stride: int = 0
    affine: int = 0
    affine_head_stride: int = 0
    affine_cell_stride: int = 0
    affine_block_stride: int = 0
    group_size: int = 0


def make_pool(
    n_kv_heads: int,
    n_cells: int,
    k: SideLayout,
    v: SideLayout,
    block_size: int = 0,
    exact: Pool | None = None,
) -> Pool:
    """Describe one layer's bytes.

    Args:
        n_kv_heads: KV heads.
        n_cells: cells that are allocated; nothing past them is read or written.
        k: where K lies.
        v: where V lies.
        block_size: cells of a block for pages; 0: all cells at one stride.
        exact: a pool of float rows, of as many heads and numbers. Runs of reads that start at
            ``bookkeeping.exact.BASE`` or later are its cells, counted from there. Writes never go
            to it: a plan of their own does those.

    Raises:
        ConfigError: a side that the kernel cannot read, or an exact pool of other rows.
    """
    sides = _side("K", k), _side("V", v)
    try:
        return _native.Pool(n_kv_heads, n_cells, block_size, *sides, exact)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _side(name: str, side: SideLayout) -> _native.Side:
    if side.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is stored as {side.dtype!r}; the kernel reads {', '.join(DTYPES)}"
        )
    is_grouped = side.affine and side.group_size > 0 and side.dim % side.group_size == 0
    if side.dtype in ("int8", "int4") and not is_grouped:
        raise ConfigError(
            f"{name} is {side.dtype} in groups of {side.group_size} for rows of {side.dim} with "
            f"its scales at address {side.affine}; groups must divide the row, and scales must be "
            f"somewhere"
        )
    return _native.Side(DTYPES[side.dtype], *side[1:])


def make_layout(
    n_heads: int,
    dtype: str,
    out_dtype: str,
    q: tuple[int, int],
    k: tuple[int, int],
    v: tuple[int, int],
    out: tuple[int, int],
) -> Layout:
    """Describe the rows of a forward. Strides in numbers: (from head to head, token to token).

    Args:
        n_heads: query heads.
        dtype: of q, k and v: float32, bfloat16 or float16.
        out_dtype: of the result, one of the same.
        q: strides of the queries; the last dimension is contiguous everywhere.
        k: strides of the new keys.
        v: strides of the new values.
        out: strides of the result.

    Raises:
        ConfigError: a type that the kernel does not take.
    """
    for name, given in (("q, k and v are", dtype), ("the result is", out_dtype)):
        if DTYPES.get(given, 3) > 2:
            raise ConfigError(f"{name} {given!r}; the kernel takes {', '.join([*DTYPES][:3])}")
    return _native.Layout(n_heads, DTYPES[dtype], DTYPES[out_dtype], *q, *k, *v, *out)


def reads_coded() -> bool:
    """Whether bfloat16 weights in 12 bits are read faster here than as they are."""
    return level() in {"avx2", "avx_vnni", "avx512", "vnni", "fp16", "bf16", "amx"}


def multiplies_packed() -> bool:
    """Whether many tokens meet packed weights faster here than as bfloat16 in torch's product."""
    return level() in {"avx_vnni", "vnni", "fp16", "bf16", "amx"}


def multiplies_pairs() -> bool:
    """Whether coded weights meet bfloat16 inputs two at a time."""
    return level() == "bf16"


def code(rows: int, n_in: int, n_out: int, to: int) -> bytes:
    """Write bfloat16 weights in 12 bits, of which nothing is lost; ``native/linear.h`` says how.

    Args:
        rows: address of ``[n_out, n_in]``.
        n_in: inputs, a multiple of 128.
        n_out: outputs.
        to: address of as many bytes as ``models.weights.coded_bytes`` says.

    Returns:
        The numbers that do not fit into 12 bits, 8 bytes each.
    """
    return _native.code(rows, n_in, n_out, to)


def pack(rows: int, dtype: str, bits: int, n_in: int, n_out: int, data: int, scales: int) -> None:
    """Write weights in 8 or 4 bits and their float16 scales; ``native/linear.h`` says how they lie.

    Symmetric around 0, with a scale for each 128 inputs, or in 4 bits 32: for 8 bits the largest
    magnitude is 127 steps, for 4 bits the number of the largest magnitude is -8 of them. Where not
    all that share a scale are finite it is NaN.

    Args:
        rows: address of ``[n_out, n_in]``.
        dtype: of them, float32 or bfloat16.
        bits: 8 or 4.
        n_in: inputs, a multiple of 32.
        n_out: outputs.
        data: address of as many bytes as blocks of 16 outputs take.
        scales: address of float16 ``[n_blocks, n_scales, 16]``.
    """
    _native.pack(rows, DTYPES[dtype], _FORMATS[bits], n_in, n_out, data, scales)


def make_linear_weights(
    bits: int, n_in: int, n_out: int, data: int, beside: int = 0
) -> LinearWeights:
    """Describe a linear layer's weights; ``native/linear.h`` says how they lie.

    Its ``linear(x, n_tokens, dtype, out, out_dtype)`` reads rows ``[n_tokens, n_in]`` and writes
    ``[n_tokens, n_out]``, at addresses, in float32 or bfloat16 (numbers of ``DTYPES``). For 8 and 4
    bits each group of 32 inputs is rounded to 8 bits for it; a token's result does not depend on
    others. ``unpack(first, stop, to)`` writes blocks of 16 outputs as bfloat16, of all but 16 bits,
    and ``gather(outputs, n, dtype, to)`` the weights of n outputs, int64, as ``[n, n_in]``: in
    bfloat16, those of 8 and 4 bits also in float32. They have to be there: nothing is checked.
    Where ``can_multiply``, ``multiply(x, n_tokens, out)`` does it on the matrix unit, for many
    tokens: all in bfloat16, packed weights rounded to it, inputs as they are.

    Args:
        bits: 16 (bfloat16 ``[n_out, n_in]``), 12 (the same, by :func:`code`), 8 or 4.
        n_in: inputs, for 8 and 4 bits a multiple of 32.
        n_out: outputs.
        data: address of the weights.
        beside: address of the float16 scales of packed weights, or of what :func:`code` returned.
    """
    return _native.LinearWeights(_FORMATS[bits], n_in, n_out, data, beside)


def make_eagle3_weights(
    *,
    hidden: int,
    inner: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    n_vocab: int,
    n_said: int,
    eps: float,
    qkv: LinearWeights,
    o: LinearWeights,
    gate_up: LinearWeights,
    down: LinearWeights,
    lm_head: LinearWeights,
    embedding: int,
    qkv_bias: int = 0,
    residual_scale: int = 0,
) -> Eagle3Weights:
    """Describe an EAGLE-3 head, for one call per level; ``native/eagle3.h`` says what it is given.

    Args:
        hidden: width of its hidden states.
        inner: of its MLP.
        n_heads: of its attention.
        n_kv_heads: of its attention.
        head_dim: of its attention.
        n_vocab: tokens that it reads.
        n_said: tokens that it can say.
        eps: of all norms, which have no weights: those are folded into the matrices.
        qkv: those of q, k and v in one.
        o: behind the attention.
        gate_up: both in one.
        down: the last one of the MLP.
        lm_head: from hidden states to what it can say.
        embedding: address of float32 ``[n_vocab, hidden]``.
        qkv_bias: address of float32; 0: none.
        residual_scale: address of float32 ``[hidden]``, where the residual is the normed hidden
            state times it; 0: where it is the hidden state.
    """
    shape = hidden, inner, n_heads, n_kv_heads, head_dim, n_vocab, n_said
    matrices = qkv, o, gate_up, down, lm_head
    return _native.Eagle3Weights(*shape, eps, *matrices, embedding, qkv_bias, residual_scale)


def make_decoder_layer(
    linears: Sequence[tuple[LinearWeights, int]],
    norms: Sequence[tuple[int, float]],
    heads: tuple[int, int, int],
    dtype: int,
    scale: float,
) -> DecoderLayer:
    """Describe a decoder layer, which for a few tokens is two calls around its attention.

    ``before(x, n_tokens, cos, sin, qkv)``: x ``[n_tokens, hidden]`` is normed, a joined product
    makes q, k and v of it, and q and k are normed and rotated. ``after(x, attended, n_tokens,
    out)``: what was attended is projected and added to x, and the gated MLP of its norm to that.
    All of them lie without gaps, at addresses.

    Args:
        linears: q, k and v joined; what follows attention; gate and up joined; down: their weights
            and the address of a bias, or 0.
        norms: of x, of what comes after attention, of q's heads and of k's: the address of the
            weight, or 0 for none of the latter two, and what is added to the mean.
        heads: of q, of k, and numbers of each.
        dtype: number in ``DTYPES`` of float32 or bfloat16, of everything but packed weights.
        scale: factor on the attention's logits, for a :class:`Decoder`.
    """
    qkv, o, gate_up, down = (_native.LinearLayer(*linear) for linear in linears)
    before, between, q, k = (_native.Norm(*norm) for norm in norms)
    return _native.DecoderLayer(qkv, o, gate_up, down, before, between, q, k, *heads, dtype, scale)


def make_decoder(
    layers: Sequence[DecoderLayer],
    embedding: int,
    norm: tuple[int, float],
    head: tuple[LinearWeights, int],
) -> Decoder:
    """Describe a causal model, of which a forward of a few tokens is one call.

    ``run(steps, ids, n_tokens, cos, sin, rows, n_rows, logits, feature_layers, features)``, all but
    numbers addresses. ``steps`` are per layer its plan and pool, those of exact cells or None
    twice, and the cap on logits, 0.0 for none; ``ids`` int64 ``[n_tokens]``; ``cos`` and ``sin``
    ``[n_tokens, head_dim]`` in the layers' type; ``rows`` int64 ``[n_rows]``, the tokens whose
    logits are wanted; ``logits`` float32 ``[n_rows, n_vocab]``; ``features`` float32 ``[n_tokens,
    number of feature_layers, hidden]``, what these layers are given: behind the last one that is
    its result. Nothing is checked: ids and rows have to be there.

    Args:
        layers: one or more.
        embedding: address of ``[n_vocab, hidden]``, in the layers' type; 0: the head's weights,
            of all but 16 bits.
        norm: of the last layer's result: as in :func:`make_decoder_layer`.
        head: from there to logits.
    """
    return _native.Decoder(layers, embedding, _native.Norm(*norm), _native.LinearLayer(*head))


def norm(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: int,
    weight: int,
    eps: float,
    out: int,
) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row; bfloat16 is rounded before it too.

    Args:
        x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.
        n_tokens: tokens.
        n_rows: rows of a token.
        dim: numbers of a row.
        token_stride: numbers from token to token.
        dtype: number in ``DTYPES`` of float32 or bfloat16, of all three.
        weight: address of ``[dim]``.
        eps: what is added to the mean.
        out: address of the result, without gaps.
    """
    _native.norm(x, n_tokens, n_rows, dim, token_stride, dtype, weight, eps, out)


def rotate(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: int,
    cos: int,
    sin: int,
) -> None:
    """Rotate the halves of each row against each other, in place: RoPE.

    Args:
        x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.
        n_tokens: tokens.
        n_rows: rows of a token.
        dim: numbers of a row, an even number.
        token_stride: numbers from token to token.
        dtype: number in ``DTYPES`` of float32 or bfloat16, of all three.
        cos: address of ``[n_tokens, dim]``.
        sin: the same.
    """
    _native.rotate(x, n_tokens, n_rows, dim, token_stride, dtype, cos, sin)


def gate(x: int, n_tokens: int, dim: int, dtype: int, out: int) -> None:
    """``[n_tokens, 2, dim] -> silu(x[:, 0]) * x[:, 1]``, in float32 or bfloat16, at addresses."""
    _native.gate(x, n_tokens, dim, dtype, out)


def compile_plan(plan: StepPlan) -> Plan:
    """Flatten a plan and split its work. Cells that several reads see whole are read once."""
    return _native.Plan(plan, AttendKind.CAUSAL, AttendKind.EXPLICIT)


def move_cells(pool: Pool, base: int, src_cells: Sequence[int] | np.ndarray) -> None:
    """Copy ``src_cells`` to cells ``[base, base + n)``; all are read before any is written."""
    cells = np.ascontiguousarray(src_cells, dtype=np.int64)
    pool.move_cells(base, cells.ctypes.data, cells.size)


def levels() -> list[str]:
    """Instruction sets that this machine and this build have, the best first."""
    return _native.levels()


def level() -> str:
    """The instruction set in use."""
    return _native.level()


def set_level(name: str) -> None:
    """Use another instruction set from the next call on.

    Raises:
        ConfigError: this machine or this build does not have it.
    """
    if not _native.set_level(name):
        raise ConfigError(f"instruction set {name!r} is not here; choose {', '.join(levels())}")


def set_num_threads(n: int) -> None:
    """Use up to ``n`` threads; 0: as many as OpenMP, which torch is set by, or one per core."""
    _native.set_num_threads(n)


def num_threads() -> int:
    """Threads that the next call may use."""
    return _native.num_threads()


def threads_of() -> str:
    """Whose threads they are: ``openmp`` (torch's), ``given`` (``set_parallel_for``) or ``own``."""
    return _native.threads_of()


def set_parallel_for(address: int) -> None:
    """Use another runtime's threads.

    Args:
        address: of a C function ``void(int n_workers, void (*work)(void*, int), void* data)`` that
            calls ``work(data, i)`` for each worker i and returns when all have; 0: ours again.
    """
    _native.set_parallel_for(address)


def step_function() -> tuple[int, int]:
    """(address, version) of the C function ``KvcStep`` in ``native/step_call.h``.

    For shared objects of other runtimes: they call this kernel with the ``address`` of a plan and
    of a pool, without Python.
    """
    return _native.step_address(), _native.STEP_VERSION


def stream_read(data: int, n_bytes: int) -> float:
    """Read memory with all threads and nothing else: what the memory gives."""
    return _native.stream_read(data, n_bytes)


if not _reason and _forced:
    set_level(_forced)

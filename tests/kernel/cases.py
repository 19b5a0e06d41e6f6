"""Random steps for the CPU attention kernel: pools in NumPy, plans, and what has to come out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvcellar.backends.reference import attend, visible
from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.backends.reference.quantise import QuantisedRows, dequantise, quantise
from kvcellar.kernel import attend as native
from kvcellar.kernel import levels
from kvcellar.kv_dtype import KV_DTYPES, SideDtype
from kvcellar.types import AttendKind, AttendSpec, StepPlan, Write, cells_of, runs_of

FLOATS = ("float32", "bfloat16", "float16")
N_CELLS = 640
BASE = 1 << 40
"""Where a plan's exact cells begin."""


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a float type stores them; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return to_bfloat16_bits(values)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def numbers(array: np.ndarray) -> np.ndarray:
    """The numbers that stored values stand for."""
    return from_bfloat16_bits(array) if array.dtype == np.uint16 else array.astype(np.float32)


@dataclass
class SideBytes:
    """K or V of a pool, and the numbers that its bytes stand for.

    Attributes:
        side: how rows are stored.
        values: ``[n_heads, N_CELLS, dim]``; what attention has to see.
        parts: the stored arrays, with cells in axes that ``place`` finds.
    """

    side: SideDtype
    values: np.ndarray
    block_size: int
    parts: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [self._paged(part) for part in self.encode(self.values)]
        self.values = self.decode(self.encode(self.values))

    def encode(self, rows: np.ndarray) -> list[np.ndarray]:
        """``[..., dim]`` as bytes: the rows, and scales with biases where there are any."""
        if not self.side.is_quantised:
            return [stored(rows, self.side.name)]
        made = quantise(rows, self.side.bits, self.side.group_of(rows.shape[-1]))
        return [made.packed, np.stack([made.scales, made.biases], axis=-1)]

    def decode(self, parts: list[np.ndarray]) -> np.ndarray:
        """The numbers of ``encode``'s bytes."""
        if not self.side.is_quantised:
            return numbers(parts[0])
        packed, affine = parts
        rows = (packed, affine[..., 0], affine[..., 1])
        return dequantise(QuantisedRows(*rows), self.side.bits, self.values.shape[-1])

    def _paged(self, part: np.ndarray) -> np.ndarray:
        if not self.block_size:
            return np.ascontiguousarray(part)
        n_blocks = N_CELLS // self.block_size
        blocks = part.reshape(part.shape[0], n_blocks, self.block_size, *part.shape[2:])
        return np.ascontiguousarray(blocks.swapaxes(0, 1))

    def at(self, part: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """``[n_heads, len(cells), ...]`` of a stored array, copied."""
        if not self.block_size:
            return part[:, cells]
        return part[cells // self.block_size, :, cells % self.block_size].swapaxes(0, 1)

    def spoil(self, cells: np.ndarray) -> None:
        """Make these cells' numbers NaN."""
        for part in self.parts:
            garbage = {np.uint16: 0x7FC1, np.uint8: 0xA5}.get(part.dtype.type, np.nan)
            if self.block_size:
                part[cells // self.block_size, :, cells % self.block_size] = garbage
            else:
                part[:, cells] = garbage
        self.values[:, cells] = np.nan

    def layout(self) -> native.Side:
        """Where the bytes lie."""

        def strides(part: np.ndarray) -> tuple[int, int, int]:
            if self.block_size:
                return part.strides[1], part.strides[2], part.strides[0]
            return part.strides[0], part.strides[1], 0

        rows, *affine = self.parts
        dim = self.values.shape[-1]
        where = (native.Dtype[self.side.name], dim, rows.ctypes.data, *strides(rows))
        if not affine:
            return native.Side(*where)
        scales = (affine[0].ctypes.data, *strides(affine[0]), self.side.group_of(dim))
        return native.Side(*where, *scales)


@dataclass
class Case:
    """One step over one pool."""

    plan: StepPlan
    k: SideBytes
    v: SideBytes
    n_heads: int
    dtype: str
    out_dtype: str
    softcap: float
    has_sinks: bool
    is_token_major: bool
    seed: int
    exact: tuple[SideBytes, SideBytes] | None = None
    """K and V of the exact cells: other numbers than those of any main cell."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n, n_kv = self.plan.n_tokens, self.k.values.shape[0]

        def rows(n_heads: int, dim: int) -> np.ndarray:
            shape = (n, n_heads, dim) if self.is_token_major else (n_heads, n, dim)
            return stored(rng.standard_normal(shape).astype(np.float32), self.dtype)

        self.q_rows = rows(self.n_heads, self.k.values.shape[2])
        self.k_rows = rows(n_kv, self.k.values.shape[2])
        self.v_rows = rows(n_kv, self.v.values.shape[2])
        self.sinks = rng.standard_normal(self.n_heads).astype(np.float32)
        if not self.has_sinks:
            self.sinks = None
        self.scale = 1 / np.sqrt(self.k.values.shape[2])

    def heads_first(self, rows: np.ndarray) -> np.ndarray:
        """``[n_heads, n_tokens, dim]``, a view."""
        return rows.swapaxes(0, 1) if self.is_token_major else rows

    def pool(self) -> native.Pool:
        """The pool's description."""
        n_heads = self.k.values.shape[0]
        exact = None
        if self.exact:
            exact = native.Pool(n_heads, N_CELLS, *[side.layout() for side in self.exact])
        main = (self.k.layout(), self.v.layout(), self.k.block_size)
        return native.Pool(n_heads, N_CELLS, *main, exact)

    def spoil(self, cells: np.ndarray) -> None:
        """Make the numbers of these cells, main or exact, NaN."""
        for side in (self.k, self.v):
            side.spoil(cells[cells < BASE])
        for side in self.exact or ():
            side.spoil(cells[cells >= BASE] - BASE)

    def rows_of(self, which: int, cells: np.ndarray) -> np.ndarray:
        """``[n_heads, len(cells), dim]``: K (0) or V (1) of cells, main or exact."""
        main, is_exact = (self.k, self.v)[which].values, cells >= BASE
        rows = main[:, np.where(is_exact, 0, cells)]
        if self.exact:
            rows[:, is_exact] = self.exact[which].values[:, cells[is_exact] - BASE]
        return rows

    def layout(self, out: np.ndarray) -> native.Layout:
        """The rows' description."""

        def strides(rows: np.ndarray) -> tuple[int, int]:
            head, token = self.heads_first(rows).strides[:2]
            return head // rows.itemsize, token // rows.itemsize

        arrays = (self.q_rows, self.k_rows, self.v_rows, out)
        dtypes = (native.Dtype[self.dtype], native.Dtype[self.out_dtype])
        return native.Layout(self.n_heads, *dtypes, *map(strides, arrays))

    def run(self) -> np.ndarray:
        """The kernel's step: ``[n_heads, n_tokens, v_head_dim]``."""
        dim = self.v.values.shape[2]
        shape = (self.plan.n_tokens, self.n_heads, dim)
        out = stored(np.full(shape if self.is_token_major else (shape[1], shape[0], dim), np.nan),
                     self.out_dtype)  # fmt: skip
        compiled = native.Plan(self.plan)
        compiled.step(
            self.pool(),
            self.layout(out),
            self.q_rows.ctypes.data,
            self.k_rows.ctypes.data,
            self.v_rows.ctypes.data,
            out.ctypes.data,
            self.scale,
            self.softcap,
            0 if self.sinks is None else self.sinks.ctypes.data,
        )
        return numbers(self.heads_first(out))

    def expected(self, *, of_magnitudes: bool = False) -> np.ndarray:
        """Return what `run` should, by NumPy: what is written, then attention in float64.

        Args:
            of_magnitudes: Of V without its signs: what errors of weights are multiplied by at most.
        """
        cells = self.plan.write_cells
        for side, rows in ((self.k, self.k_rows), (self.v, self.v_rows)):
            given = numbers(self.heads_first(rows))
            side.values[:, cells] = side.decode(side.encode(given))
        q = numbers(self.heads_first(self.q_rows))
        out = np.empty((*q.shape[:2], self.v.values.shape[2]))
        for read in self.plan.reads:
            at = slice(read.q_start, read.q_start + read.q_len)
            seen = visible(read.kind, read.mask, read.q_len, read.read_len)
            cells = cells_of(read.runs)
            keys, values = self.rows_of(0, cells), self.rows_of(1, cells)
            values = np.abs(values) if of_magnitudes else values
            softcap = self.softcap or None
            out[:, at] = attend(q[:, at], keys, values, seen, self.scale, softcap, self.sinks)
        return out


def tolerance(case: Case) -> float:
    """What rounding explains: of float32 arithmetic, of integer products, and of the result's own
    type."""
    own = {"float32": 0.0, "bfloat16": 2**-7, "float16": 2**-10}[case.out_dtype]
    is_quantised = case.k.side.is_quantised or case.v.side.is_quantised
    by_words = is_quantised and levels.level().name not in ("scalar", "neon")
    return own + (4e-4 if by_words else 3e-5)


READ = tuple(name for name in KV_DTYPES if SideDtype(name).byte_float is None)
"""Storage types that the kernel reads."""

DIMS = st.sampled_from((1, 3, 16, 32, 33, 64, 80, 96, 128))


def sides(dim: int) -> st.SearchStrategy[SideDtype]:
    """Any storage type that a row of ``dim`` can have."""
    fitting = [SideDtype(name) for name in READ]
    fitting += [
        SideDtype(name, group)
        for name in ("int8", "int4")
        for group in (32, 64, 128)
        if dim % group == 0
    ]
    return st.sampled_from(fitting)


@st.composite
def cases(draw: st.DrawFn, dtype: str | None = None) -> Case:
    """A step of one to four sequences, with or without a trunk that they share."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    dim, v_dim = draw(DIMS), draw(DIMS)
    block_size = draw(st.sampled_from((0, 0, 4, 16)))
    run = draw(st.sampled_from((1, 16, N_CELLS // 2)))
    order = rng.permutation(N_CELLS // run)
    cells = (order[:, None] * run + np.arange(run)).reshape(-1).tolist()
    at = draw(st.integers(0, 300))
    trunk = cells[:at]
    # Exact copies of cells near the ends of reads, at other indices; some ends have holes.
    n_first, n_last = draw(st.sampled_from(((0, 0), (0, 0), (4, 32), (0, 9), (70, 1))))
    copy_of = BASE + np.roll(np.arange(N_CELLS), 5)
    has_copy = rng.random(N_CELLS) < draw(st.sampled_from((1.0, 1.0, 0.8)))
    reads, writes, n_tokens = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        q_len = draw(st.sampled_from((1, 1, 2, 5, 20)))
        n_own = q_len + draw(st.sampled_from((0, 0, 7, 40)))
        own, at = cells[at : at + n_own], at + n_own
        read = trunk + own
        kind = draw(st.sampled_from(AttendKind))
        mask = None
        if kind is AttendKind.EXPLICIT:
            mask = rng.random((q_len, draw(st.integers(1, len(read))))) < draw(
                st.sampled_from((0.05, 0.5, 1.0))
            )
            mask[:, -1] = True
        seen = np.array(read)
        place = np.arange(len(read))
        is_end = (place < n_first) | (place >= len(read) - n_last)
        seen = np.where(is_end & has_copy[seen], copy_of[seen], seen)
        reads.append(AttendSpec(n_tokens, q_len, tuple(runs_of(seen)), kind, mask))
        for new in runs_of(own[-q_len:]):
            writes.append(Write(n_tokens, new))
            n_tokens += new.length
    plan = StepPlan(n_tokens, tuple(writes), tuple(reads), N_CELLS)
    bytes_of = [
        SideBytes(
            SideDtype(dtype) if dtype else draw(sides(d)),
            rng.standard_normal((n_kv_heads, N_CELLS, d)).astype(np.float32),
            block_size,
        )
        for d in (dim, v_dim)
    ]
    exact = [
        SideBytes(
            SideDtype("float32"),
            rng.standard_normal((n_kv_heads, N_CELLS, d)).astype(np.float32),
            block_size=0,
        )
        for d in (dim, v_dim)
    ]
    return Case(
        plan,
        *bytes_of,
        n_heads=n_kv_heads * group,
        dtype=draw(st.sampled_from(FLOATS)),
        out_dtype=draw(st.sampled_from(FLOATS)),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        has_sinks=draw(st.booleans()),
        is_token_major=draw(st.booleans()),
        seed=seed,
        exact=(exact[0], exact[1]) if n_first or n_last else None,
    )

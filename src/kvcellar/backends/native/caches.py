"""The native caches: shared bookkeeping, NumPy arrays, and attention by the CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvcellar.backends.host_rows import RowMoves, slots_of
from kvcellar.backends.native.pools import NativePools
from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.backends.reference.quantise import rotate
from kvcellar.backends.reference.state_pools import StatePools, States
from kvcellar.backends.shapes import check_shapes
from kvcellar.bookkeeping import OneSequence, Sequences, Steps, TreeSequences
from kvcellar.bookkeeping.cells.exact import BASE, layer_plan
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import BackendError, ShapeError
from kvcellar.kernel import attend, levels, recurrent
from kvcellar.types import IntArray, Run, StepPlan, Write

Array = NDArray[Any]


class Prepared(NamedTuple):
    """A plan as the kernel takes it, made once per forward and layer group.

    Attributes:
        plan: of the bookkeeping.
        shapes: of q, k and v.
        compiled: its writes and reads.
        to_exact: tokens that are written to exact cells too; None: none are.
    """

    plan: StepPlan
    shapes: tuple[tuple[int, ...], ...]
    compiled: attend.Plan
    to_exact: attend.Plan | None


class NativeCache(RowMoves):
    """Cache of NumPy arrays: writes, reads and attention by the CPU kernel, as the steps plan them.

    Always holds: a call that raises one of kvcellar's errors has written nothing.
    """

    steps: Steps
    pools: NativePools

    def __init__(self, pools: NativePools) -> None:
        """Create the byte side of a cache whose bytes are in ``pools``.

        Raises:
            BackendError: the kernel is not built here.
        """
        if not levels.is_available():
            raise BackendError(f"the native backend is the CPU kernel: {levels.why_not()}")
        self.pools = pools
        self._is_rotated = pools.config.kv.k.is_rotated
        self._slots = slots_of(pools.config.params)
        self._prepared: list[Prepared | None] = [None] * (2 * len(pools.groups))

    def update_and_attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        position: ArrayLike | None,
        layer_id: int,
        scale: float,
        out_dtype: DTypeLike | str,
        sinks: Array | None = None,
    ) -> Array:
        """Store K and V and attend, as ``kvcellar.op.eager_update_and_attend``.

        Args:
            q: ``[1, n_heads, T, head_dim]``, float16 or what is computed with as float32.
            k: ``[1, n_kv_heads, T, head_dim]``.
            v: ``[1, n_kv_heads, T, v_head_dim]``.
            position: one int per token, ``[T]`` or ``[T, 1]``; None where the step was begun with
                them.
            layer_id: layer.
            scale: factor on the logits.
            out_dtype: a NumPy dtype, or "bfloat16": float32 that holds rounded values.
            sinks: ``[n_heads]``; None: none.

        Returns:
            ``[1, n_heads, T, v_head_dim]``.

        Raises:
            ShapeError, StepError, PositionError, CacheFullError: nothing was written.
        """
        index = self.steps.group_of(layer_id)
        group = self.pools.groups[index]
        prepared = self._prepare(layer_id, index, position, q.shape, k.shape, v.shape)
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise ShapeError(f"sinks are {list(sinks.shape)}; {q.shape[1]} heads need as many")
        if self._is_rotated:
            q, k = _rotated(q, group.head_dim), _rotated(k, group.head_dim)
        if group.is_latent:
            k = np.concatenate((v, k), axis=-1)
        is_half = q.dtype == k.dtype == v.dtype == np.float16
        dtype = np.float16 if is_half else np.float32
        q, k, v = (_rows(part, dtype) for part in (q, k, v))
        out = np.empty((q.shape[2], q.shape[1], group.v_head_dim), dtype)
        rows = self.pools.of_layer[layer_id]
        name = attend.Dtype["float16" if is_half else "float32"]
        of_q, of_k, of_v = (_strides(part[0]) for part in (q, k, v))
        layout = attend.Layout(
            q.shape[1], name, name, of_q, of_k, of_v, _strides(out.swapaxes(0, 1))
        )
        at_k, at_v = k.ctypes.data, v.ctypes.data
        if prepared.to_exact is not None:
            assert rows.exact is not None, "the storage type has exact cells"
            prepared.to_exact.write(rows.exact.for_kernel(0), layout, at_k, at_v)
        given = None if sinks is None else np.ascontiguousarray(sinks, np.float32)
        prepared.compiled.step(
            rows.for_kernel(),
            layout,
            q.ctypes.data,
            at_k,
            at_v,
            out.ctypes.data,
            scale,
            group.softcap or 0.0,
            0 if given is None else given.ctypes.data,
        )
        self.steps.wrote(layer_id)
        attended = out.swapaxes(0, 1)[None]
        if isinstance(out_dtype, str) and out_dtype == "bfloat16":
            return from_bfloat16_bits(to_bfloat16_bits(attended))
        return attended.astype(out_dtype, copy=False)

    @property
    def is_rotated(self) -> bool:
        """True if K is stored rotated, so that queries and keys are rotated before attention."""
        return self._is_rotated

    def compiled_steps(
        self, n_tokens: int, positions: IntArray
    ) -> list[tuple[attend.Plan, attend.Pool, attend.Plan | None, attend.Pool | None, float]]:
        """Compile the plans of all layers, for the kernel's call that runs them.

        Args:
            n_tokens: tokens of the flat batch.
            positions: one per token.

        Returns:
            For each layer its plan and pool, those of exact cells or None twice, and the cap on
            logits. The step is open: ``steps.wrote_all`` when all layers have written, else
            ``cancel_step``.

        Raises:
            StepError, PositionError, CacheFullError: as ``Steps.plan_all``; nothing was written.
        """
        plans, found = self.steps.plan_all(n_tokens, positions), []
        for layer, rows in enumerate(self.pools.of_layer):
            index, slot = self.steps.group_of(layer), self._slots[layer]
            known = self._prepared[slot]
            if known is None or known.plan is not plans[index]:
                known = self._prepared[slot] = self._compile(layer, index, plans[index], ())
            rows.ensure(known.plan.n_cells)
            exact = None if rows.exact is None or known.to_exact is None else rows.exact
            beside = None if exact is None else exact.for_kernel(0)
            softcap = self.pools.groups[index].softcap or 0.0
            found.append((known.compiled, rows.for_kernel(), known.to_exact, beside, softcap))
        return found

    def compiled_states(self, dtype: attend.Dtype) -> tuple[recurrent.StateBatch, States]:
        """Compile the plan of states of the step that ``compiled_steps`` has opened.

        Args:
            dtype: of the rows of recurrent layers.

        Returns:
            Slots that are read and written, and the arrays that hold all of them.
        """
        plan, pools = self.steps.begun_states(), self._states
        assert plan is not None, "a cache with recurrent layers has slots"
        pools.ensure(plan.n_slots)
        return recurrent.StateBatch(plan.n_tokens, dtype, plan.advances), pools.layers

    def read_states(self, slots: Sequence[int] | IntArray) -> States:
        """Return copies of the states in some slots; see :class:`StatePools`."""
        return self._states.read(slots)

    def write_states(self, slots: Sequence[int] | IntArray, states: States) -> None:
        """Store states in as many slots; see :class:`StatePools`."""
        self._states.write(slots, states)

    @property
    def _states(self) -> StatePools:
        assert self.pools.states is not None, "the model has recurrent layers"
        return self.pools.states

    def _prepare(
        self,
        layer: int,
        index: int,
        position: ArrayLike | None,
        *shapes: tuple[int, ...],
    ) -> Prepared:
        """Check the shapes, ask for the plan, and compile it once per forward and group."""
        slot = self._slots[layer]
        prepared = self._prepared[slot]
        is_known = prepared is not None and prepared.shapes == shapes
        if prepared is None or not is_known or not self.steps.take_plan(layer, prepared.plan):
            q, k, v = shapes
            group = self.pools.groups[index]
            check_shapes(layer, group, k, v, q)
            n_tokens = k[2]
            positions = _positions(position, n_tokens) if self.steps.needs_positions() else None
            plan = self.steps.plan(layer, n_tokens, positions)
            prepared = self._compile(layer, index, plan, shapes)
            self._prepared[slot] = prepared
        self.pools.of_layer[layer].ensure(prepared.plan.n_cells)
        return prepared

    def _compile(
        self, layer: int, index: int, plan: StepPlan, shapes: tuple[tuple[int, ...], ...]
    ) -> Prepared:
        exact, n_frozen = self.pools.exact[index], self.pools.of_layer[layer].n_frozen
        own, writes = layer_plan(plan, exact, stores=self._slots[layer] == index)
        compiled = attend.Plan(_behind(own, n_frozen) if n_frozen else own)
        to_exact = None
        if exact is not None and writes:
            to_exact = attend.Plan(StepPlan(plan.n_tokens, writes, (), exact.n_cells))
        return Prepared(plan, shapes, compiled, to_exact)


def _behind(plan: StepPlan, n_frozen: int) -> StepPlan:
    """Return a plan for arrays whose first cells are those of a frozen prefix."""

    def moved(run: Run) -> Run:
        if run.start >= FROZEN:
            return Run(run.start - FROZEN, run.length)
        assert run.start < BASE, "a frozen prefix has no exact cells"
        return Run(run.start + n_frozen, run.length)

    writes = tuple(Write(write.q_start, moved(write.run)) for write in plan.writes)
    reads = tuple(replace(read, runs=tuple(map(moved, read.runs))) for read in plan.reads)
    return StepPlan(plan.n_tokens, writes, reads, plan.n_cells + n_frozen)


def _rotated(rows: Array, dim: int) -> Array:
    """Turn the last ``dim`` numbers of rows as :mod:`kvcellar.kv_dtype` says, in float32."""
    latent, turned = rows[..., :-dim], rotate(rows[..., -dim:])
    return np.concatenate((latent, turned), axis=-1) if latent.shape[-1] else turned


def _rows(part: Array, dtype: Any) -> Array:
    """Return an array of a type whose last axis has no gaps."""
    part = part.astype(dtype, copy=False)
    return part if part.strides[-1] == part.itemsize else np.ascontiguousarray(part)


def _strides(part: Array) -> tuple[int, int]:
    """Return the strides of ``[heads, T, dim]`` in numbers: of heads, and of tokens."""
    return part.strides[0] // part.itemsize, part.strides[1] // part.itemsize


def _positions(position: ArrayLike | None, n_tokens: int) -> IntArray | Sequence[int] | None:
    """Return positions ``[T]`` out of ``[T]`` or ``[T, 1]``."""
    if position is None:
        return None
    given = np.asarray(position)
    if given.shape not in ((n_tokens,), (n_tokens, 1)):
        raise ShapeError(
            f"position is {list(given.shape)}; {n_tokens} tokens need [{n_tokens}] or "
            f"[{n_tokens}, 1]"
        )
    return given.reshape(n_tokens).astype(np.int64)


class NativeContiguousCache(NativeCache, OneSequence):
    """One sequence, contiguous."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        NativeCache.__init__(self, NativePools(config))
        OneSequence.__init__(self, config, self.pools)


class NativeSeqCache(NativeCache, Sequences):
    """Many sequences over shared cells."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        NativeCache.__init__(self, NativePools(config))
        Sequences.__init__(self, config, self.pools)


class NativePagedCache(NativeCache, TreeSequences):
    """Many sequences over shared blocks, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache, laid out as the config says."""
        NativeCache.__init__(self, NativePools(config, in_blocks=True))
        TreeSequences.__init__(self, config, self.pools, block_size=config.block_size)


class NativeTreeCache(NativeCache, TreeSequences):
    """Many sequences over shared cells, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        NativeCache.__init__(self, NativePools(config))
        TreeSequences.__init__(self, config, self.pools)

"""The MLX caches: shared bookkeeping plus pools of MLX arrays.

MLX is lazy, and arrays that are not evaluated belong to the thread that made them. A forward writes
to the pools lazily and whoever runs it evaluates them with its result (``settle``); all other
writes are evaluated where they are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvcellar.backends.host_rows import GroupParts, RowMoves, slots_of
from kvcellar.backends.mlx.cache import host_rows
from kvcellar.backends.mlx.cache.attention import Part, Segment, attend, attend_run
from kvcellar.backends.mlx.cache.codecs import rotate, rotate_queries
from kvcellar.backends.mlx.cache.pools import ExactPool, Pool, PrefixedPool, frozen_rows
from kvcellar.backends.mlx.cache.state_pools import GivenStates, StatePools, States
from kvcellar.backends.shapes import check_shapes
from kvcellar.bookkeeping import OneSequence, Sequences, Steps, TreeSequences
from kvcellar.bookkeeping.cells.exact import BASE, exact_cells, layer_plan
from kvcellar.bookkeeping.layouts.reads import ReadsOf, reads_of
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ConfigError, ShapeError
from kvcellar.states import StatePlan
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    IntArray,
    LayerGroup,
    Run,
    StepPlan,
    Write,
    cells_of,
)

LONG_RUN = 256
"""Runs of at least this many cells are attended where they lie; shorter ones are gathered."""

FEW_RUNS = 4
"""Up to this many runs are written as slices, more by index."""

Positions = mx.array | Sequence[int] | IntArray | None
"""``[T]`` or ``[T, 1]``, one int per token of the flat batch; None where they are known."""


class PartRead(NamedTuple):
    """One part to fetch: a run as a view, or cells by index."""

    run: Run | None
    cells: mx.array | None


class Read(NamedTuple):
    """One read of a plan, in arrays; fields as in ``attention.Segment``."""

    q_start: int
    q_len: int
    parts: tuple[PartRead, ...]
    kind: AttendKind
    mask: mx.array | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan in arrays, made once per forward and layer group, and once for those that share."""

    plan: StepPlan
    writes: tuple[Write, ...]
    """Tokens that are written; none in layers that share rows."""
    write_cells: mx.array | None
    reads: tuple[Read, ...]
    exact_writes: tuple[Write, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
    """Shapes of k, v and q: checked once, equal in all layers of the group."""
    one_run: tuple[int, Run, str | None] | None
    """(first cell to write, run to read, mask) where that is all: the hot path."""


class MlxPools:
    """The bytes of every layer: the port that the bookkeeping moves cells by."""

    def __init__(self, config: CacheConfig) -> None:
        """Create pools without cells."""
        self.config = config
        self.groups = config.params.groups
        self.exact = [exact_cells(group, config.kv) for group in self.groups]
        found: dict[int, Pool] = {}
        for group, exact in zip(self.groups, self.exact, strict=True):
            for layer in group.layers:
                if config.prefix is not None:
                    found[layer] = PrefixedPool(group, config, config.prefix.layers[layer])
                elif exact is not None:
                    found[layer] = ExactPool(group, config, exact.n_cells)
                else:
                    found[layer] = Pool(group, config)
        self.stored = list(found.values())
        """Pools of the layers that store rows."""
        self.of_layer = [found[source] for source in config.params.sources]
        state = config.params.state
        self.states = None if state is None else StatePools(state, config)
        """Slots of the recurrent layers; None: there are none."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated."""
        states = 0 if self.states is None else self.states.size_bytes
        return sum(pool.size_bytes for pool in self.stored) + states

    def frozen_rows(self, layer: int, group: LayerGroup, cells: IntArray) -> Pool:
        """Copy a layer's rows of some cells into a pool that nobody writes to."""
        return frozen_rows(self.of_layer[layer], mx.array(cells), group, self.config)

    def read_rows(self, group: LayerGroup, cells: IntArray) -> GroupParts:
        """Return copies of the rows of ``cells [n]`` in the group's layers."""
        pools = [self.of_layer[layer] for layer in group.layers]
        return host_rows.read(pools, cells, group, self.config.kv)

    def write_rows(self, group: LayerGroup, cells: IntArray, given: GroupParts) -> None:
        """Store rows in ``cells [n]`` of the group's layers."""
        host_rows.write([self.of_layer[layer] for layer in group.layers], cells, given)

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells`` to ``[base, base + len)`` in every pool of the group."""
        exact = self.exact[group]
        copies = None if exact is None else exact.move(base, src_cells)
        n = len(src_cells)
        src, dst = mx.array(src_cells), mx.arange(base, base + n)
        for layer in self.groups[group].layers:
            pool = self.of_layer[layer]
            pool.ensure(base + n)
            pool.copy(src, dst)
            if copies is not None and len(copies[0]):
                assert isinstance(pool, ExactPool)
                pool.exact.copy(*(mx.array(cells) for cells in copies))
            mx.eval(pool.parts)


class MlxCache(RowMoves):
    """Cache of MLX arrays, without a kind of bookkeeping: writes, reads and attention.

    A cache is this and a face of the bookkeeping, whose steps say what to write and read.
    """

    steps: Steps
    pools: MlxPools

    def __init__(self, pools: MlxPools) -> None:
        """Create the byte side of a cache whose bytes are in ``pools``."""
        self.pools = pools
        self.is_rotated = pools.config.kv.k.is_rotated
        """True if K is stored rotated: who attends rotates queries too."""
        self._prepared: list[Prepared | None] = [None] * (2 * len(pools.groups))
        """Per layer group for those of its layers that store rows, then for those that share."""
        self._slots = slots_of(pools.config.params)

    def settle(self, *results: mx.array) -> None:
        """Evaluate what a forward has made: its results, and all that it wrote to the pools."""
        rows = [part for pool in self.pools.stored for part in pool.parts]
        states = self.pools.states
        mx.eval(*results, rows, [] if states is None else states.arrays)
        if states is not None:
            states.settle()

    def forget(self) -> None:
        """Let go of what a failed forward was going to write."""
        if self.pools.states is not None:
            self.pools.states.forget()
        with contextlib.suppress(Exception):
            self.settle()  # nothing of it stays to be evaluated later

    # The model's face --------------------------------------------------------------------------

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        position: Positions,
        layer_id: int,
        scale: float,
        out_dtype: mx.Dtype,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Store K and V and attend, as ``kvcellar.op.eager_update_and_attend``; evaluate nothing.

        ``position`` may be None: those that the step claimed.
        """
        if self.is_rotated:
            q, k = rotate_queries(q, k.shape[-1]), rotate(k)
        prepared = self._prepare(layer_id, position, k, v, q)
        group = self.steps.groups[self.steps.group_of(layer_id)]
        softcap, is_plain = group.softcap, group.softcap is None and not group.is_latent
        pool = self.pools.of_layer[layer_id]
        if prepared.one_run is not None and pool.is_float and is_plain:
            first, run, mask = prepared.one_run
            pool.write_run(first, k, v)
            self.steps.wrote(layer_id)
            return attend_run(q, pool.read(*run), mask, scale, out_dtype, sinks)
        segments = self._store(layer_id, prepared, k, v)
        return attend(q, segments, scale, out_dtype, softcap=softcap, sinks=sinks)

    def plan_states(self, layer: int, n_tokens: int, position: Positions) -> StatePlan:
        """Return what a recurrent layer reads and writes; the pools hold all these slots.

        Raises:
            StepError, PositionError: see ``Steps.plan_states``.
        """
        assert self.pools.states is not None, "a cache with recurrent layers has slots"
        positions = _flat(position) if self.steps.needs_positions() else None
        plan = self.steps.plan_states(layer, n_tokens, positions)
        self.pools.states.ensure(plan.n_slots)
        return plan

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer has stored its states; after the last, tokens count."""
        self.steps.wrote_states(layer)

    def read_states(self, slots: Sequence[int] | IntArray) -> States:
        """Return copies of the states in ``slots [n]``, per recurrent layer ``[n, *shape]``."""
        assert self.pools.states is not None, "a cache with recurrent layers has slots"
        return self.pools.states.read_states(slots)

    def write_states(self, slots: Sequence[int] | IntArray, states: GivenStates) -> None:
        """Store states in ``slots [n]``; see :meth:`StatePools.write_states`."""
        assert self.pools.states is not None, "a cache with recurrent layers has slots"
        self.pools.states.write_states(slots, states)

    def update_and_fetch(
        self, layer: int, position: Positions, k: mx.array, v: mx.array
    ) -> list[Segment]:
        """Store this forward's K and V of one layer; say what each query reads.

        Arguments and errors as in ``update_and_attend``. Queries of a rotated K must be rotated by
        whoever attends. Who keeps a segment makes the next write copy the pool.
        """
        k = rotate(k) if self.is_rotated else k
        return self._store(layer, self._prepare(layer, position, k, v), k, v)

    def _prepare(
        self, layer: int, position: Positions, k: mx.array, v: mx.array, q: mx.array | None = None
    ) -> Prepared:
        """Check the shapes, ask for the plan, put it in arrays once per forward and group."""
        index = self.steps.group_of(layer)
        slot = self._slots[layer]
        prepared = self._prepared[slot]
        shapes = (k.shape, v.shape, None if q is None else q.shape)
        if (
            prepared is None
            or shapes != prepared.shapes
            or not self.steps.take_plan(layer, prepared.plan)
        ):
            check_shapes(layer, self.steps.groups[index], *shapes)
            positions = _flat(position) if self.steps.needs_positions() else None
            plan = self.steps.plan(layer, k.shape[2], positions)
            stores = slot == index
            own, exact_writes = layer_plan(plan, self.pools.exact[index], stores=stores)
            cells = mx.array(own.write_cells) if len(own.writes) > FEW_RUNS else None
            reads = tuple(_read(spec) for spec in own.reads)
            one_run = _one_run(plan) if stores and not exact_writes else None
            prepared = Prepared(plan, own.writes, cells, reads, exact_writes, shapes, one_run)
            self._prepared[slot] = prepared
        self.pools.of_layer[layer].ensure(prepared.plan.n_cells)
        return prepared

    def _store(self, layer: int, prepared: Prepared, k: mx.array, v: mx.array) -> list[Segment]:
        self._write(layer, prepared, k, v)
        pool = self.pools.of_layer[layer]
        return [
            Segment(
                read.q_start,
                read.q_len,
                tuple(_fetch(pool, part) for part in read.parts),
                read.kind,
                read.mask,
            )
            for read in prepared.reads
        ]

    def _write(self, layer: int, prepared: Prepared, k: mx.array, v: mx.array) -> None:
        pool = self.pools.of_layer[layer]
        if prepared.write_cells is not None:
            pool.scatter_rows(prepared.write_cells, k, v)
        else:
            _write_runs(pool, prepared.writes, k, v)
        if prepared.exact_writes:
            assert isinstance(pool, ExactPool)
            _write_runs(pool.exact, prepared.exact_writes, k, v)
        self.steps.wrote(layer)


def _flat(position: Positions) -> list[int] | None:
    if position is None:
        return None
    given = np.asarray(position)
    if given.ndim > 2 or (given.ndim == 2 and given.shape[1] != 1):
        raise ShapeError(f"position is [T] or [T, 1], one int per token; got {given.shape}")
    positions: list[int] = given.reshape(-1).tolist()
    return positions


def _write_runs(pool: Pool, writes: Sequence[Write], k: mx.array, v: mx.array) -> None:
    if len(writes) == 1 and writes[0].run.length == k.shape[2]:
        pool.write_run(writes[0].run.start, k, v)
        return
    for q_start, run in writes:
        stop = q_start + run.length
        pool.write_run(run.start, k[:, :, q_start:stop], v[:, :, q_start:stop])


def _one_run(plan: StepPlan) -> tuple[int, Run, str | None] | None:
    """Return what a hand-written contiguous cache would do, where the plan says no more."""
    if len(plan.writes) > 1 or len(plan.reads) > 1:
        return None
    (read,) = plan.reads
    if len(read.runs) > 1 or read.kind is AttendKind.EXPLICIT:
        return None
    mask = "causal" if read.kind is AttendKind.CAUSAL else None
    return plan.writes[0].run.start, read.runs[0], mask


def _read(spec: AttendSpec) -> Read:
    """Long runs by themselves, short neighbours in one gather; exact cells never with others."""
    parts: list[PartRead] = []
    short: list[Run] = []

    def flush() -> None:
        if len(short) == 1:
            parts.append(PartRead(short[0], None))
        elif short:
            parts.append(PartRead(None, mx.array(cells_of(short))))
        short.clear()

    for run in spec.runs:
        if run.length >= LONG_RUN or run.start >= BASE:
            flush()
            parts.append(PartRead(run, None))
        else:
            short.append(run)
    flush()
    mask = None if spec.mask is None else mx.array(spec.mask)
    return Read(spec.q_start, spec.q_len, tuple(parts), spec.kind, mask)


def _fetch(pool: Pool, read: PartRead) -> Part:
    if read.run is not None:
        return pool.read(read.run.start, read.run.length)
    assert read.cells is not None
    return pool.gather(read.cells)


class MlxContiguousCache(MlxCache, OneSequence):
    """One sequence in one run: the single-stream hot path."""

    def __init__(self, config: CacheConfig, *, reads: ReadsOf = reads_of) -> None:
        """Create an empty cache; ``reads`` as in :class:`OneSequence`."""
        MlxCache.__init__(self, MlxPools(config))
        OneSequence.__init__(self, config, self.pools, reads=reads)


class MlxSeqCache(MlxCache, Sequences):
    """Many sequences over shared cells."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        MlxCache.__init__(self, MlxPools(config))
        Sequences.__init__(self, config, self.pools)


class MlxPagedCache(MlxCache, TreeSequences):
    """Many sequences over shared blocks, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache, each layer's blocks together.

        Raises:
            ConfigError: the layout has all layers in one array. A layer's write could not be in
                place then: reads of the layers before it, in the same forward, hold the array.
        """
        if config.layout != "layer_first":
            raise ConfigError(
                f"backend mlx keeps each layer's blocks in arrays of their own, and layout "
                f"{config.layout!r} has them in one for all layers; choose layer_first"
            )
        MlxCache.__init__(self, MlxPools(config))
        TreeSequences.__init__(self, config, self.pools, block_size=config.block_size)


class MlxTreeCache(MlxCache, TreeSequences):
    """Many sequences over shared cells, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        MlxCache.__init__(self, MlxPools(config))
        TreeSequences.__init__(self, config, self.pools)

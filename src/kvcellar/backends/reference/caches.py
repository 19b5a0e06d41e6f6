"""The reference caches: bookkeeping plus NumPy pools, and attention over what the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvcellar.backends.reference.attend import FloatArray, attend, visible
from kvcellar.backends.reference.pools import (
    BlockFirstPool,
    ExactPool,
    FrozenRows,
    GroupBlocks,
    Pool,
    from_bfloat16_bits,
    to_bfloat16_bits,
)
from kvcellar.backends.reference.state_pools import StatePools, States
from kvcellar.backends.shapes import check_shapes
from kvcellar.bookkeeping import OneSequence, Sequences, Steps, TreeSequences
from kvcellar.bookkeeping.cells.exact import exact_cells, layer_plan
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import ConfigError, ShapeError
from kvcellar.states import StatePlan
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    BoolArray,
    IntArray,
    LayerGroup,
    Run,
    StepPlan,
    Write,
    runs_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive query tokens of one sequence, and the K and V that they attend.

    Attributes:
        q_start: index of the first query token in the flat batch.
        q_len: how many.
        k: ``[n_kv_heads, read_len, head_dim]``, float64 with the stored values.
        v: ``[n_kv_heads, read_len, v_head_dim]``, likewise.
        kind: how the queries see the read, see :class:`AttendKind`.
        mask: ``[q_len, n_masked]`` for EXPLICIT, else None.
    """

    q_start: int
    q_len: int
    k: FloatArray
    v: FloatArray
    kind: AttendKind
    mask: BoolArray | None


class ReferencePools:
    """The bytes of every layer: the port that the bookkeeping moves cells by."""

    def __init__(self, config: CacheConfig, *, in_blocks: bool = False) -> None:
        """Create pools without cells.

        Args:
            config: groups, capacity, storage types.
            in_blocks: cells come in blocks, which ``config.layout`` says how to lay out.
        """
        self.groups = config.params.groups
        self.exact = [exact_cells(group, config.kv) for group in self.groups]
        block_first = in_blocks and config.layout == "block_first"
        found: dict[int, Pool | BlockFirstPool | ExactPool] = {}
        for group, exact in zip(self.groups, self.exact, strict=True):
            blocks = GroupBlocks(group, config) if block_first else None
            for i, layer in enumerate(group.layers):
                pool = BlockFirstPool(blocks, i) if blocks else _pool(group, config)
                found[layer] = ExactPool(pool, group, exact.n_cells) if exact else pool
        self._stored = list(found.values())
        state = config.params.state
        self.states = None if state is None else StatePools(state, config)
        self.of_layer = [found[source] for source in config.params.sources]
        self._frozen = () if config.prefix is None else config.prefix.layers
        if not all(isinstance(rows, FrozenRows) for rows in self._frozen):
            raise ConfigError(
                "the prefix was frozen in a cache of another backend; freeze it in one of reference"
            )

    def read(self, layer: int, run: Run) -> tuple[FloatArray, FloatArray]:
        """Return K and V of a run of cells, or of frozen rows, of one layer."""
        if run.start >= FROZEN:
            frozen: FrozenRows = self._frozen[layer]
            return frozen.read(run.start - FROZEN, run.length)
        return self.of_layer[layer].read(*run)

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated."""
        of_states = 0 if self.states is None else self.states.size_bytes
        return of_states + sum(pool.size_bytes for pool in self._stored)

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells`` to ``[base, base + len)`` in every pool of the group."""
        exact = self.exact[group]
        copies = None if exact is None else exact.move(base, src_cells)
        for layer in self.groups[group].layers:
            pool = self.of_layer[layer]
            pool.ensure(base + len(src_cells))
            pool.gather_into(base, src_cells)
            if copies is not None:
                assert isinstance(pool, ExactPool)
                pool.move_exact(*copies)


class ReferenceCache:
    """Cache of NumPy arrays: writes, reads and attention, as the steps plan them.

    Always holds: a call that raises one of kvcellar's errors has written nothing.
    """

    steps: Steps
    pools: ReferencePools

    def update_and_attend(
        self,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        position: ArrayLike,
        layer_id: int,
        scale: float,
        out_dtype: DTypeLike | str,
        sinks: FloatArray | None = None,
    ) -> NDArray[Any]:
        """Store K and V and attend, as ``kvcellar.op.eager_update_and_attend``, in float64.

        ``out_dtype`` is a NumPy dtype, or "bfloat16": float32 that holds rounded values.
        """
        group = self._layer_group(layer_id)
        check_shapes(layer_id, group, k.shape, v.shape, q.shape)
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise ShapeError(f"sinks are {list(sinks.shape)}; {q.shape[1]} heads need as many")
        segments = self.update_and_fetch(layer_id, position, k, v)
        out = np.empty((*q.shape[1:3], group.v_head_dim), dtype=np.float64)
        for s in segments:
            rows = slice(s.q_start, s.q_start + s.q_len)
            seen = visible(s.kind, s.mask, s.q_len, s.k.shape[1])
            keys = np.concatenate([s.v, s.k], axis=2) if group.is_latent else s.k
            out[:, rows] = attend(q[0, :, rows], keys, s.v, seen, scale, group.softcap, sinks)
        if isinstance(out_dtype, str) and out_dtype == "bfloat16":
            return from_bfloat16_bits(to_bfloat16_bits(out))[None]
        return out[None].astype(out_dtype)

    def update_and_fetch(
        self, layer: int, position: ArrayLike, k: FloatArray, v: FloatArray
    ) -> list[Segment]:
        """Store one layer's K and V and return what its queries read, this step included.

        Args:
            layer: layer id.
            position: one int per token, ``[n_tok]`` or ``[n_tok, 1]``.
            k: ``[1, n_kv_heads, n_tok, head_dim]``.
            v: ``[1, n_kv_heads, n_tok, v_head_dim]``.

        Raises:
            ShapeError, StepError, PositionError, CacheFullError: see ``update_and_attend``.
        """
        check_shapes(layer, self._layer_group(layer), k.shape, v.shape, None)
        n_tokens = k.shape[2]
        plan = self.steps.plan(layer, n_tokens, _flat_positions(position, n_tokens))
        exact = self.pools.exact[self.steps.group_of(layer)]
        own, exact_writes = layer_plan(plan, exact)
        if self.steps.stores(layer):
            self._write(self.pools.of_layer[layer], plan, exact_writes, k, v)
        self.steps.wrote(layer)
        return [_segment(self.pools, layer, spec) for spec in own.reads]

    def _write(
        self,
        pool: Pool | BlockFirstPool | ExactPool,
        plan: StepPlan,
        exact_writes: Sequence[Write],
        k: FloatArray,
        v: FloatArray,
    ) -> None:
        """Store a forward's K and V of one layer."""
        pool.ensure(plan.n_cells)
        if len(plan.writes) == 1:
            pool.write_run(plan.writes[0].run.start, k[0], v[0])
        else:
            pool.scatter_rows(plan.write_cells, k[0], v[0])
        for q_start, run in exact_writes:
            assert isinstance(pool, ExactPool)
            tokens = slice(q_start, q_start + run.length)
            pool.exact.write_run(run.start, k[0, :, tokens], v[0, :, tokens])

    def plan_states(self, layer: int, n_tokens: int, position: ArrayLike) -> StatePlan:
        """Return what a recurrent layer reads and writes in this forward; the pools hold it all.

        Raises:
            StepError, PositionError, CacheFullError: see ``Steps.plan_states``.
        """
        plan = self.steps.plan_states(layer, n_tokens, _flat_positions(position, n_tokens))
        self._states.ensure(plan.n_slots)
        return plan

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer has stored its states; after the last, tokens count."""
        self.steps.wrote_states(layer)

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

    def freeze_rows(self, cells: Sequence[IntArray]) -> list[FrozenRows]:
        """Copy the rows of some cells, given per layer group, for a frozen prefix: by layer."""
        found = {
            layer: FrozenRows(*_joined(self.pools, layer, runs_of(part)))
            for group, part in zip(self.steps.groups, cells, strict=True)
            for layer in group.layers
        }
        return [found[source] for source in self.steps.config.params.sources]

    def _layer_group(self, layer: int) -> LayerGroup:
        return self.steps.groups[self.steps.group_of(layer)]


class ReferenceContiguousCache(ReferenceCache, OneSequence):
    """One sequence, contiguous."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        self.pools = ReferencePools(config)
        super().__init__(config, self.pools)


class ReferenceSeqCache(ReferenceCache, Sequences):
    """Many sequences over shared cells."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        self.pools = ReferencePools(config)
        super().__init__(config, self.pools)


class ReferencePagedCache(ReferenceCache, TreeSequences):
    """Many sequences over shared blocks, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache, laid out as the config says."""
        self.pools = ReferencePools(config, in_blocks=True)
        super().__init__(config, self.pools, block_size=config.block_size)


class ReferenceTreeCache(ReferenceCache, TreeSequences):
    """Many sequences over shared cells, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        self.pools = ReferencePools(config)
        super().__init__(config, self.pools)


def _pool(group: LayerGroup, config: CacheConfig) -> Pool:
    """Create one layer's pool, without cells."""
    return Pool(
        group.n_kv_heads,
        group.head_dim,
        group.v_head_dim,
        capacity=config.capacity,
        kv_dtype=config.kv_dtype,
        min_chunk=config.pool_chunk,
    )


def _segment(pools: ReferencePools, layer: int, spec: AttendSpec) -> Segment:
    """Return the read of one spec: its runs one after the other."""
    k, v = _joined(pools, layer, spec.runs)
    return Segment(spec.q_start, spec.q_len, k, v, spec.kind, spec.mask)


def _joined(
    pools: ReferencePools, layer: int, runs: Sequence[Run]
) -> tuple[FloatArray, FloatArray]:
    """Return K ``[n_kv_heads, n, head_dim]`` and V of some runs, one after the other."""
    parts = [pools.read(layer, run) for run in runs or (Run(0, 0),)]
    k = np.concatenate([k for k, _ in parts], axis=1)
    v = np.concatenate([v for _, v in parts], axis=1)
    return k, v


def _flat_positions(position: ArrayLike, n_tokens: int) -> IntArray:
    """Return positions ``[n_tok]`` out of ``[n_tok]`` or ``[n_tok, 1]``."""
    given = np.asarray(position)
    if given.shape not in ((n_tokens,), (n_tokens, 1)):
        raise ShapeError(
            f"position is {list(given.shape)}; {n_tokens} tokens need [{n_tokens}] or "
            f"[{n_tokens}, 1]"
        )
    return given.reshape(n_tokens).astype(np.int64)

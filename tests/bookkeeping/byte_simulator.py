"""Bookkeeping with bytes to lose: every cell of every layer stores the id of the token it holds.

The oracle of the whole integer layer. A forward writes token ids where the plan says, moves them
where the bookkeeping says, and expands every read into the ids that each query sees; `visible`
says what it should see, from a plain dict of one sequence's history. Nothing else is trusted.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvcellar.bookkeeping import BlockPool, OneSequence, Sequences, Steps, TreeSequences
from kvcellar.bookkeeping.cells.pool import CellMove
from kvcellar.bookkeeping.layouts.reads import TILE
from kvcellar.cache_config import FROZEN, CacheConfig, SharedPrefix
from kvcellar.sight import Sight
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    IntArray,
    LayerGroup,
    ModelCacheParams,
    StepPlan,
    cells_of,
)

Seen = list[list[int]]
"""Per query token, the ids that it sees, sorted; an id that is seen twice is there twice."""


Window = int | Sight | None
"""What a query sees: all, so many of the last positions, or its chunk."""


def config_of(
    windows: Sequence[Window] = (None,),
    capacity: int = 64,
    slack: int = 0,
    min_chunk: int = 8,
) -> CacheConfig:
    """A config with one layer group per window; the first group has a second layer, the last."""
    n = len(windows)
    sights = [sight_of(window) for window in windows]
    groups = tuple(
        LayerGroup((i, n) if i == 0 else (i,), 1, 1, 1, sight.window, chunk=sight.chunk)
        for i, sight in enumerate(sights)
    )
    params = ModelCacheParams(n + 1, 1, 1, 1, groups)
    return CacheConfig(params, capacity, "float32", min_chunk=min_chunk, window_slack=slack)


def behind_frozen(config: CacheConfig, length: int) -> CacheConfig:
    """Return this config with ``length`` frozen tokens at the start of every sequence."""
    firsts = tuple(group.first_seen(length) for group in config.params.groups)
    prefix = SharedPrefix(config.params, config.kv_dtype, length, firsts, (), 0)
    return replace(config, prefix=prefix)


def frozen_id(position: int) -> int:
    """The id of the frozen token at a position: no other token has it."""
    return -1000 - position


def sight_of(window: Window) -> Sight:
    """The sight of a group with this window."""
    return window if isinstance(window, Sight) else Sight(window=window)


def first_seen(window: Window, position: int) -> int:
    """The visibility rule: the first position that a query at ``position`` sees."""
    if isinstance(window, Sight):
        if window.chunk is not None:
            return position // window.chunk * window.chunk
        window = window.window
    return 0 if window is None else max(0, position - window + 1)


def visible(history: Mapping[int, int], position: int, window: Window) -> list[int]:
    """The tokens of a history that a query at ``position`` sees, sorted."""
    low = first_seen(window, position)
    return sorted(token for p, token in history.items() if low <= p <= position)


def seen_by(spec: AttendSpec, stored: IntArray, first_frozen: int = 0) -> Seen:
    """What each query of a read sees, by the words of `AttendKind`."""
    ids = [
        int(stored[cell]) if cell < FROZEN else frozen_id(first_frozen + cell - FROZEN)
        for cell in cells_of(spec.runs).tolist()
    ]
    rows: Seen = []
    for i in range(spec.q_len):
        if spec.kind is AttendKind.NONE:
            row = ids
        elif spec.kind is AttendKind.CAUSAL:
            row = ids[: len(ids) - spec.q_len + i + 1]
        else:
            assert spec.mask is not None
            n_whole = len(ids) - spec.mask.shape[1]
            row = ids[:n_whole] + [
                t for t, sees in zip(ids[n_whole:], spec.mask[i], strict=True) if sees
            ]
        rows.append(sorted(row))
    return rows


def check_plan(plan: StepPlan, n_tokens: int, group: LayerGroup, capacity: int) -> None:
    """A plan is well formed: in order, nothing twice, nothing outside, no mask for nothing."""
    assert plan.n_tokens == n_tokens
    assert [w.q_start for w in plan.writes] == _starts([w.run.length for w in plan.writes])
    assert [r.q_start for r in plan.reads] == _starts([r.q_len for r in plan.reads])
    assert sum(w.run.length for w in plan.writes) == n_tokens == sum(r.q_len for r in plan.reads)
    assert len(set(plan.write_cells.tolist())) == n_tokens
    assert plan.n_cells <= capacity
    for run in [w.run for w in plan.writes] + [run for r in plan.reads for run in r.runs]:
        assert run.length >= 1
        assert (run.start >= 0 and run.stop <= plan.n_cells) or run.start >= FROZEN
    for read in plan.reads:
        cells = cells_of(read.runs).tolist()
        assert len(set(cells)) == len(cells) == read.read_len >= 1
        assert all(a.stop != b.start for a, b in pairwise(read.runs)), "runs are joined"
        if read.kind is AttendKind.EXPLICIT:
            assert read.mask is not None and read.mask.dtype == np.bool_
            assert read.mask.shape[0] == read.q_len and read.mask.shape[1] <= len(cells)
        else:
            assert read.mask is None
        if read.kind is AttendKind.CAUSAL:
            assert 1 < read.q_len <= len(cells)


def check_causal_masks(reads: Sequence[AttendSpec], window: Window) -> None:
    """Outside of trees: no mask but for a window, and then never more than a tile's."""
    for read in reads:
        if window is None or isinstance(window, Sight):
            assert read.mask is None
            assert window is None or read.read_len <= window.chunk
        elif read.mask is not None:
            assert read.mask.shape[0] <= TILE
            assert read.mask.shape[1] <= window + TILE
            assert read.read_len <= window + TILE


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


class TokenIds:
    """The port to bytes: ``stored[layer][cell]`` is the token id there."""

    size_bytes = 0

    def __init__(self, config: CacheConfig) -> None:
        self.groups = config.params.groups
        n_layers = config.params.n_layers
        self.stored = [np.full(config.capacity, -1, dtype=np.int64) for _ in range(n_layers)]
        self.fails_after: int | None = None  # moves, until one fails as a full device does

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        assert len(set(src_cells.tolist())) == len(src_cells)
        if self.fails_after is not None:
            if not self.fails_after:
                raise MemoryError
            self.fails_after -= 1
        for layer in self.groups[group].layers:
            moved = self.stored[layer][src_cells].copy()
            self.stored[layer][base : base + len(src_cells)] = moved


class ByteSimulator:
    """A bookkeeping's forwards over token ids: mixed in before its class."""

    steps: Steps
    ids: TokenIds

    @property
    def stored(self) -> list[IntArray]:
        return self.ids.stored

    @property
    def groups(self) -> Sequence[LayerGroup]:
        return self.steps.groups

    @property
    def n_layers(self) -> int:
        return self.steps.n_layers

    @property
    def cells(self) -> list[BlockPool]:
        return [layout.pool for layout in self.layouts]

    @property
    def plans(self) -> Sequence[StepPlan]:
        """The plans of the open step."""
        return self.steps._open.plans

    def group_of(self, layer: int) -> int:
        return self.steps.group_of(layer)

    def plan(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> StepPlan:
        return self.steps.plan(layer, n_tokens, positions)

    def take_plan(self, layer: int, plan: StepPlan) -> bool:
        return self.steps.take_plan(layer, plan)

    def wrote(self, layer: int) -> None:
        self.steps.wrote(layer)

    def needs_positions(self) -> bool:
        return self.steps.needs_positions()

    def run_layer(
        self, layer: int, tokens: Sequence[int], positions: Sequence[int] | None = None
    ) -> Seen:
        """One layer of a forward: write the token ids, return what every query sees."""
        plan = self.plan(layer, len(tokens), positions)
        check_plan(plan, len(tokens), self.groups[self.group_of(layer)], self.capacity)
        stored = self.stored[layer]
        for write in plan.writes:
            ids = tokens[write.q_start : write.q_start + write.run.length]
            stored[write.run.start : write.run.stop] = ids
        prefix = self.config.prefix
        first = 0 if prefix is None else prefix.firsts[self.group_of(layer)]
        seen = [row for spec in plan.reads for row in seen_by(spec, stored, first)]
        self.wrote(layer)
        return seen

    def forward(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> list[Seen]:
        """All layers; per layer, what every query sees."""
        return [self.run_layer(layer, tokens, positions) for layer in range(self.n_layers)]

    def layer_windows(self) -> list[Window]:
        """The window of every layer."""
        groups = [self.groups[self.group_of(layer)] for layer in range(self.n_layers)]
        return [group.window if group.chunk is None else group.sight for group in groups]


class SimulatedContiguous(ByteSimulator, OneSequence):
    """A contiguous cache of token ids."""

    def __init__(self, config: CacheConfig) -> None:
        self.ids = TokenIds(config)
        super().__init__(config, self.ids)


class SimulatedSeq(ByteSimulator, Sequences):
    """A cache of many sequences, of token ids."""

    def __init__(self, config: CacheConfig) -> None:
        self.ids = TokenIds(config)
        super().__init__(config, self.ids)


class SimulatedPaged(ByteSimulator, TreeSequences):
    """A cache of many sequences in blocks, of token ids."""

    def __init__(self, config: CacheConfig) -> None:
        self.ids = TokenIds(config)
        super().__init__(config, self.ids, block_size=config.block_size)


class SimulatedTree(ByteSimulator, TreeSequences):
    """A cache of sequences with draft trees, of token ids."""

    def __init__(self, config: CacheConfig) -> None:
        self.ids = TokenIds(config)
        super().__init__(config, self.ids)


def cp(pool: BlockPool, src: int, dst: int, p0: int = 0, p1: int | None = None) -> list[CellMove]:
    """Share what ``src`` holds, as a cache does once it has the blocks to join parts in."""
    return pool.share(dst, pool.shareable(src, dst, p0, p1))


def snapshot(thing: Any) -> Any:
    """All state below an object as nested tuples: equal exactly when nothing was changed."""
    if isinstance(thing, np.ndarray):
        return (str(thing.dtype), thing.tolist())
    if isinstance(thing, enum.Enum | str | int | float | bool | None):
        return thing
    if isinstance(thing, Mapping):
        return tuple((key, snapshot(value)) for key, value in thing.items())
    if isinstance(thing, list | tuple | bytearray):
        return tuple(snapshot(value) for value in thing)
    if is_dataclass(thing):
        return (type(thing).__name__, *(snapshot(getattr(thing, f.name)) for f in fields(thing)))
    names = getattr(thing, "__slots__", None) or vars(thing)
    return (type(thing).__name__, *((name, snapshot(getattr(thing, name))) for name in names))


def settled(cache: ByteSimulator) -> Any:
    """A copy of a cache as the next verb finds it: its last step accepted, or undone."""
    twin = copy.deepcopy(cache)
    twin.end_step()
    return twin

"""Map of the owners of every cell at one moment, for those who want to see it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.prefix import key_of
from kvcellar.space import Space
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.engine.schedule.scheduler import Scheduler


class CellState(enum.IntEnum):
    """Holders of a cell or slot: nobody, the index alone, a lock on it, or a running request."""

    FREE = 0
    EVICTABLE = 1
    LOCKED = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, eq=False)
class CellMap:
    """The cells of the first layer group, and the slots of recurrent layers' states.

    Attributes:
        states: ``[capacity]``: the :class:`CellState` of every cell.
        tables: per history the cells that hold its tokens, in the order of positions.
        slots: ``[n_slots]``: the :class:`CellState` of every slot; none without recurrent layers.
        snapshots: per history ``[n, 2]``: the lengths at which its states are held, ascending, and
            in which slot.
    """

    states: IntArray
    tables: list[IntArray]
    slots: IntArray
    snapshots: list[IntArray]


def map_cells(
    scheduler: Scheduler, histories: Iterable[tuple[IntArray, int | None, Space]]
) -> CellMap:
    """Return the states of all cells and the cells of some histories; see ``Engine.cell_map``."""
    cache, index = scheduler.residency.cache, scheduler.residency.index
    has_states = cache.config.params.state is not None
    running: dict[int | None, tuple[IntArray, ...]] = {
        one.request_id: cache.seq_table(one.seq_id) for one in scheduler.running if one.n_computed
    }
    states = np.full(cache.capacity, CellState.FREE, dtype=np.int64)
    slots = np.full(cache.config.n_slots * has_states, CellState.FREE, dtype=np.int64)
    held = index.held_cells()
    states[held[0]] = CellState.EVICTABLE
    states[index.locked_cells()[0]] = CellState.LOCKED
    if has_states:  # a lock on a path protects its rows alone
        slots[held[-1]] = CellState.EVICTABLE
        slots[cache.shared_slots()] = CellState.LOCKED
    for table in running.values():
        states[_taken(table[0])] = CellState.RUNNING
        if has_states:
            slots[_taken(table[-1])] = CellState.RUNNING
    _mark_blocks(states, cache.block_size)
    found = [
        (running.get(request), index.peek_prefix(key_of(tokens, space)))
        for tokens, request, space in histories
    ]
    tables = [_taken((own or stored)[0]) for own, stored in found]
    snapshots = [_snapshots(own, stored, has_states) for own, stored in found]
    return CellMap(states, tables, slots, snapshots)


def _snapshots(
    own: tuple[IntArray, ...] | None, stored: tuple[IntArray, ...], has_states: bool
) -> IntArray:
    """Return where a history's states are held, by its sequence or by the index: ``[n, 2]``."""
    table = np.empty(0, dtype=np.int64)
    if has_states:
        table = stored[-1].copy()
        if own is not None:
            table = np.pad(table, (0, max(0, len(own[-1]) - len(table))), constant_values=-1)
            there = np.flatnonzero(own[-1] >= 0)
            table[there] = own[-1][there]
    positions = np.flatnonzero(table >= 0)
    return np.stack((positions + 1, table[positions]), axis=1)


def _mark_blocks(states: IntArray, block_size: int) -> None:
    """Give the cells that nobody holds in a block the state of the block: it goes as a whole."""
    blocks = states[: states.size - states.size % block_size].reshape(-1, block_size)
    np.maximum(blocks, blocks.max(axis=1, keepdims=True) * (blocks == CellState.FREE), out=blocks)


def _taken(table: IntArray) -> IntArray:
    return table[table >= 0]

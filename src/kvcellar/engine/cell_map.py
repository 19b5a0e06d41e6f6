"""Map of the owners of every cell at one moment, for those who want to see it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.engine.scheduler import Scheduler


class CellState(enum.IntEnum):
    """Holders of a cell: nobody, the prefix index alone, a lock on it, or a running request."""

    FREE = 0
    EVICTABLE = 1
    LOCKED = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, eq=False)
class CellMap:
    """The cells of the first layer group.

    Attributes:
        states: ``[capacity]``: the :class:`CellState` of every cell.
        tables: per history the cells that hold its tokens, in the order of positions.
    """

    states: IntArray
    tables: list[IntArray]


def map_cells(scheduler: Scheduler, histories: Iterable[tuple[IntArray, int | None]]) -> CellMap:
    """Return the states of all cells and the cells of some histories; see ``Engine.cell_map``."""
    cache, index = scheduler.residency.cache, scheduler.residency.index
    states = np.full(cache.capacity, CellState.FREE, dtype=np.int64)
    states[index.held_cells()[0]] = CellState.EVICTABLE
    states[index.locked_cells()[0]] = CellState.LOCKED
    running: dict[int | None, IntArray] = {}
    for sequence in scheduler.running:
        if sequence.n_computed:
            cells = _taken(cache.seq_table(sequence.seq_id)[0])
            states[cells] = CellState.RUNNING
            running[sequence.request_id] = cells
    _mark_blocks(states, cache.block_size)
    tables = [
        running[request_id] if request_id in running else _taken(index.peek_prefix(tokens)[0])
        for tokens, request_id in histories
    ]
    return CellMap(states, tables)


def _mark_blocks(states: IntArray, block_size: int) -> None:
    """Give the cells that nobody holds in a block the state of the block: it goes as a whole."""
    blocks = states[: states.size - states.size % block_size].reshape(-1, block_size)
    np.maximum(blocks, blocks.max(axis=1, keepdims=True) * (blocks == CellState.FREE), out=blocks)


def _taken(table: IntArray) -> IntArray:
    return table[table >= 0]

"""The naive index: nothing is stored, and every prompt is computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvcellar.bookkeeping.cells.compaction import Relocation
from kvcellar.errors import CacheFullError
from kvcellar.prefix.nodes import PathNode, Tokens, check_sights
from kvcellar.prefix.protocol import Evicted, Inserted, PrefixHandle, PrefixMatch, SizeInfo
from kvcellar.sight import FULL, Sight
from kvcellar.types import IntArray


class NaiveIndex:
    """Stores nothing and never finds anything: every prompt is computed."""

    def __init__(self, sights: Sequence[Sight] = (FULL,)) -> None:
        """Create an index for so many layer groups.

        Raises:
            ConfigError: no sights.
        """
        self.sights = check_sights(sights)
        self.block_size = 1

    @property
    def n_snapshots(self) -> int:
        """Return 0: no snapshot is stored."""
        return 0

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """Return a match of no tokens."""
        return PrefixMatch(0, self.held_cells(), PrefixHandle(0, None), 0)

    def find_prefix(self, tokens: Tokens) -> PrefixHandle:
        """Return a handle of no tokens."""
        return PrefixHandle(0, None)

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Return no cells, per layer group."""
        return self.held_cells()

    def lock_handle(self, handle: PrefixHandle) -> None:
        """Do nothing: no cell is held that a lock could protect."""

    def unlock_handle(self, handle: PrefixHandle) -> None:
        """Do nothing, as ``lock_handle``."""

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Adopt nothing."""
        return Inserted(0, PrefixHandle(0, None), self.held_cells())

    def evict(self, n_tokens: int) -> Evicted:
        """Give up nothing.

        Raises:
            CacheFullError: any tokens were asked for.
        """
        if n_tokens > 0:
            raise CacheFullError(
                f"asked to evict {n_tokens} tokens, 0 evictable of 0 stored: this index is naive; "
                f"end a sequence or ask for less"
            )
        return Evicted(0, self.held_cells())

    def evict_states(self, n_slots: int, held: Collection[int] = ()) -> Evicted:
        """Give up nothing: no snapshot is stored."""
        return Evicted(0, self.held_cells())

    def states_costs(self, n_slots: int, late: Collection[int], own: int) -> list[int]:
        """Return no costs: no snapshot is stored."""
        return []

    def demote(self, handle: PrefixHandle) -> None:
        """Do nothing: no history is stored."""

    def drop_path(self, handle: PrefixHandle, keep: int = 0) -> Evicted:
        """Give up nothing: no history is stored."""
        return Evicted(0, self.held_cells())

    def chains(self) -> list[IntArray]:
        """Return no stretches."""
        return []

    def by_use(self) -> Iterator[PathNode]:
        """Yield nothing."""
        return iter(())

    def relocate(self, moved: Relocation) -> None:
        """Do nothing: no cell is held."""

    def size_info(self) -> SizeInfo:
        """Return zeros."""
        return SizeInfo(0, 0, (0,) * len(self.sights))

    def held_cells(self) -> tuple[IntArray, ...]:
        """Return no cells, per layer group."""
        return tuple(_NONE.copy() for _ in self.sights)

    def locked_cells(self) -> tuple[IntArray, ...]:
        """Return no cells, per layer group."""
        return self.held_cells()

    def reset(self) -> tuple[IntArray, ...]:
        """Return no cells to release: nothing was stored."""
        return self.held_cells()

    def check(self) -> None:
        """Assert nothing: there is no state."""


_NONE: IntArray = np.empty(0, dtype=np.int64)

"""Room for a step: cells in every layer group, and where there is a budget, by its grants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from kvcellar.bookkeeping.growth import Growth
from kvcellar.bookkeeping.layout import Demand
from kvcellar.bookkeeping.pool import MAX_GAP, Appends
from kvcellar.bookkeeping.rows import Rows
from kvcellar.bookkeeping.spans import Span
from kvcellar.errors import CacheFullError
from kvcellar.types import CacheConfig

NOTHING: Appends = {}


class Room:
    """What is free in the layouts of a cache, for all of its sequences together.

    Cells are given by all layer groups or by none. Tokens that were *promised* cells, the proposed
    nodes that await their forward, find them: nobody else is given those.
    """

    def __init__(
        self,
        config: CacheConfig,
        layouts: Sequence[Rows],
        lengths: Mapping[int, int],
        growth: Growth | None,
    ) -> None:
        """Create the room of a cache.

        Args:
            config: the cache's.
            layouts: per layer group.
            lengths: the sequences' lengths.
            growth: what asks the memory budget; None where there is none.
        """
        self._config = config
        self._layouts = layouts
        self._lengths = lengths
        self.growth = growth

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence may have: cells, or what a memory budget holds."""
        if self.growth is not None:
            return self.growth.n_fitting
        return min(layout.pool.capacity for layout in self._layouts)

    def n_held(self, group: int) -> int | None:
        """Return the cells that a group's pools must hold by a grant; None where none is needed."""
        return None if self.growth is None else self.growth.sizes[group]

    def can_extend(self, n: int, promised: Appends = NOTHING) -> bool:
        """Return true if any one sequence could grow by ``n`` tokens besides what is promised."""
        if self.growth is None:
            return all(layout.n_missing(n, promised) <= 0 for layout in self._layouts)
        wanted = zip(self._layouts, self.growth.cells_for(n), strict=True)
        return self.growth.can_add([layout.n_missing(cells, promised) for layout, cells in wanted])

    def n_free(self, promised: Appends = NOTHING) -> int:
        """Return the most tokens by which any one sequence could grow."""
        there = min(layout.n_fitting(promised) for layout in self._layouts)
        if self.growth is None:
            return there
        sure = [layout.n_sure(promised) for layout in self._layouts]
        return max(there, self.growth.most_tokens(sure))

    def fits(self, appends: Appends) -> bool:
        """Return true if these sequences could grow so, all of them together."""
        missing = [_missing(demand) for demand in self.demands(appends)]
        if self.growth is not None:
            return self.growth.can_add(missing)
        return all(n <= 0 for n in missing)

    def demands(self, appends: Appends) -> list[Demand]:
        """Return what it takes to grow these sequences, all of them together, per layer group."""
        return [layout.demand(appends) for layout in self._layouts]

    def take(
        self, who: str, demands: Callable[[], list[Demand]], promised: Appends = NOTHING
    ) -> None:
        """Have room for what is asked of every group, or change nothing.

        Windows let go of what they have passed where that is needed.

        Args:
            who: asks, for the message.
            demands: tells what is asked, per layer group; called again when cells were granted.
            promised: what the demands contain for others.

        Raises:
            CacheFullError: too few cells are free; nothing was changed.
        """
        asked = demands()
        if self.growth is None:
            for demand in asked:
                if demand.n_needed > demand.n_free:
                    self._refuse(who, asked, promised)
        elif not self._grow(self.growth, asked):
            self._refuse(who, asked, promised)
        elif any(demand.must_let_go for demand in asked):
            asked = demands()
        for layout, demand in zip(self._layouts, asked, strict=True):
            if demand.must_let_go:
                for seq_id in self._lengths:
                    layout.let_go(seq_id, batch=1)

    def join(self, seq_id: int, parts: Sequence[list[Span]]) -> None:
        """Have room for the copies that join parts of blocks, where a sequence is to hold them.

        Args:
            seq_id: the sequence.
            parts: what it lacks, per layer group.

        Raises:
            CacheFullError: too few blocks are free; nothing was changed.
        """
        n_cells = [
            layout.pool.block_size * layout.pool.n_joints(seq_id, part)
            for layout, part in zip(self._layouts, parts, strict=True)
        ]
        if not any(n_cells):
            return
        free = [layout.pool.n_free for layout in self._layouts]
        if self.growth is not None:
            self._grow(self.growth, list(map(Demand, n_cells, free)))
        for layout, n in zip(self._layouts, n_cells, strict=True):
            pool = layout.pool
            if n > pool.n_free:
                raise CacheFullError(
                    f"sequence {seq_id} would hold parts of different blocks at the same block of "
                    f"its table, which takes {n // pool.block_size} blocks to join, "
                    f"{pool.n_free_blocks} free of {pool.n_blocks}; release a sequence or "
                    f"{self._config.more_room}"
                )

    def check(self) -> None:
        """Assert the invariants of what was granted."""
        if self.growth is not None:
            self.growth.check()

    def _grow(self, growth: Growth, demands: Sequence[Demand]) -> bool:
        """Have missing cells granted, and some to place new ones well; false: refused.

        Where sequences share a pool, each wants room behind it to grow in place.
        """
        missing = [_missing(demand) for demand in demands]
        pools = [layout.pool for layout in self._layouts]
        wishes = [0] * len(missing)
        if len(self._lengths) > 1:
            wishes = [
                max(0, demand.n_needed + min(pool.n_taken // 2, MAX_GAP) - pool.n_free - max(0, n))
                for demand, pool, n in zip(demands, pools, missing, strict=True)
            ]
        if not growth.add(missing, wishes):
            return False
        for pool, size in zip(pools, growth.sizes, strict=True):
            pool.grant(size)
        return True

    def _refuse(self, who: str, demands: Sequence[Demand], promised: Appends) -> NoReturn:
        """Raise CacheFullError for the group that lacks most."""
        group = max(range(len(demands)), key=lambda index: _missing(demands[index]))
        layout, demand = self._layouts[group], demands[group]
        pool = layout.pool
        others = layout.demand(promised).n_needed if promised else 0
        needed, free = ((n - others) // pool.block_size for n in (demand.n_needed, demand.n_free))
        more = "free"
        if self.growth is not None:
            free, more = self.n_free(promised) // pool.block_size, "free or to be had"
        raise CacheFullError(
            f"{who} needs {pool.in_words(needed)}, {max(0, free)} {more} of "
            f"{self.capacity // pool.block_size}; release a sequence or {self._config.more_room}"
        )


def _missing(demand: Demand) -> int:
    """Return the cells that a demand lacks; 0 or less: it has them."""
    return demand.n_needed - demand.n_free

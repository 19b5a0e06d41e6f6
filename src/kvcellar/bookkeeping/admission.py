"""Room for a step: cells in every layer group, and where there is a budget, by its grants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from kvcellar.bookkeeping.cells.growth import Growth
from kvcellar.bookkeeping.cells.pool import Appends
from kvcellar.bookkeeping.layouts.layout import Demand, SharedLayout
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import CacheFullError

NOTHING: Appends = {}


class Room:
    """Admission: room in the layouts of a cache, for all of its sequences together.

    Cells are given by all layer groups or by none. Tokens that were *promised* cells, the proposed
    nodes that await their forward, find them: nobody else is given those.
    """

    def __init__(
        self,
        config: CacheConfig,
        layouts: Sequence[SharedLayout],
        lengths: Mapping[int, int],
        growth: Growth | None,
    ) -> None:
        """Create the room of a cache.

        Args:
            config: the cache's.
            layouts: per layer group, and the slots of states behind them.
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
        return min(layout.capacity for layout in self._layouts)

    def can_extend(self, n: int, promised: Appends = NOTHING) -> bool:
        """Return true if any one sequence could grow by ``n`` tokens besides what is promised."""
        if self.growth is None:
            return all(layout.n_missing(n, promised) <= 0 for layout in self._layouts)
        wanted = zip(self._layouts, self.growth.cells_for(n), strict=True)
        return self.growth.can_add([layout.n_missing(cells, promised) for layout, cells in wanted])

    def n_missing_slots(self, n: int, promised: Appends = NOTHING) -> int:
        """Return how many slots, cells of the last layout, are missing to take ``n`` besides."""
        n_missing = n - self._layouts[-1].n_sure(promised)
        if self.growth is None or n_missing <= 0:
            return n_missing
        rows = [0] * (len(self._layouts) - 1)
        return next(m for m in range(n_missing + 1) if self.growth.can_add([*rows, n_missing - m]))

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

    def join(self, seq_id: int, demands: Sequence[Demand]) -> None:
        """Have room for the copies that join parts of blocks, where a sequence is to hold them.

        Args:
            seq_id: the sequence.
            demands: what the copies take, per layer group.

        Raises:
            CacheFullError: too few blocks are free; nothing was changed.
        """
        if not any(demand.n_needed for demand in demands):
            return
        if self.growth is not None and self._grow(self.growth, demands):
            return
        for layout, demand in zip(self._layouts, demands, strict=True):
            if _missing(demand) > 0:
                needed, free = demand.n_needed // layout.unit, demand.n_free // layout.unit
                raise CacheFullError(
                    f"sequence {seq_id} would hold parts of different blocks at the same block of "
                    f"its table, which takes {needed} blocks to join, {free} free of "
                    f"{layout.usage().capacity // layout.unit}; release a sequence or "
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
        pairs = list(zip(self._layouts, demands, strict=True))
        wishes = [0] * len(demands)
        if len(self._lengths) > 1:
            wishes = [layout.n_to_place(demand) for layout, demand in pairs]
        if not growth.add(list(map(_missing, demands)), wishes):
            return False
        for layout, size in zip(self._layouts, growth.sizes, strict=True):
            layout.grant(size)
        return True

    def _refuse(self, who: str, demands: Sequence[Demand], promised: Appends) -> NoReturn:
        """Raise CacheFullError for the group that lacks most."""
        group = max(range(len(demands)), key=lambda index: _missing(demands[index]))
        layout, demand = self._layouts[group], demands[group]
        unit, most, more = layout.unit, layout.usage().capacity, "free"
        others = layout.demand(promised).n_needed if promised else 0
        needed, free = ((n - others) // unit for n in (demand.n_needed, demand.n_free))
        if group == len(self._config.params.groups):
            raise CacheFullError(
                f"{who} needs {layout.in_words(needed)}, {max(0, free)} free of {most}; release a "
                f"sequence or its points, let go of snapshots, or {self._more_slots}"
            )
        if self.growth is not None:
            free, most, more = self.n_free(promised) // unit, self.capacity, "free or to be had"
        raise CacheFullError(
            f"{who} needs {layout.in_words(needed)}, {max(0, free)} {more} of {most // unit}; "
            f"release a sequence or {self._config.more_room}"
        )

    @property
    def _more_slots(self) -> str:
        """The way out where slots are short, for messages."""
        growth = self.growth
        if growth is not None and growth.sizes[-1] < growth.limits[-1]:
            return self._config.more_room
        return f"raise n_slots ({self._config.n_slots})"


def _missing(demand: Demand) -> int:
    """Return the cells that a demand lacks; 0 or less: it has them."""
    return demand.n_needed - demand.n_free

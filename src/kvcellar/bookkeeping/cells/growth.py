"""Sizes of the pools of each layer group: doubled up to capacity, or granted by a memory budget.

Without a budget pools grow as they please, up to the capacity. With one the bookkeeping hands out
only cells whose bytes were granted, so a step that has its cells has room for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

from kvcellar.bookkeeping.cells.exact import exact_bytes
from kvcellar.bookkeeping.cells.pool import MIN_RUN
from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ConfigError
from kvcellar.types import LayerGroup

STEP_TOKENS = 512
"""Tokens of one forward that a window group gets room for besides its window."""

STEP_SLOTS = 2
"""Slots that one sequence takes in a step: one that is read, one that is written."""

SLOTS_SHARE = 2
"""Slots take one part in so many of a budget at most: memory that they have never goes to rows."""

ARRAY_BYTES = 16
"""What the bookkeeping's own arrays take per cell that a group could ever have."""

INDEX_BYTES = 32
"""What tables and a prefix index take per cell that is granted."""


def grown_size(n_cells: int, allocated: int, min_chunk: int, capacity: int) -> int:
    """Return the cells that a pool of ``allocated`` should hold so that ``n_cells`` fit.

    Doubles from ``min_chunk`` on, never past ``capacity``, never shrinks. A ``min_chunk`` of 0 is
    for pools whose bookkeeping has doubled already, and was granted these cells: exactly so many.
    """
    if not min_chunk:
        return max(n_cells, allocated)
    size = max(allocated, min(min_chunk, capacity))
    while size < n_cells:
        size *= 2
    return max(allocated, min(size, capacity))


class Growth:
    """The granted cells of one cache, by layer group. Integers only.

    Cells are granted to all groups together or not at all. The bytes go back to the budget when
    the cache is gone: pools never shrink. Where layers are recurrent, slots count as cells of one
    more group, the last, that keeps ``STEP_SLOTS`` of a sequence however long it is.

    Invariants (asserted by ``check``):
      - what this cache holds of the budget is the bytes of its granted cells and of its own arrays,
        and, from a grant until its pools have grown, one old copy of a layer beside the new one;
      - no group is granted more than its limit.
    """

    def __init__(
        self,
        config: CacheConfig,
        budget: MemoryBudget,
        *,
        block_size: int = 1,
        has_one_run: bool = False,
    ) -> None:
        """Create the growth of a cache that was granted nothing yet.

        Args:
            config: the cache's.
            budget: whom to ask.
            block_size: cells that are granted together.
            has_one_run: a window keeps up to twice what it must, in one run.

        Raises:
            ConfigError: the budget holds no token.
        """
        groups, state = config.params.groups, config.params.state
        self._block_size = block_size
        self._units = [block_size] * len(groups)
        self._chunks = [config.min_chunk] * len(groups)
        self._cell_bytes = [g.cell_bytes(config.kv) + INDEX_BYTES for g in groups]
        whole = block_size > 1 and config.layout == "block_first"
        self._copy_bytes_of = [
            g.cell_bytes(config.kv) // (1 if whole else len(g.layers)) for g in groups
        ]
        most = [config.capacity] * len(groups)
        windows = [_window_cells(g, config, has_one_run) for g in groups]
        if state is not None:
            self._units.append(1)
            self._chunks.append(STEP_SLOTS)
            self._cell_bytes.append(state.slot_bytes + INDEX_BYTES)
            self._copy_bytes_of.append(state.most_bytes)
            most.append(config.n_slots)
        self._has_slots = state is not None
        self.limits = [
            _down(min(n, budget.kv_bytes // size), unit)
            for n, size, unit in zip(most, self._cell_bytes, self._units, strict=True)
        ]
        if state is not None:
            most_slots = budget.kv_bytes // SLOTS_SHARE // self._cell_bytes[-1]
            self.limits[-1] = min(self.limits[-1], max(STEP_SLOTS, most_slots))
        array_bytes = ARRAY_BYTES * sum(self.limits) + exact_bytes(groups, config.kv)
        self.n_fitting = self._most_tokens(budget.kv_bytes - array_bytes, windows)
        if not self.n_fitting:
            slots = "" if state is None else f", {STEP_SLOTS} slots {state.slot_bytes} each"
            raise ConfigError(
                f"the memory budget leaves {budget.kv_bytes} bytes for KV and {block_size} "
                f"token{'s' if block_size > 1 else ''} take "
                f"{block_size * sum(self._cell_bytes[: len(groups)])}{slots}; give more memory, or "
                f"store K and V in fewer bits (kv_dtype)"
            )
        self._windows = [None if cells is None else _up(cells, block_size) for cells in windows]
        self._floors = [
            0 if cells is None else min(cells, self.n_fitting) for cells in self._windows
        ] + [STEP_SLOTS] * self._has_slots
        self.sizes = [0] * len(self.limits)
        self._held = _HeldBytes(budget)
        finalize(self, self._held.give_back_all)
        self._array_bytes, self._copy_bytes = array_bytes, 0
        if not self._held.ask(array_bytes):
            raise ConfigError(
                f"the memory budget has {budget.available_bytes} of {budget.kv_bytes} bytes left "
                f"and another cache needs {array_bytes} for a start; end the session that holds "
                f"the others, or give more memory"
            )

    def can_add(self, deficits: Sequence[int]) -> bool:
        """Return true if each group could be granted so many cells more, all together."""
        sizes = self._least(deficits)
        return sizes == self.sizes or (
            all(size <= limit for size, limit in zip(sizes, self.limits, strict=True))
            and self._held.can_ask(self._n_asked(sizes) + self._n_reserved(sizes))
        )

    def add(self, deficits: Sequence[int], wishes: Sequence[int] | None = None) -> bool:
        """Grant so many cells more per group. False: refused, nothing was changed.

        A size doubles where the budget has room, and grows by less near its end.

        Args:
            deficits: cells that are needed.
            wishes: cells that would be good to have besides.
        """
        least = self._least(deficits)
        if any(size > limit for size, limit in zip(least, self.limits, strict=True)):
            return False
        wanted = zip(
            least,
            wishes or [0] * len(least),
            self.sizes,
            self.limits,
            self._chunks,
            self._units,
            strict=True,
        )
        extras = [
            _up(grown_size(need + wish, size, chunk, limit), unit) - need
            if need + wish > size
            else 0
            for need, wish, size, limit, chunk, unit in wanted
        ]
        while True:
            sizes = [
                min(need + extra, limit)
                for need, extra, limit in zip(least, extras, self.limits, strict=True)
            ]
            if sizes == self.sizes:
                return True
            if self._held.ask(self._n_asked(sizes), besides=self._n_reserved(sizes)):
                self._copy_bytes = max(self._copy_bytes, self._n_copied(sizes))
                self.sizes = sizes
                return True
            if not any(extras):
                return False
            extras = [
                _down(extra // 2, unit) for extra, unit in zip(extras, self._units, strict=True)
            ]

    def cells_for(self, n_tokens: int) -> list[int]:
        """Cells per group for so many tokens, in steps of at most ``STEP_TOKENS``.

        More tokens than fit alone in full and window groups together may come in any one step. Of
        slots it is the one that a step writes.
        """
        slots = [min(n_tokens, 1)] * self._has_slots
        if n_tokens > self.n_fitting and None in self._windows:
            return [n_tokens] * len(self._windows) + slots
        return [n_tokens if n is None else min(n_tokens, n) for n in self._windows] + slots

    def most_tokens(self, free: Sequence[int]) -> int:
        """Return the most tokens that fit with so many cells free per group, in steps as above."""
        low, high = (
            0,
            max(
                n + limit - size
                for n, limit, size in zip(free, self.limits, self.sizes, strict=True)
            ),
        )
        while low < high:
            n = (low + high + 1) // 2
            wanted = zip(self.cells_for(n), free, strict=True)
            if self.can_add([cells - have for cells, have in wanted]):
                low = n
            else:
                high = n - 1
        return low

    def settle(self) -> None:
        """Give back what old copies took: the pools have grown."""
        if self._copy_bytes:
            self._held.give_back(self._copy_bytes)
            self._copy_bytes = 0

    def check(self) -> None:
        """Assert the invariants."""
        kv_bytes = sum(n * size for n, size in zip(self.sizes, self._cell_bytes, strict=True))
        assert self._held.n_bytes == kv_bytes + self._array_bytes + self._copy_bytes
        assert all(n <= limit for n, limit in zip(self.sizes, self.limits, strict=True))
        assert all(n % unit == 0 for n, unit in zip(self.sizes, self._units, strict=True))

    def _least(self, deficits: Sequence[int]) -> list[int]:
        return [
            size + _up(max(0, deficit), unit)
            for size, deficit, unit in zip(self.sizes, deficits, self._units, strict=True)
        ]

    def _n_asked(self, sizes: Sequence[int]) -> int:
        """Bytes to ask for before the groups can have these sizes."""
        more = sum(
            (new - old) * size
            for new, old, size in zip(sizes, self.sizes, self._cell_bytes, strict=True)
        )
        return more + max(0, self._n_copied(sizes) - self._copy_bytes)

    def _n_copied(self, sizes: Sequence[int]) -> int:
        """Return the largest old copy beside its new one: layers grow one after the other."""
        return max(
            old * size if new > old else 0
            for new, old, size in zip(sizes, self.sizes, self._copy_bytes_of, strict=True)
        )

    def _n_reserved(self, sizes: Sequence[int]) -> int:
        """Bytes that full groups leave, so that one sequence's windows always find their cells."""
        grows = any(
            new > old and not floor
            for new, old, floor in zip(sizes, self.sizes, self._floors, strict=True)
        )
        missing = zip(self._floors, sizes, self._cell_bytes, strict=True)
        return sum(max(0, floor - n) * size for floor, n, size in missing) if grows else 0

    def _most_tokens(self, n_bytes: int, windows: Sequence[int | None]) -> int:
        """Return the longest sequence that fits alone: whole blocks."""
        rows = list(zip(self.limits, windows, strict=False))
        full = [n for n, window in rows if window is None]
        low, high = 0, min(full, default=max(n for n, _ in rows)) // self._block_size
        while low < high:
            blocks = (low + high + 1) // 2
            n_cells = blocks * self._block_size
            cells = [
                n_cells if window is None else min(n_cells, _up(window, self._block_size))
                for window in windows
            ] + self.limits[len(windows) :]
            need = sum(n * size for n, size in zip(cells, self._cell_bytes, strict=True))
            copies = [n * size for n, size in zip(cells, self._copy_bytes_of, strict=True)]
            if need + max(copies) <= n_bytes:
                low = blocks
            else:
                high = blocks - 1
        return low * self._block_size


def _up(n_cells: int, unit: int) -> int:
    return -(-n_cells // unit) * unit


def _down(n_cells: int, unit: int) -> int:
    return n_cells - n_cells % unit


class _HeldBytes:
    """Bytes that one cache holds of a budget, until they are given back as a whole."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.n_bytes = 0

    def can_ask(self, n_bytes: int) -> bool:
        return self._budget.can_ask(n_bytes)

    def ask(self, n_bytes: int, besides: int = 0) -> bool:
        """Ask for bytes, on condition that others besides would be there too."""
        if not self._budget.ask(n_bytes + besides):
            return False
        self._budget.give_back(besides)
        self.n_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self._budget.give_back(n_bytes)
        self.n_bytes -= n_bytes

    def give_back_all(self) -> None:
        self.give_back(self.n_bytes)


def _window_cells(group: LayerGroup, config: CacheConfig, has_one_run: bool) -> int | None:
    """Return the most cells of one sequence behind a window or chunk; None: all of its history."""
    if group.is_full:
        return None
    keep = group.sight.most_before + config.window_slack
    return (max(2 * keep, config.min_chunk) if has_one_run else keep + MIN_RUN) + STEP_TOKENS

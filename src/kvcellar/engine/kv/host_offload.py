"""KV of sequences that gave way, in main memory until they end: for caches on a card.

A sequence that gives way leaves its KV to the prefix index, from where it is evicted when cells are
short, which they are. Where copying it to main memory and back is held to be faster than computing
it again, it is copied, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcellar.backends.host_memory import Arrival
from kvcellar.engine.kv.restore import ApartCache, Restore, RowCache
from kvcellar.errors import DeviceMemoryError

if TYPE_CHECKING:
    from kvcellar.engine.kv.residency import Residency
    from kvcellar.engine.requests.request import Sequence

MOST_BYTES = 4 << 30
"""Main memory that KV of sequences that wait may take."""

START_S_PER_BYTE = 1 / 5.0e9
"""Seconds that a copy takes for each byte, assumed before one was made: half of pinned speed."""

LEAST_TOKENS = 64
"""Tokens below which nothing is moved, and of a step from whose time one learns."""


_WEIGHT = 0.3


class Moved(NamedTuple):
    """Rows of the first tokens of a sequence.

    Attributes:
        n_tokens: how many.
        rows: per layer group, as ``RowCache.read_rows`` gives them.
        n_bytes: of the rows.
        arrival: of the rows.
    """

    n_tokens: int
    rows: Any
    n_bytes: int
    arrival: Arrival


class MovedOut:
    """Keeps rows of sequences that wait, and brings them back. Only between steps.

    Rows are on their way while steps go on.
    """

    def __init__(
        self, residency: Residency, cache: RowCache, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep nothing yet."""
        self._residency, self._cache, self._clock = residency, cache, clock
        groups = cache.config.params.groups
        self._token_bytes = sum(group.cell_bytes(cache.config.kv) for group in groups)
        self._s_per_byte, self._s_per_token = START_S_PER_BYTE, 0.0
        self._of: dict[int, Moved] = {}
        self._last: Moved | None = None
        self._call_s = 0.0
        self.n_out = self.n_back = 0
        """Tokens that were copied to main memory, and back."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(moved.n_bytes for moved in self._of.values())

    def ran(self, n_prefill: int, seconds: float) -> None:
        """Learn what a prompt's tokens take from a step that had so many of them."""
        if n_prefill >= LEAST_TOKENS:
            took = seconds / n_prefill
            self._s_per_token = min(self._s_per_token or took, took)

    def copy(self, sequence: Sequence) -> Moved | None:
        """Copy the rows of a sequence that gives way; None where computing them is cheaper.

        Where it has given way before, and has few tokens more, that copy does.
        """
        self._learn()
        n = sequence.n_computed
        known = self._of.get(sequence.request_id)
        if known is not None and n - known.n_tokens < LEAST_TOKENS:
            return known
        n_bytes = n * self._token_bytes
        is_cheaper = 2 * self._token_bytes * self._s_per_byte < self._s_per_token
        if n < LEAST_TOKENS or not is_cheaper or self.size_bytes + n_bytes > MOST_BYTES:
            return None
        began = self._clock()
        try:
            rows, landing = self._cache.begin_read(self._cache.seq_table(sequence.seq_id, n))
        except DeviceMemoryError:
            return None
        self.n_out += n
        self._last, self._call_s = Moved(n, rows, n_bytes, landing.arrival), self._clock() - began
        return self._last

    def _learn(self) -> None:
        """Learn from the last copy what one takes, if it has arrived."""
        if self._last is not None and (took := self._last.arrival.took_s) is not None:
            per_byte = max(took, self._call_s) / self._last.n_bytes
            self._s_per_byte += _WEIGHT * (per_byte - self._s_per_byte)
            self._last = None

    def keep(self, request_id: int, moved: Moved) -> None:
        """Keep rows until their sequence ends: it may give way again."""
        self._of[request_id] = moved

    def forget(self, request_id: int) -> None:
        """Let go of a sequence's rows, if there are any."""
        self._of.pop(request_id, None)

    def bring(self, sequence: Sequence) -> None:
        """Put the rows of a sequence that is let in back into the cache, as far as it lacks them.

        They are published as a prefix that it then finds. Where there is no room nothing is done.
        """
        moved = self._of.get(sequence.request_id)
        if moved is None:
            return
        tokens = sequence.reusable[: moved.n_tokens]
        nothing = [None] * len(self._cache.config.params.groups)
        restore = Restore.begin(self._residency, np.array(tokens), nothing, space=sequence.space)
        if restore is None:
            return
        first, stop = restore.first, len(tokens)
        try:
            moved.arrival.wait()
            cells = [table[first:stop] for table in restore.tables]
            restore.write(cells, [_part(group, first, stop) for group in moved.rows])
            restore.publish(stop).release()
            self.n_back += stop - first
        except DeviceMemoryError:
            self.forget(sequence.request_id)  # it is computed again
        finally:
            restore.give_up()


def _part(group: Any, first: int, stop: int) -> Any:
    """Return the rows of some tokens of a group."""
    return tuple(tuple(part[:, :, first:stop] for part in side) for side in group)


def moved_out(residency: Residency) -> MovedOut | None:
    """Return what keeps rows; None where they are in main memory already, or not all there is."""
    cache = residency.cache
    params = cache.config.params
    is_whole = params.state is None and all(group.is_full for group in params.groups)
    if not isinstance(cache, ApartCache) or not cache.rows_are_apart or not is_whole:
        return None
    return MovedOut(residency, cache)

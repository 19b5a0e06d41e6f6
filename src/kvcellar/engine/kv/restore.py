"""KV that comes into the cache from outside, between steps, as a prefix that requests then reuse.

Cells are claimed for all of it at once, rows are written as they arrive, and what has arrived is
published in the prefix index. Until then nobody can see the cells; given up, they are free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.host_rows import LeavingRows
from kvcellar.bookkeeping.cells.compaction import Relocation, relocated
from kvcellar.cache import SeqCache, StateCache
from kvcellar.engine.kv.residency import Residency
from kvcellar.models import Runner
from kvcellar.models.runner import in_spaces
from kvcellar.models.seeing import SeenPicture, seeing
from kvcellar.pictures.tokens import is_placeholder, pictures_in
from kvcellar.prefix import PrefixHandle, key_of
from kvcellar.space import SHARED, Space
from kvcellar.states import NO_SLOT
from kvcellar.types import IntArray


@runtime_checkable
class RowCache(SeqCache, Protocol):
    """A cache whose cells' rows can be read and written as NumPy arrays, per layer group."""

    def seq_claim(self, seq_id: int, tables: Sequence[IntArray]) -> tuple[IntArray, ...]:
        """Start a sequence on new cells, wherever the tables have a cell; return their tables."""
        ...

    def read_rows(self, tables: Sequence[IntArray]) -> Any:
        """Return per layer group some cells' K and V, ``[n_layers, n_kv_heads, n, width]``."""
        ...

    def begin_read(self, tables: Sequence[IntArray]) -> LeavingRows:
        """Begin to copy the same; steps may go on, and cells be given to others, meanwhile."""
        ...

    def write_rows(self, tables: Sequence[IntArray], rows: Any) -> None:
        """Put back what ``read_rows`` gave, in cells of the same order."""
        ...


@runtime_checkable
class ApartCache(RowCache, Protocol):
    """A cache that may lie in a memory of its own."""

    @property
    def rows_are_apart(self) -> bool:
        """True if it does, so that main memory has room for more."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class HeldPrefix:
    """Cells of a history that the cache holds, protected until ``release``.

    Rows are. Snapshots of states behind them may go where slots are short, this history's last one
    after those that nobody holds a history for: ``tables`` always say which are there.

    Attributes:
        n_tokens: leading tokens from which the history can go on.
        n_matched: leading tokens that are stored, whether it can go on from there or not.
        n_rows: leading tokens whose rows are protected; more where only states are missing.
        tables: per layer group ``[n_rows]``: the cell of each position, -1 for none; slots last.
    """

    n_tokens: int
    n_matched: int
    n_rows: int
    tables: tuple[IntArray, ...]
    _residency: Residency
    _handle: PrefixHandle
    _is_held: bool = True

    def __post_init__(self) -> None:
        self._residency.holders.add(self)

    def relocate(self, moved: Relocation) -> None:
        """Take note that cells have moved."""
        self.tables = relocated(self.tables, moved)

    @property
    def end_slot(self) -> int:
        """The slot of the states that the history goes on from; ``NO_SLOT``: none."""
        has_states = self._residency.snapshots.has_states
        return int(self.tables[-1][self.n_tokens - 1]) if has_states and self.n_tokens else NO_SLOT

    def lose(self, slots: set[int]) -> None:
        """Take note that the index has given up snapshots of states."""
        self.tables[-1][np.isin(self.tables[-1], list(slots))] = NO_SLOT

    def release(self) -> None:
        """Let it be evicted again. May be called twice."""
        if self._is_held:
            self._is_held = False
            self._residency.holders.discard(self)
            if self.n_rows:
                self._residency.index.unlock_handle(self._handle)


StatesOfOne = tuple[tuple[NDArray[np.float32], ...], ...]
"""Per recurrent layer its states after some tokens of one sequence."""


class Tail(NamedTuple):
    """Rows and states of the last tokens of a history, as they were computed again.

    Attributes:
        positions: per layer group ``[n]``: of the rows that it holds.
        rows: of these, as ``RowCache.read_rows`` gives them.
        states: behind the last token.
    """

    positions: list[IntArray]
    rows: Any
    states: StatesOfOne


def states_in(cache: SeqCache, slot: int) -> StatesOfOne:
    """Return copies of the states in a slot of a cache that has some."""
    assert isinstance(cache, StateCache), "a model with states has a cache for them"
    assert slot != NO_SLOT, "nobody holds these states"
    layers = cache.read_states(np.array([slot]))
    return tuple(tuple(state[0] for state in layer) for layer in layers)


def hold(residency: Residency, tokens: IntArray, space: Space = SHARED) -> HeldPrefix:
    """Find what the cache holds of the beginning of a history, and protect it."""
    index = residency.index
    key = key_of(tokens, space)
    match = index.match_prefix(key)
    handle, tables = match.handle, match.cells
    if match.n_matched > match.length and residency.snapshots.lack_states_alone:
        handle, tables = index.find_prefix(key), index.peek_prefix(key)
    n_rows = handle.length
    if n_rows:
        index.lock_handle(handle)
    return HeldPrefix(match.length, match.n_matched, n_rows, tables, residency, handle)


@dataclass(slots=True, eq=False)
class Restore:
    """Positions ``[first, stop)`` on their way into the cache. Only between steps.

    Attributes:
        tokens: ``[stop]``: the history.
        first: tokens that come from elsewhere: the cache held them already, or they are computed
            meanwhile (``stand_on``).
        tables: per layer group ``[stop]``: the cells that were claimed, -1 elsewhere; what the
            cache held already keeps its own.
        space: of the history.
    """

    residency: Residency
    tokens: IntArray
    first: int
    tables: tuple[IntArray, ...]
    space: Space
    _held: HeldPrefix
    _seq_id: int
    _is_over: bool = field(default=False)

    @classmethod
    def begin(
        cls,
        residency: Residency,
        tokens: IntArray,
        windows: Sequence[IntArray | None],
        first: int = 0,
        space: Space = SHARED,
    ) -> Restore | None:
        """Claim cells for what the cache lacks of a history; None where there is no room.

        Args:
            residency: whose cache.
            tokens: ``[stop]``: all that is to be in the cache at the end.
            windows: per layer group, the positions that come for it; None for full groups. Of
                states, which come last: those before which there are snapshots, the last position
                among them.
            first: positions before it are computed meanwhile, if the cache does not hold them.
            space: of the history.
        """
        cache = residency.cache
        if not isinstance(cache, RowCache):
            return None
        stop = len(tokens)
        held = hold(residency, tokens, space)
        first = max(first, held.n_rows)
        wanted = []
        for positions in windows:
            table = np.full(stop, -1, dtype=np.int64)
            if positions is None:
                table[first:] = 0
            else:
                table[positions] = 0
            wanted.append(table)
        counts = [int(np.count_nonzero(table >= 0)) for table in wanted]
        n_slots = counts.pop() if residency.snapshots.has_states else 0
        if held.n_tokens >= stop or not residency.make_room(max(counts), n_slots):
            held.release()
            return None
        seq_id = residency.take_seq_id()
        try:
            claimed = cache.seq_claim(seq_id, wanted)
        except Exception:
            residency.give_seq_id(seq_id)
            held.release()
            raise
        return cls(residency, tokens, first, claimed, space, held, seq_id)

    def write(self, group_cells: Sequence[IntArray], rows: Any) -> None:
        """Store rows in cells of ``tables``: per layer group, in their order."""
        cache = self.residency.cache
        assert isinstance(cache, RowCache) and not self._is_over
        cache.write_rows(group_cells, rows)

    def read(self, group_cells: Sequence[IntArray]) -> Any:
        """Return the rows in cells of ``tables``, as ``RowCache.read_rows`` gives them."""
        cache = self.residency.cache
        assert isinstance(cache, RowCache) and not self._is_over
        return cache.read_rows(group_cells)

    def write_states(self, length: int, states: Sequence[Sequence[NDArray[np.float32]]]) -> None:
        """Store the states after ``length`` tokens in the slot that is claimed for them."""
        cache = self.residency.cache
        assert isinstance(cache, StateCache) and not self._is_over
        given = [[state[None] for state in layer] for layer in states]
        cache.write_states(self.tables[-1][length - 1 : length], given)

    def read_states(self, length: int) -> StatesOfOne:
        """Return the states after ``length`` tokens, which are held."""
        return states_in(self.residency.cache, int(self._here()[-1][length - 1]))

    def compute_again(self, runner: Runner, positions: Sequence[int]) -> Any:
        """Run the model on some tokens once more, each behind the rows that lie before it.

        What it computes goes to cells of its own, which are free again afterwards.

        Args:
            runner: the model.
            positions: ``[n]`` of tokens whose history is here, as ``can_compute_again`` says.

        Returns:
            Per layer group the rows of these tokens, as ``read_rows`` gives them, ``n`` in each;
            None where there is no room for ``n`` more tokens.
        """
        residency, cache = self.residency, self.residency.cache
        assert isinstance(cache, RowCache) and not self._is_over
        seq_ids = [residency.take_seq_id() for _ in positions]
        here = self._here()
        try:
            for seq_id, position in zip(seq_ids, positions, strict=True):
                if position:
                    cache.seq_map(seq_id, [table[:position] for table in here])
            stretches = [(seq_id, 1) for seq_id in seq_ids]
            if not residency.make_room_for(stretches):
                return None
            try:
                found = cache.begin_step(stretches)
                assert list(found) == list(positions), "each token goes behind its own history"
                seen = [(self._behind(position), 1) for position in positions]
                with in_spaces(runner, [(self.space, len(found))]), seeing(runner, seen):
                    runner.forward(self.tokens[list(positions)], found, [0])
            except BaseException:
                cache.cancel_step()
                raise
            cache.end_step()
            tables = [cache.seq_table(seq_id) for seq_id in seq_ids]
            groups = range(len(cache.config.params.groups))
            return cache.read_rows(
                [np.array([table[group][-1] for table in tables]) for group in groups]
            )
        finally:
            for seq_id in seq_ids:
                if cache.has_seq(seq_id):
                    cache.seq_rm(seq_id)
                residency.give_seq_id(seq_id)

    def compute_tail(self, runner: Runner, start: int, stop: int) -> Tail | None:
        """Run the model on the tokens ``[start, stop)`` once more, behind what lies before them.

        What it computes goes to cells and a slot of its own, which are free again afterwards.

        Args:
            runner: the model, which has recurrent layers.
            start: a length that ``can_compute_again`` says yes to.
            stop: one past the last token.

        Returns:
            What it computed; None where there is no room for it.
        """
        residency, cache = self.residency, self.residency.cache
        assert isinstance(cache, RowCache) and not self._is_over
        seq_id, n = residency.take_seq_id(), stop - start
        try:
            if start:
                cache.seq_map(seq_id, [table[:start] for table in self._here()])
            if not residency.make_room_for([(seq_id, n)]):
                return None
            try:
                found = cache.begin_step([(seq_id, n)])
                seen = [(self._behind(stop), n)]
                with in_spaces(runner, [(self.space, n)]), seeing(runner, seen):
                    runner.forward(self.tokens[start:stop], found, [0])
            except BaseException:
                cache.cancel_step()
                raise
            cache.end_step()
            *tables, slots = cache.seq_table(seq_id)
            positions = [start + np.flatnonzero(table[start:] >= 0) for table in tables]
            pairs = zip(tables, positions, strict=True)
            rows = cache.read_rows([table[at] for table, at in pairs])
            return Tail(positions, rows, states_in(cache, int(slots[-1])))
        finally:
            if cache.has_seq(seq_id):
                cache.seq_rm(seq_id)
            residency.give_seq_id(seq_id)

    @property
    def block_size(self) -> int:
        """Cells that the cache takes and shares together."""
        return self.residency.cache.block_size

    def can_compute_again(self, position: int) -> bool:
        """Return true if all that the token at a position attends to is here."""
        if position % self.block_size:
            return False  # a block is shared whole
        if self.has_pictures(position, position + 1):
            return False
        sights = self.residency.cache.config.params.sights
        for sight, table in zip(sights, self._here(), strict=True):
            if (table[sight.first_seen(position) : position] < 0).any():
                return False
        return True

    def has_pictures(self, start: int, stop: int) -> bool:
        """Return true if a stretch has rows of pictures, which no forward here is given."""
        return bool(is_placeholder(self.tokens[start:stop]).any())

    def _behind(self, stop: int) -> list[SeenPicture]:
        """Return the pictures before a place, of which no row is computed again."""
        return [SeenPicture(one, None) for one in pictures_in(self.tokens[:stop])]

    def _here(self) -> list[IntArray]:
        """Return per layer group ``[stop]``: each position's cell, held before or claimed now."""
        n = self.first
        here = [table.copy() for table in self.tables]
        for table, held in zip(here, self._held.tables, strict=True):
            table[:n] = np.where(table[:n] < 0, held[:n], table[:n])
        return here

    def stand_on(self, held: HeldPrefix) -> None:
        """Rest on what was computed meanwhile before ``first``, which ``held`` protects."""
        self._held.release()
        self._held = held

    @property
    def has_beginning(self) -> bool:
        """True if all rows before ``first`` are there."""
        return self._held.n_rows >= self.first

    def publish(self, n_tokens: int) -> HeldPrefix:
        """Let requests reuse the first ``n_tokens``; the rest is given up."""
        index, cache = self.residency.index, self.residency.cache
        n = max(n_tokens, self.first)
        key = key_of(self.tokens[:n], self.space)
        inserted = index.insert_prefix(key, [table[:n] for table in self.tables])
        cache.retain_cells(inserted.adopted)
        held = hold(self.residency, self.tokens[:n], self.space)
        self.give_up()
        return held

    def give_up(self) -> None:
        """Free the cells that were claimed and not published. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self.residency.cache.seq_rm(self._seq_id)
            self.residency.give_seq_id(self._seq_id)
            self._held.release()

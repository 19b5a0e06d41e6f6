"""From tokens to stored rows: what is there, from where a history can go on, and the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvcellar.history import History, common_prefix
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.shared.blocks import SharedBlocks
from kvcellar.store.values.blocks import Info, Kind, Link, Sealed, Unsealed, boundary_link, chain
from kvcellar.store.values.format import DamagedError
from kvcellar.store.values.layout import (
    ModelKey,
    Rows,
    States,
    WindowRows,
    rows_size_bytes,
    slice_rows,
)
from kvcellar.store.warm import Item, WarmTier
from kvcellar.types import IntArray

WARM, COLD, SHARED = "warm", "cold", "shared"

READ_AHEAD = 4
"""Files that the system is asked to read while the one before them is verified."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block, and how much of it a history has in common.

    Attributes:
        info: the block.
        stop: one past the last position that is in common.
        tier: where it was when the match was made: ``warm``, ``cold`` or ``shared``.
    """

    info: Info
    stop: int
    tier: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A boundary state on a history.

    Attributes:
        info: the state.
        first: the shortest length that can be resumed from it.
        last: the longest.
        tier: where it was when the match was made: ``warm``, ``cold`` or ``shared``.
    """

    info: Info
    first: int
    last: int
    tier: str

    def nearest(self, limit: int) -> int:
        """Return the greatest length up to ``limit`` that can be resumed from it; 0: none."""
        n = min(self.last, limit)
        return n if n >= self.first else 0


@dataclass(frozen=True)
class Match:
    """Stored beginning of a history. A hint: nothing is locked, loading may find less.

    Attributes:
        key: the model and layout.
        tokens: the history that was asked for, up to the limit.
        steps: the blocks that hold its beginning, in order.
        n_tokens: leading tokens whose rows in the full-history groups are stored.
        boundaries: boundary states on this history, latest first; empty for models that need none.
    """

    key: ModelKey
    tokens: History
    steps: tuple[StoredBlock, ...]
    n_tokens: int
    boundaries: tuple[ResumePoint, ...]

    @property
    def n_resumable(self) -> int:
        """The most leading tokens that need not be computed again, boundary states included."""
        return self.resumable_at(self.n_tokens)

    def resumable_at(self, limit: int) -> int:
        """Return the greatest length up to ``limit`` that can be resumed from; 0: none."""
        limit = max(0, min(limit, self.n_tokens))
        if not self.key.layout.has_boundaries:
            return limit
        return max((boundary.nearest(limit) for boundary in self.boundaries), default=0)

    def boundary_bytes(self, stop: int) -> dict[str, int]:
        """Return by tier the bytes of the boundary state that a resume at ``stop`` loads."""
        for boundary in self.boundaries:
            if boundary.nearest(stop) == stop:
                return {boundary.tier: boundary.info.size_bytes}
        return {}

    @cached_property
    def cold_bytes(self) -> int:
        """Bytes of files to read for all of the rows, without boundary states."""
        return sum(step.info.size_bytes for step in self.steps if step.tier == COLD)

    @cached_property
    def warm_bytes(self) -> int:
        """Bytes in RAM to copy for all of the rows, without boundary states."""
        return sum(step.info.size_bytes for step in self.steps if step.tier == WARM)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes to fetch from other machines for all of the rows, without boundary states."""
        return sum(step.info.size_bytes for step in self.steps if step.tier == SHARED)

    @cached_property
    def is_exact(self) -> bool:
        """True if all rows are bit for bit what was saved, and none went through 8 bits."""
        return all(step.info.is_exact for step in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Verified rows of positions ``[start, stop)``.

    Attributes:
        start: first position.
        stop: one past the last.
        rows: per full-history group ``[n_layers, n_kv_heads, stop - start, ...]``; views of what
            others may read too: not to be written to.
        tier: where they came from: ``warm``, ``cold`` or ``shared``.
        is_exact: whether they are bit for bit what was saved.
        size_bytes: bytes that were read or touched.
        address: of the block that they are from.
    """

    start: int
    stop: int
    rows: Rows
    tier: str
    is_exact: bool
    size_bytes: int
    address: bytes

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(rows_size_bytes(group) for group in self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryState:
    """Rows and states that a history needs beside those of its blocks to go on after some tokens.

    All of it is of one length, and views of what others may read too: not to be written to.

    Attributes:
        n_tokens: tokens after which the history goes on.
        windows: per group with a window or chunk, positions below ``n_tokens`` and their rows.
        states: of recurrent layers after ``n_tokens``.
        is_exact: whether they are bit for bit what was saved.
        address: of the boundary state that they are from.
        tier: where they came from: ``warm``, ``cold`` or ``shared``.
        size_bytes: bytes that were read or touched.
    """

    n_tokens: int
    windows: tuple[WindowRows, ...]
    states: States
    is_exact: bool
    address: bytes
    tier: str
    size_bytes: int


class Finder:
    """Reads both tiers as one. For any thread."""

    def __init__(
        self,
        warm: WarmTier,
        cold: ColdTier,
        shared: SharedBlocks | None,
        on_read: Callable[[bytes], None],
        on_fetch: Callable[[Sealed], None],
    ) -> None:
        """Create a finder.

        Args:
            warm: looked at first.
            cold: second.
            shared: and then the tier of several machines, where there is one.
            on_read: told the address of every block that was read.
            on_fetch: told every block that came from the shared tier.
        """
        self._warm = warm
        self._cold = cold
        self._shared = shared
        self._on_read = on_read
        self._on_fetch = on_fetch

    # What is there -----------------------------------------------------------------------------

    def match(self, key: ModelKey, tokens: History) -> Match:
        """Find the longest stored beginning of a history, to the token."""
        self._probe(key, tokens)
        steps: list[StoredBlock] = []
        parents = [key.root]
        partial: StoredBlock | None = None
        has_rows = bool(key.layout.full_groups)
        for link in chain(key, tokens):
            if link.stop - link.start < key.layout.block_tokens:
                break
            if has_rows and len(steps) == len(parents) - 1:
                step = self._step(key, link, tokens[link.start : link.stop])
                if step is not None:
                    steps.append(step)
            parents.append(link.address)
        n_tokens = len(tokens)
        if has_rows:
            n_tokens = steps[-1].stop if steps else 0
            partial = self._partial(key, parents[len(steps)], n_tokens, tokens)
            if partial is not None:
                steps.append(partial)
                n_tokens = partial.stop
        boundaries: tuple[ResumePoint, ...] = ()
        if key.layout.has_boundaries:
            boundaries = self._boundaries(key, parents, tokens, partial)
        return Match(key, tokens, tuple(steps), n_tokens, boundaries)

    def info(self, address: bytes) -> tuple[Info, str] | None:
        """Return what is known of an address, and in which tier."""
        entry = self._warm.entry(address)
        if entry is not None:
            return entry.item.info, WARM
        info = self._cold.info(address)
        if info is not None:
            return info, COLD
        info = None if self._shared is None else self._shared.info(address)
        return None if info is None else (info, SHARED)

    def _probe(self, key: ModelKey, tokens: History) -> None:
        """Ask the shared tier for whole blocks of a history behind those that are known.

        And for the boundary state at its end, which somebody may have left for just this history.
        """
        if self._shared is None:
            return
        if key.layout.has_boundaries:
            end = boundary_link(key, tokens)
            if self.info(end.address) is None:
                self._shared.probe(Kind.BOUNDARY, key.root, [end], tokens)
        if not key.layout.full_groups:
            return
        size = key.layout.block_tokens
        links = [link for link in chain(key, tokens) if link.stop - link.start == size]
        known = next((i for i, link in enumerate(links) if self.info(link.address) is None), None)
        if known is not None:
            self._shared.probe(Kind.BLOCK, key.root, links[known:], tokens)

    def _step(self, key: ModelKey, link: Link, tokens: IntArray) -> StoredBlock | None:
        found = self.info(link.address)
        if found is None or not _is_at(found[0], key, link.start):
            return None
        if not np.array_equal(found[0].tokens, tokens):
            return None
        return StoredBlock(found[0], found[0].stop, found[1])

    def _partial(
        self, key: ModelKey, parent: bytes, start: int, tokens: History
    ) -> StoredBlock | None:
        """Return the block behind ``parent`` that has most tokens in common with the history."""
        best: StoredBlock | None = None
        for tier, info in self._children([parent], Kind.BLOCK):
            n = tokens.common_prefix(info.tokens, start)
            if n and _is_at(info, key, start) and (best is None or start + n > best.stop):
                best = StoredBlock(info, start + n, tier)
        return best

    def _boundaries(
        self, key: ModelKey, parents: list[bytes], tokens: History, partial: StoredBlock | None
    ) -> tuple[ResumePoint, ...]:
        """Find boundary states whose positions, as far as they reach back, are of this history.

        One may end behind the point where two histories part: the positions before that point are
        the same, and where enough of them are held, and no layer is recurrent, it can be resumed
        there.
        """
        found: dict[bytes, ResumePoint] = {}
        size = key.layout.block_tokens
        starts = {parent: i * size for i, parent in enumerate(parents)}
        if partial is not None and len(partial.info.tokens) == size:
            starts.setdefault(partial.info.address, partial.info.stop)
        for tier, info in self._children(list(starts), Kind.BOUNDARY):
            start = starts[info.parent]
            if not _is_at(info, key, start):
                continue
            if partial is not None and start >= partial.info.stop:
                last = partial.stop  # where the histories part, in the block before
            else:
                last = start + tokens.common_prefix(info.tokens, start)
            if last >= max(1, info.first):
                found.setdefault(info.address, ResumePoint(info, info.first, last, tier))
        return tuple(sorted(found.values(), key=lambda boundary: -boundary.last))

    def _children(self, parents: list[bytes], kind: Kind) -> Iterator[tuple[str, Info]]:
        for info in self._warm.children(parents, kind):
            yield WARM, info
        for info in self._cold.ask(lambda catalogue: catalogue.children(parents, kind)):
            self._cold.note_there(info.address, info.is_exact)
            yield COLD, info
        for info in () if self._shared is None else self._shared.children(parents, kind):
            yield SHARED, info

    # The rows ----------------------------------------------------------------------------------

    def load(self, match: Match, start: int, stop: int) -> Iterator[Loaded]:
        """Yield the rows of ``[start, stop)``, block by block, each verified before it is given.

        Ends early where a block is gone or damaged; what was given before is good.
        """
        at = start
        wanted = [step for step in match.steps if start < step.stop and step.info.start < stop]
        coming = iter(wanted)
        for step in itertools.islice(coming, READ_AHEAD):
            self._expect(step)
        for step in wanted:
            for later in itertools.islice(coming, 1):
                self._expect(later)
            upto = min(step.stop, stop)
            first = step.info.start
            got = self._open(step.info, match.tokens[first : step.stop])
            if got is None:
                return
            item, tier = got
            try:
                rows = item.rows if isinstance(item, Unsealed) else item.rows_for(match.key)
            except DamagedError as error:
                self._cold.reject(item.info, str(error))
                return
            part = tuple(slice_rows(group, at - first, upto - first) for group in rows)
            self._on_read(item.info.address)
            info = item.info
            yield Loaded(at, upto, part, tier, info.is_exact, item.size_bytes, info.address)
            at = upto

    def _expect(self, step: StoredBlock) -> None:
        """Let the system read a block that will be opened soon."""
        if step.tier == COLD:
            self._cold.expect(step.info.kind, step.info.address)
        elif step.tier == SHARED and self._shared is not None:
            self._shared.expect(step.info.kind, step.info.address)

    def load_boundary(self, match: Match, limit: int) -> BoundaryState | None:
        """Load the verified boundary state that allows the greatest length up to ``limit``."""
        limit = min(limit, match.n_tokens)
        usable = [(b.nearest(limit), b.info) for b in match.boundaries if b.nearest(limit)]
        for n, info in sorted(usable, key=lambda item: -item[0]):
            got = self._open(info, match.tokens[info.start : n])
            if got is None:
                continue
            item, tier = got
            if n < item.info.first:
                self._cold.correct(item.info)
                continue
            try:
                windows, states = _content(item, match.key)
            except DamagedError as error:
                self._cold.reject(item.info, str(error))
                continue
            self._on_read(info.address)
            cut = tuple(_below(window, n) for window in windows)
            held = item.info
            return BoundaryState(n, cut, states, held.is_exact, held.address, tier, item.size_bytes)
        return None

    def _open(self, info: Info, tokens: IntArray) -> tuple[Item, str] | None:
        """Open a block or state, its tokens compared; None where it is gone or bad."""
        item: Item | None = self._warm.get(info.address)
        tier = WARM
        if item is None and (self._shared is None or self._cold.info(info.address) is not None):
            item, tier = self._cold.read(info.kind, info.address), COLD
        if item is None and self._shared is not None:
            item, tier = self._shared.fetch(info.kind, info.address), SHARED
            if item is not None:
                self._on_fetch(item)
        if item is None:
            return None
        held = item.info
        if (held.root, held.start) != (info.root, info.start):
            self._cold.reject(held, "it says that it belongs to another place or model")
            return None
        if common_prefix(held.tokens, tokens) < len(tokens):
            self._cold.correct(held)
            return None
        return item, tier


def _is_at(info: Info, key: ModelKey, start: int) -> bool:
    """Return true if the catalogue's word for a block fits the place where it was found."""
    return info.start == start and info.root == key.root


def _content(item: Item, key: ModelKey) -> tuple[tuple[WindowRows, ...], States]:
    """Return the rows and states of a boundary state.

    Raises:
        DamagedError: the file is of another model, or lacks an array.
    """
    if isinstance(item, Unsealed):
        return item.windows, item.states
    return item.windows_for(key), item.states_for(key)


def _below(window: WindowRows, n: int) -> WindowRows:
    """Return the positions below ``n``."""
    keep = int(np.searchsorted(window.positions, n))
    return WindowRows(window.positions[:keep], slice_rows(window.rows, 0, keep))

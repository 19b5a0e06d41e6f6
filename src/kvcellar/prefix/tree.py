"""The base of the radix and the hashed index: paths of nodes, their locks, and their eviction.

Both keep a tree whose paths are token histories; they differ in how they find the next node. The
node of a radix tree is as long as nothing branches off, the node of a hashed index is one block.

Least recently used without a heap: every unlocked node is in one ordered dict, and whoever uses a
node moves it and then each ancestor to the end, the deepest first. So a node never stands behind
its parent, and the first of the dict is a leaf: the next one to go.

Sources: SGLang's radix cache and mini-sglang's walk-through of it (the locked path, the two sizes,
splits); SGLang's sliding-window variant for the question that windows ask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from kvcellar.bookkeeping.cells.compaction import Relocation, relocated
from kvcellar.errors import CacheFullError, PrefixError
from kvcellar.prefix.nodes import (
    PathNode,
    by_use,
    can_resume,
    chains_of,
    check_block_size,
    check_sights,
    joined,
    owned,
)
from kvcellar.prefix.protocol import Evicted, Inserted, PrefixHandle, PrefixMatch, SizeInfo
from kvcellar.prefix.snapshots import Marks
from kvcellar.sight import Sight
from kvcellar.states import STATE_SIGHT
from kvcellar.types import IntArray

FIRST_LOOK = 256
"""Lengths that are tried at once for one that every window can resume from; then 4 times more."""


class PathTree(ABC):
    """Paths of nodes with locks, sizes and eviction. A subclass finds, inserts and splits.

    Invariants (asserted by ``check``):
      - every node but the root starts and stops at a multiple of ``block_size``;
      - a full layer group has a cell for every position;
      - a node is locked exactly if a locked handle ends in its subtree: locks cover whole paths;
      - ``size_info`` is what the unlocked and the locked nodes hold;
      - unlocked nodes are in the order in which they were used last, never behind their parent.
    """

    def __init__(self, sights: Sequence[Sight], block_size: int) -> None:
        """Create an empty index.

        Args:
            sights: per layer group, how much of its history a query sees.
            block_size: tokens per block; only whole blocks are stored and matched. A sequence whose
                end is stored without a rest of up to block_size - 1 tokens can be resumed there
                only if its layer groups still hold that much more (``CacheConfig.window_slack``).

        Raises:
            ConfigError: no sights, or a block size below 1.
        """
        self.sights = check_sights(sights)
        self.block_size = check_block_size(block_size)
        self._windowed = not all(sight.is_full for sight in self.sights)
        # known by itself: rows, too, may be seen in a window of 2
        self._has_states = self.sights[-1] is STATE_SIGHT
        self._reach = max(sight.most_before for sight in self.sights)
        """How far behind a length a query looks at most, where it does not see all."""
        self._start_over()

    def _start_over(self) -> None:
        self._root = self._new_root()
        self._lru: OrderedDict[PathNode, None] = OrderedDict()
        self._n_stored = 0
        self._n_evictable = 0
        self._evictable_cells = [0] * len(self.sights)
        self._marks = Marks()

    # Parts for both indexes --------------------------------------------------------------------

    @abstractmethod
    def _new_root(self) -> PathNode:
        """Return the root of an empty index."""

    @abstractmethod
    def _forget(self, node: PathNode) -> None:
        """Take a leaf out of what walks look in."""

    @abstractmethod
    def _nodes(self) -> Iterator[PathNode]:
        """Yield every node but the root."""

    def _no_cells(self) -> IntArray:
        return np.empty((len(self.sights), 0), dtype=np.int64)

    def _held(self, cells: IntArray) -> list[int]:
        """Count the positions that have a cell, per layer group; [] without windows: all have."""
        held: list[int] = np.count_nonzero(cells >= 0, axis=1).tolist() if self._windowed else []
        return held

    def _check_full(self, given: IntArray, first: int) -> None:
        """Raise a PrefixError where a full group has no cell for a position from ``first`` on."""
        for group, sight in enumerate(self.sights):
            if sight.is_full and bool((given[group, first:] < 0).any()):
                raise PrefixError(
                    f"layer group {group} keeps all of the history, and insert_prefix got no cell "
                    f"for {int((given[group, first:] < 0).sum())} of its positions from {first} on"
                )

    def _append(self, node: PathNode) -> None:
        """Count a new, unlocked leaf that the subclass has just linked to its parent."""
        assert node.parent is not None
        node.parent.n_children += 1
        self._lru[node] = None
        self._n_stored += node.stop - node.start
        self._count(node, 1)

    def _fill(self, node: PathNode, given: IntArray) -> list[IntArray]:
        """Put cells where windows of the path to ``node`` hold none; return the adopted, per group.

        This keeps a trunk's end resumable beside a turn's end: each insertion brings its own tail.
        """
        if not self._windowed:
            return [joined(())] * len(self.sights)
        parts: list[list[IntArray]] = [[] for _ in self.sights]
        brought = np.flatnonzero(
            (given[[not sight.is_full for sight in self.sights], : node.stop] >= 0).any(axis=0)
        )
        first = int(brought[0]) if brought.size else node.stop
        while node.stop > first:
            part = given[:, node.start : node.stop]
            new = (node.cells < 0) & (part >= 0)
            if new.any():
                node.cells[new] = part[new]
                if not node.is_locked:
                    self._count(node, -1)
                node.n_held = self._held(node.cells)
                if not node.is_locked:
                    self._count(node, 1)
                for group, mask in enumerate(new):
                    parts[group].append(part[group, mask])
            assert node.parent is not None
            node = node.parent
        return [joined(group[::-1]) for group in parts]

    def _touch(self, node: PathNode) -> None:
        """Count the path to ``node``, and a snapshot at its end, as used now.

        Locked nodes are in no order.
        """
        if self._has_states:
            self._marks.use(node.cells[-1, -1:])
        while node is not self._root and not node.is_locked:
            self._lru.move_to_end(node)
            assert node.parent is not None
            node = node.parent

    def _path_cells(self, node: PathNode, first: int, stop: int) -> IntArray:
        """Return the cells of positions on the path to ``node``, ``[n_groups, stop - first]``."""
        parts = []
        while node.stop > first:
            if node.start < stop:
                lo, hi = max(first, node.start) - node.start, min(stop, node.stop) - node.start
                parts.append(node.cells[:, lo:hi])
            assert node.parent is not None
            node = node.parent
        return np.concatenate(parts[::-1], axis=1) if parts else self._no_cells()

    def _resume_point(self, node: PathNode, limit: int, floor: int) -> int:
        """Return the longest length in ``(floor, limit]`` that all groups resume from, or floor.

        Args:
            node: a node whose path reaches ``limit``.
            limit: the most tokens.
            floor: a multiple of the block size.
        """
        hi, look = limit - limit % self.block_size, max(FIRST_LOOK, self.block_size)
        if not self._windowed:
            return max(hi, floor)
        if hi - floor == self.block_size and not self._ends_held(node, hi):
            return floor  # one length to try, and no need to look far
        while hi > floor:
            lo = max(floor, hi - look)
            first = max(0, min(lo, lo + 1 - self._reach))
            cells = self._path_cells(node, first, hi)
            lengths = np.flatnonzero(can_resume(cells, self.sights, first, lo)) + lo + 1
            lengths = lengths[lengths % self.block_size == 0]
            if lengths.size:
                return int(lengths[-1])
            hi, look = lo, 4 * look
        return floor

    def _ends_held(self, node: PathNode, stop: int) -> bool:
        """Return true if groups hold the token before ``stop``, in ``node``, that need it there."""
        return all(
            sight.is_full or sight.first_seen(stop) == stop or cells[stop - 1 - node.start] >= 0
            for cells, sight in zip(node.cells, self.sights, strict=True)
        )

    def _match_at(self, node: PathNode, length: int, n_matched: int) -> PrefixMatch:
        """Return the match that ends where ``node`` ends; the path to it counts as used."""
        self._touch(node)
        cells = self._path_cells(node, 0, length)
        return PrefixMatch(length, tuple(cells), PrefixHandle(length, node), n_matched)

    def _inserted(self, node: PathNode, n_present: int, adopted: Sequence[IntArray]) -> Inserted:
        """Return what an insertion that ends where ``node`` ends has brought; it counts as used."""
        if self._has_states:
            self._marks.use(adopted[-1])
        self._touch(node)
        return Inserted(n_present, PrefixHandle(node.stop, node), tuple(adopted))

    # Locks -------------------------------------------------------------------------------------

    def lock_handle(self, handle: PrefixHandle) -> None:
        """Protect the whole path, the matched node included, until ``unlock_handle``.

        Locks count: a handle that was locked twice is unlocked twice.

        Raises:
            PrefixError: the handle is stale, some of it was evicted since: match again. Nothing was
                changed.
        """
        node = self._node(handle)
        if node is None:
            raise PrefixError(
                f"the handle of {handle.length} tokens is stale, some of them were evicted; call "
                f"match_prefix again"
            )
        was_locked = node.is_locked
        node.pins += 1
        while node is not self._root and not was_locked:
            del self._lru[node]
            self._count(node, -1)
            assert node.parent is not None
            node = node.parent
            was_locked = node.is_locked
            node.n_locked_children += 1

    def unlock_handle(self, handle: PrefixHandle) -> None:
        """Take one lock back. What no other lock holds can be evicted, as the most recently used.

        Raises:
            PrefixError: the handle is not locked, or the index was reset; nothing was changed.
        """
        node = self._node(handle)
        if node is None or not node.pins:
            raise PrefixError(
                f"the handle of {handle.length} tokens is not locked in this index; unlock what "
                f"was locked, once"
            )
        node.pins -= 1
        while node is not self._root and not node.is_locked:
            self._lru[node] = None
            self._count(node, 1)
            assert node.parent is not None
            node = node.parent
            node.n_locked_children -= 1

    def _node(self, handle: PrefixHandle) -> PathNode | None:
        """Return the node that ends where the handle does; None where that is no longer so."""
        node = handle.node
        if not isinstance(node, PathNode) or node.owner is not self or node.stop != handle.length:
            return None
        return node

    def _count(self, node: PathNode, sign: int) -> None:
        """Count a node that became evictable (1), or is no longer (-1)."""
        self._n_evictable += sign * (node.stop - node.start)
        for group, n_held in enumerate(node.n_held):
            self._evictable_cells[group] += sign * n_held

    # Eviction ----------------------------------------------------------------------------------

    def evict(self, n_tokens: int) -> Evicted:
        """Give up at least ``n_tokens`` tokens, the least recently used first, from their ends.

        The tail of a path goes first and the head stays, up to a block. More than asked goes where
        it would be of no use: what is left of a path ends where every window can resume, at another
        branch, or at a lock. Asking for 0 or less gives up nothing.

        Raises:
            CacheFullError: fewer tokens are evictable; nothing was changed.
        """
        if n_tokens > self._n_evictable:
            raise CacheFullError(
                f"asked to evict {n_tokens} tokens, {self._n_evictable} evictable of "
                f"{self._n_stored} stored; the rest is locked: end a sequence or ask for less"
            )
        parts: list[IntArray] = [self._no_cells()]
        n_gone = 0
        while n_gone < n_tokens:
            n_gone += self._trim(next(iter(self._lru)), n_tokens - n_gone, parts)
        return self._evicted(n_gone, parts)

    def evict_states(self, n_slots: int, held: Collection[int] = ()) -> Evicted:
        """Give up ``n_slots`` snapshots of states, the cheapest, or none where fewer may go.

        A snapshot costs the tokens since the one before it on its path, weighed by its use: see
        ``snapshots.py``. Rows stay, and what is locked may go too: who stands on a path has a slot
        of its own. Without recurrent layers there is nothing to give up.

        Args:
            n_slots: how many.
            held: slots that somebody else holds, so that it would free nothing to give them up.
        """
        if not self._has_states or n_slots <= 0:
            return Evicted(0, tuple(self._no_cells()))
        gone = self._marks.cheapest(self._nodes(), n_slots, held)
        for one in gone:
            if not one.node.is_locked:
                self._evictable_cells[-1] -= 1
            one.node.n_held[-1] -= 1
            one.node.cells[-1, one.at] = -1
        slots = np.array([one.slot for one in gone], dtype=np.int64)
        self._marks.forget(slots)
        return Evicted(0, (*self._no_cells()[1:], slots))

    def states_costs(self, n_slots: int, late: Collection[int], own: int) -> list[int]:
        """Return what the next ``n_slots`` snapshots to go are worth; see ``Marks.costs``."""
        nodes = self._nodes() if self._has_states else ()
        return self._marks.costs(nodes, n_slots, late, own)

    def _evicted(self, n_tokens: int, parts: Sequence[IntArray]) -> Evicted:
        """Return what went with these cells, ``[n_groups, n]`` each; forget their snapshots."""
        gone = np.concatenate(parts, axis=1)
        if self._has_states:
            self._marks.forget(gone[-1])
        return Evicted(n_tokens, tuple(group[group >= 0] for group in gone))

    def demote(self, handle: PrefixHandle) -> None:
        """Make what only this history needs the next to be evicted; locked nodes stay locked.

        A stale handle is no error: there is nothing left to demote.
        """
        node = self._node(handle)
        path: list[PathNode] = []
        while node and node is not self._root and not node.is_locked:
            if node.n_children > bool(path):  # others go on from here
                break
            path.append(node)
            node = node.parent
        for node in reversed(path):
            self._lru.move_to_end(node, last=False)
            if self._has_states:
                self._marks.demote(node.cells[-1])

    def drop_path(self, handle: PrefixHandle, keep: int = 0) -> Evicted:
        """Give up what only this history needs, from its end down to ``keep`` tokens, at once.

        Stops at a lock and where another history branches off. A stale handle gives up nothing.
        """
        keep += -keep % self.block_size
        node, parts, n_gone = self._node(handle), [self._no_cells()], 0
        while node and node.stop > keep and not node.n_children and not node.is_locked:
            if node.start < keep:
                n_gone += node.stop - keep
                parts.append(self._shorten(node, keep))
                break
            n_gone += node.stop - node.start
            parts.append(node.cells)
            node = self._drop(node)
        return self._evicted(n_gone, parts)

    def _trim(self, node: PathNode, n_tokens: int, parts: list[IntArray]) -> int:
        """Cut ``n_tokens`` or more off a leaf, and what is of no use then; return how many went."""
        n_gone = 0
        while True:
            keep = self._resume_point(node, node.stop - n_tokens, node.start)
            n_gone += node.stop - keep
            if keep == node.stop:
                return n_gone
            if keep > node.start:
                parts.append(self._shorten(node, keep))
                return n_gone
            parts.append(node.cells)
            parent = self._drop(node)
            if parent is self._root or parent.n_children or parent.is_locked:
                return n_gone
            node, n_tokens = parent, 0

    def _shorten(self, node: PathNode, stop: int) -> IntArray:
        """Cut an unlocked leaf back to ``stop``; return the cells that went."""
        self._count(node, -1)
        self._n_stored -= node.stop - stop
        gone = node.cells[:, stop - node.start :]
        node.cells = owned(node.cells[:, : stop - node.start])
        node.n_held = [n - m for n, m in zip(node.n_held, self._held(gone), strict=True)]
        node.stop = stop
        self._count(node, 1)
        return gone

    def _drop(self, node: PathNode) -> PathNode:
        """Take an unlocked leaf out; return its parent."""
        assert node.parent is not None and not node.n_children and not node.is_locked
        self._forget(node)
        self._count(node, -1)
        self._n_stored -= node.stop - node.start
        del self._lru[node]
        node.owner = None
        node.parent.n_children -= 1
        return node.parent

    # All of it ---------------------------------------------------------------------------------

    @property
    def n_snapshots(self) -> int:
        """Slots of states that the index refers to."""
        return len(self._marks)

    def size_info(self) -> SizeInfo:
        """Return how much is stored, and how much of it could go."""
        cells = self._evictable_cells if self._windowed else [self._n_evictable] * len(self.sights)
        return SizeInfo(self._n_evictable, self._n_stored - self._n_evictable, tuple(cells))

    def held_cells(self) -> tuple[IntArray, ...]:
        """Return every cell that the index refers to, per layer group, in no order."""
        return self._cells_of(self._nodes())

    def locked_cells(self) -> tuple[IntArray, ...]:
        """Return the cells of what is locked, per layer group, in no order."""
        return self._cells_of(node for node in self._nodes() if node.is_locked)

    def chains(self) -> list[IntArray]:
        """Return stretches of stored histories in which nothing branches off, last used first.

        Whoever copies the cells of one of them together leaves no other history in more runs.

        Returns:
            The cells of each stretch's positions, ``[n_groups, n]``, -1 for none.
        """
        return chains_of(self._nodes(), self._root, self._lru)

    def by_use(self) -> Iterator[PathNode]:
        """Yield every node, each behind its parent: the locked, then those used last first."""
        return by_use(self._nodes(), self._lru)

    def relocate(self, moved: Relocation) -> None:
        """Refer to cells where they are now that they were copied elsewhere.

        Args:
            moved: per layer group, as ``SeqCache.compact`` says.
        """
        for node in self._nodes():
            node.cells = np.stack(relocated(tuple(node.cells), moved))
        if self._has_states and moved[-1] is not None:
            self._marks.relocate(moved[-1])

    def _cells_of(self, nodes: Iterable[PathNode]) -> tuple[IntArray, ...]:
        cells = np.concatenate([self._no_cells(), *(node.cells for node in nodes)], axis=1)
        return tuple(group[group >= 0] for group in cells)

    def reset(self) -> tuple[IntArray, ...]:
        """Forget everything, locked or not; return the cells to release, per layer group.

        Handles from before are stale.
        """
        cells = self.held_cells()
        for node in [self._root, *self._nodes()]:
            node.owner = None
        self._start_over()
        return cells

    def check(self) -> None:
        """Assert the invariants."""
        nodes = list(self._nodes())
        locked_below, children = dict[PathNode, int](), dict[PathNode, int]()
        for node in nodes:
            assert node.parent is not None and node.owner is self
            assert node.start == node.parent.stop, "a node starts where its parent stops"
            assert node.start < node.stop and node.stop % self.block_size == 0
            assert node.cells.shape == (len(self.sights), node.stop - node.start)
            assert node.n_held == self._held(node.cells)
            for cells, sight in zip(node.cells, self.sights, strict=True):
                assert not sight.is_full or (cells >= 0).all(), "full groups hold everything"
            children[node.parent] = children.get(node.parent, 0) + 1
            locked_below[node.parent] = locked_below.get(node.parent, 0) + node.is_locked
        for node in [self._root, *nodes]:
            assert node.n_children == children.get(node, 0)
            assert node.pins >= 0 and node.n_locked_children == locked_below.get(node, 0)
        assert self._n_stored == sum(n.stop - n.start for n in nodes)
        assert self._n_evictable == sum(n.stop - n.start for n in nodes if not n.is_locked)
        unlocked = [node.cells for node in nodes if not node.is_locked]
        held = np.count_nonzero(np.concatenate([self._no_cells(), *unlocked], axis=1) >= 0, axis=1)
        assert self.size_info().evictable_cells == tuple(held.tolist())
        if self._has_states:
            slots = self.held_cells()[-1].tolist()
            assert len(self._marks) == len(slots) and all(slot in self._marks for slot in slots)
        order = {node: i for i, node in enumerate(self._lru)}
        assert order.keys() == {n for n in nodes if not n.is_locked}, "unlocked nodes have an order"
        for node in order:
            assert node.parent is not None
            assert order.get(node.parent, len(order)) > order[node], (
                "a child goes before its parent"
            )

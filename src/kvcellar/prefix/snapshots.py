"""Snapshots of recurrent states in an index, and in which order they go: what costs least, first.

A snapshot is a slot of states at a position of a path. What it saves is the computing of the tokens
since the snapshot before it on its path. Greedy-dual (Young, 1994) weighs that by use: a snapshot's
worth is what it saves, on top of a mark that stood, when it was used last, at the worth of the last
one that went. So of two that are used alike the cheaper one goes, what nobody uses goes sooner or
later, however dear it is, and no constant says when.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import numpy as np

from kvcellar.prefix.nodes import PathNode
from kvcellar.types import IntArray


class Snapshot:
    """A slot of states in a node of a path.

    Attributes:
        node: the node that refers to it.
        at: its index in the node's cells.
        slot: the slot.
        before: the snapshot before it on its path; None: there is none.
    """

    __slots__ = ("at", "before", "node", "slot")

    def __init__(self, node: PathNode, at: int, before: Snapshot | None) -> None:
        self.node = node
        self.at = at
        self.slot = int(node.cells[-1, at])
        self.before = before

    @property
    def length(self) -> int:
        """Tokens that its states are behind."""
        return self.node.start + self.at + 1

    @property
    def n_saved(self) -> int:
        """Tokens that are to be computed again without it."""
        return self.length - (self.before.length if self.before is not None else 0)


class Marks:
    """Marks of the snapshots of one index: how much each was worth more, when it was used last."""

    def __init__(self) -> None:
        """Create the marks of no snapshots."""
        self._level: float = 0
        """The worth of the last snapshot that went."""
        self._marks: dict[int, float] = {}
        """By slot, in the order in which they were used last."""

    def __contains__(self, slot: int) -> bool:
        """Return true if a slot is one of the index's snapshots."""
        return slot in self._marks

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return len(self._marks)

    def use(self, slots: IntArray) -> None:
        """Count snapshots, new or known, as used now; -1 is none."""
        for slot in slots[slots >= 0].tolist():
            self._marks.pop(slot, None)
            self._marks[slot] = self._level

    def demote(self, slots: IntArray) -> None:
        """Let these go before any that is used after this; -1 is none."""
        for slot in slots[slots >= 0].tolist():
            self._marks[slot] = -math.inf

    def forget(self, slots: IntArray) -> None:
        """Take out snapshots that are no longer the index's; -1 is none."""
        for slot in slots[slots >= 0].tolist():
            del self._marks[slot]

    def relocate(self, new: IntArray) -> None:
        """Know slots by their new numbers, of which ``new`` has one for every old one."""
        self._marks = {int(new[slot]): mark for slot, mark in self._marks.items()}

    def cheapest(self, nodes: Iterable[PathNode], n: int, held: Collection[int]) -> list[Snapshot]:
        """Choose ``n`` snapshots to go, in this order, or none where fewer may.

        What the dearest was worth is where marks begin from now on.

        Args:
            nodes: all nodes of the index.
            n: how many.
            held: slots that are to stay.
        """
        left = snapshots_of(nodes)
        if n > sum(one.slot not in held for one in left):
            return []
        chosen = list(islice(self._in_order(left, held), n))
        for gone in chosen:
            self._level = max(self._level, self._marks[gone.slot] + gone.n_saved)
        return chosen

    def costs(
        self, nodes: Iterable[PathNode], n: int, late: Collection[int], own: int
    ) -> list[int]:
        """Return what each of the ``n`` snapshots to go next is worth, in tokens; change nothing.

        One that somebody wants is worth what it saves, the others less by what the mark has risen
        since their last use. The last of a path on which somebody runs, or is about to, costs
        nothing: its sequence is past it, and leaves a later one.

        Args:
            nodes: all nodes of the index.
            n: how many are to go; those that cost nothing are left out.
            late: slots that are to go after all others, and that somebody else wants.
            own: the slot that somebody is about to go on from.
        """
        left = snapshots_of(nodes)
        followed = {one.before for one in left}
        dear = [
            one
            for one in left
            if one in followed or one.slot in late or not (one.node.is_locked or one.slot == own)
        ]
        n -= len(left) - len(dear)
        gone = islice(self._in_order(dear, late), max(0, n))
        return [one.n_saved if one.slot in late else self._aged(one) for one in gone]

    def _aged(self, one: Snapshot) -> int:
        """Return what a snapshot saves, less what the mark has risen since its last use."""
        return int(max(0, one.n_saved + self._marks[one.slot] - self._level))

    def _in_order(self, left: list[Snapshot], late: Collection[int]) -> Iterator[Snapshot]:
        """Yield snapshots as they are to go, ``late`` ones behind the others; empties the list."""
        used = {slot: order for order, slot in enumerate(self._marks)}
        while left:
            gone = min(
                left,
                key=lambda one: (
                    one.slot in late,
                    self._marks[one.slot] + one.n_saved,
                    used[one.slot],
                ),
            )
            left.remove(gone)
            for one in left:
                if one.before is gone:
                    one.before = gone.before
            yield gone


def snapshots_of(nodes: Iterable[PathNode]) -> list[Snapshot]:
    """Return the snapshots of all nodes of an index, each with the one before it on its path."""
    found: dict[PathNode, list[Snapshot]] = {}
    for node in nodes:
        if not node.n_held[-1]:
            continue
        before: Snapshot | None = None
        found[node] = []
        for at in np.flatnonzero(node.cells[-1] >= 0).tolist():
            before = Snapshot(node, at, before)
            found[node].append(before)
    for node, snapshots in found.items():
        above = node.parent
        while above is not None and above not in found:
            above = above.parent
        if above is not None:
            snapshots[0].before = found[above][-1]
    return [one for snapshots in found.values() for one in snapshots]

"""Draft trees: proposed tokens that await verification, on the same cells as everything else.

A tree hangs off the end of one sequence. ``propose`` appends a frontier, the next forward's
queries; a breadth-first drafter appends one frontier per level, a verifier the whole tree at once.
``commit`` keeps one chain from the root and drops the rest.

Node i has its *place* at position ``base + i``: the sequence claims the cells there as it would for
tokens, so any layout of rows carries trees. Its position, which the model sees, is ``base`` plus
its depth. An accepted chain is moved to the first places, where its tokens belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcellar.errors import ProposalError
from kvcellar.types import BoolArray


class DraftTree:
    """Parents, depths and frontiers of the proposed tokens after ``base`` committed ones.

    Nodes are numbered in the order they were proposed, across frontiers; a parent is a lower
    number, or -1 for a root, which follows the last committed token.
    """

    def __init__(self, base: int = 0) -> None:
        """Create a tree without nodes after ``base`` committed tokens."""
        self.base = base
        self.n_forwarded = 0
        """Nodes that have been through a forward; the others await theirs."""
        self.n_placed = 0
        """Nodes that have cells: those, and the ones of a step that is open."""
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.frontier_start = 0

    @property
    def n_nodes(self) -> int:
        """Nodes in all frontiers."""
        return len(self.parents)

    @property
    def frontier_size(self) -> int:
        """Nodes in the last frontier."""
        return self.n_nodes - self.frontier_start

    @property
    def is_pending(self) -> bool:
        """True if the last frontier still awaits its forward."""
        return self.n_forwarded < self.n_nodes

    @property
    def place(self) -> int:
        """The position where the cells of the last frontier begin."""
        return self.base + self.frontier_start

    def check_frontier(self, parents: Sequence[int]) -> None:
        """Make sure that these parents could be appended.

        Raises:
            ProposalError: none, or a parent that is not an earlier node; nothing was changed.
        """
        if not parents:
            raise ProposalError("propose got no nodes; a frontier has at least one")
        for i, parent in enumerate(parents):
            node = self.n_nodes + i
            if not -1 <= parent < node:
                raise ProposalError(
                    f"node {node} names parent {parent}; a parent is -1 (the last committed "
                    f"token) or an earlier node, 0 to {node - 1}"
                )

    def propose(self, parents: Sequence[int]) -> None:
        """Append a frontier: one node per parent.

        Raises:
            ProposalError: see ``check_frontier``.
        """
        self.check_frontier(parents)
        self.frontier_start = self.n_nodes
        for parent in parents:
            self.parents.append(int(parent))
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)

    def frontier_positions(self) -> list[int]:
        """Return the position of every node of the last frontier: base plus depth."""
        return [self.base + depth for depth in self.depths[self.frontier_start :]]

    def ancestor_mask(self) -> BoolArray:
        """Return which nodes each frontier node sees, ``[frontier_size, n_nodes]``.

        A node sees itself and its ancestors, never a sibling; the committed prefix is seen whole
        and has no columns here.
        """
        lineage = np.zeros((self.n_nodes, self.n_nodes), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                lineage[node] = lineage[parent]
            lineage[node, node] = True
        return lineage[self.frontier_start :]

    def commit_rows(self, accepted: Sequence[int]) -> list[int]:
        """Return the row map of a commit: node ``rows[i]`` becomes the token at ``base + i``.

        Args:
            accepted: nodes of one chain from a root downwards; empty accepts nothing.

        Raises:
            ProposalError: a node that was not proposed or not yet forwarded, or no chain.
        """
        rows = list(accepted)
        above = -1
        for node in rows:
            if not 0 <= node < self.n_nodes:
                raise ProposalError(
                    f"commit names node {node}; {self.n_nodes} nodes are proposed"
                    + (f", 0 to {self.n_nodes - 1}" if self.n_nodes else "; call propose first")
                )
            if self.parents[node] != above:
                raise ProposalError(
                    f"commit needs a chain from a root downwards: node {node} hangs off "
                    f"{self.parents[node]}, the chain so far ends at {above} (-1 is the last "
                    f"committed token)"
                )
            above = node
        if rows and rows[-1] >= self.n_forwarded:
            node = next(row for row in rows if row >= self.n_forwarded)
            raise ProposalError(
                f"commit names node {node}, whose frontier has not been through a forward yet; "
                f"run it first"
            )
        return rows


class Drafts:
    """The trees of the sequences that have one."""

    def __init__(self) -> None:
        """Create the drafts of sequences without trees."""
        self._trees: dict[int, DraftTree] = {}

    def __bool__(self) -> bool:
        """Return true if there is a tree."""
        return bool(self._trees)

    def seq_ids(self) -> list[int]:
        """Return the sequences that have a tree."""
        return list(self._trees)

    def of(self, seq_id: int) -> DraftTree | None:
        """Return a sequence's tree, None where it has none."""
        return self._trees.get(seq_id)

    def put(self, seq_id: int, tree: DraftTree) -> None:
        """Give a sequence its tree."""
        self._trees[seq_id] = tree

    def drop(self, seq_id: int) -> None:
        """Forget the tree of a sequence."""
        del self._trees[seq_id]

    def clear(self) -> None:
        """Forget every tree."""
        self._trees.clear()

    def promised(self, besides: Iterable[int] = ()) -> dict[int, tuple[int, int]]:
        """Return what trees are promised: sequence -> (place, nodes that await a step).

        A sequence with a tree grows by nothing else until its commit, so all are there, with 0
        where nothing is awaited.

        Args:
            besides: sequences to leave out.
        """
        if not self._trees:
            return {}
        others = set(besides)
        return {
            seq_id: (tree.place, tree.frontier_size if tree.n_placed < tree.n_nodes else 0)
            for seq_id, tree in self._trees.items()
            if seq_id not in others
        }

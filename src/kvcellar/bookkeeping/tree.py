"""Draft trees: proposed tokens that await verification, on the same cells as everything else.

A tree hangs off the end of one sequence. ``propose`` appends a frontier, the next forward's
queries; a breadth-first drafter appends one frontier per level, a verifier the whole tree at once.
``commit`` keeps one chain from the root and drops the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.bookkeeping.cells import CellPool
from kvcellar.bookkeeping.reads import position_mask
from kvcellar.bookkeeping.sequences import SeqBookkeeping, Stretch, check_range, check_seq_id
from kvcellar.bookkeeping.spans import as_runs, positions_of
from kvcellar.bookkeeping.step import OpenStep
from kvcellar.checks import whole, wholes
from kvcellar.errors import CacheFullError, ProposalError, StepError, UnknownSequenceError
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    BoolArray,
    CacheConfig,
    IntArray,
    Run,
    cells_of,
    join_runs,
    runs_of,
)


class DraftTree:
    """Parents, depths and frontiers of the proposed tokens after ``base`` committed ones.

    Nodes are numbered in the order they were proposed, across frontiers; a parent is a lower
    number, or -1 for a root, which follows the last committed token.
    """

    def __init__(self, base: int = 0) -> None:
        """No nodes after ``base`` committed tokens."""
        self.base = base
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

    def check_frontier(self, parents: Sequence[int]) -> None:
        """Whether these parents could be appended.

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
        """The position of every node of the last frontier: base plus depth."""
        return [self.base + depth for depth in self.depths[self.frontier_start :]]

    def ancestor_mask(self) -> BoolArray:
        """``[frontier_size, n_nodes]``: which nodes each frontier node sees.

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
        """The row map of a commit: node ``rows[i]`` becomes the token at ``base + i``.

        Args:
            accepted: nodes of one chain from a root downwards; empty accepts nothing.

        Raises:
            ProposalError: a node that was not proposed, or no chain; nothing was changed.
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
        return rows


@dataclass(slots=True)
class Draft:
    """One sequence's tree and where its nodes live."""

    tree: DraftTree
    cells: list[list[int]]
    """Per layer group, the cell of every node that has been through a forward, or is in one."""
    is_pending: bool = False
    """Whether the last frontier still awaits its forward."""


class TreeBookkeeping(SeqBookkeeping):
    """Sequences that may each carry a draft tree.

    Everything that :class:`SeqBookkeeping` does, plus ``propose`` and ``commit``. In a step, a
    sequence with a proposed frontier brings exactly its nodes; one whose tree has been through a
    forward brings nothing until it is committed or has its next frontier (StepError). A cache used
    for one sequence needs no ``begin_step``: a forward without one means sequence 0.
    """

    def __init__(self, config: CacheConfig) -> None:
        """An empty cache without trees."""
        super().__init__(config)
        self._drafts: dict[int, Draft] = {}

    def can_extend(self, n: int = 1) -> bool:
        """Whether ``n`` more tokens fit, besides the nodes that are proposed already."""
        return super().can_extend(whole(n, "n") + self._n_pending())

    def _n_pending(self) -> int:
        return sum(d.tree.n_nodes - len(d.cells[0]) for d in self._drafts.values())

    # Proposing ---------------------------------------------------------------------------------

    def propose(self, parents: Sequence[int], seq_id: int = 0) -> list[int]:
        """Append a frontier to the sequence's tree: the queries of the next forward.

        Args:
            parents: one per node: an earlier node of this tree, or -1 for the last committed
                token.
            seq_id: the sequence that the tree hangs off; it need not hold tokens yet.

        Returns:
            The position of every node of the frontier.

        Raises:
            ProposalError: parents that are not earlier nodes, or a frontier that still awaits its
                forward; nothing was changed.
            CacheFullError: too few cells are free for it; nothing was changed.
            UnknownSequenceError: ``seq_id`` is negative; nothing was changed.
        """
        seq_id = check_seq_id(seq_id)
        parents = wholes(parents, "parents", ProposalError)
        self._settle()
        draft = self._drafts.get(seq_id)
        if draft is not None and draft.is_pending:
            raise ProposalError(
                f"sequence {seq_id} has a frontier of {draft.tree.frontier_size} nodes that awaits "
                f"its forward; run it, or commit([]) to drop the tree"
            )
        tree = draft.tree if draft else DraftTree(self._length.get(seq_id, 0))
        tree.check_frontier(parents)
        if not self.can_extend(len(parents)):
            free = max(0, self.n_free)
            raise CacheFullError(
                f"a frontier of {len(parents)} nodes needs as many cells, {free} free of "
                f"{self.capacity}; release a sequence or {self.config.more_room}"
            )
        tree.propose(parents)
        if draft is None:
            draft = self._drafts[seq_id] = Draft(tree, [[] for _ in self.groups])
        draft.is_pending = True
        return tree.frontier_positions()

    def has_tree(self, seq_id: int = 0) -> bool:
        """Whether the sequence has proposed nodes that are not committed."""
        return whole(seq_id, "seq_id", UnknownSequenceError) in self._drafts

    def n_nodes(self, seq_id: int = 0) -> int:
        """Proposed nodes of the sequence, 0 where it has no tree."""
        draft = self._drafts.get(whole(seq_id, "seq_id", UnknownSequenceError))
        return draft.tree.n_nodes if draft else 0

    def commit(self, accepted: Sequence[int], seq_id: int = 0) -> list[int]:
        """Keep one chain of the tree as the sequence's next tokens and drop the other nodes.

        The chain's bytes are moved to the first cells of the tree, so that the history stays in
        one run.

        Args:
            accepted: nodes from a root downwards; empty drops the whole tree.
            seq_id: whose tree.

        Returns:
            The row map: node ``rows[i]`` became the token at the old length plus i.

        Raises:
            ProposalError: no tree, a node that was not proposed or not yet forwarded, or no chain;
                nothing was changed.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        accepted = wholes(accepted, "accepted", ProposalError)
        self._settle()
        draft = self._drafts.get(seq_id)
        if draft is None:
            raise ProposalError(f"sequence {seq_id} has no proposed nodes; call propose first")
        rows = draft.tree.commit_rows(accepted)
        for row in rows:
            if row >= len(draft.cells[0]):
                raise ProposalError(
                    f"commit names node {row}, whose frontier has not been through a forward yet; "
                    f"run it first"
                )
        base = draft.tree.base
        for group, pool in enumerate(self.pools):
            cells = draft.cells[group]
            kept = runs_of(cells[: len(rows)])
            self._compact(group, kept, [cells[row] for row in rows])
            pool.release(runs_of(cells[len(rows) :]))
            if kept:
                pool.adopt(seq_id, base, kept)
        del self._drafts[seq_id]
        if rows:
            self._length[seq_id] = base + len(rows)
        return rows

    def _compact(self, group: int, kept: list[Run], sources: list[int]) -> None:
        """Bring the accepted rows into the kept cells; sources never lie before their targets."""
        at = 0
        for run in kept:
            src = np.asarray(sources[at : at + run.length], dtype=np.int64)
            if not np.array_equal(src, cells_of([run])):
                self._move_cells(group, run.start, src)
            at += run.length

    # Steps -------------------------------------------------------------------------------------

    def _n_promised(self, stretches: list[Stretch]) -> int:
        waiting = set(self._drafts) - {stretch.seq_id for stretch in stretches}
        return sum(
            self._drafts[s].tree.frontier_size for s in waiting if self._drafts[s].is_pending
        )

    def _stretches(self, ids: list[int]) -> tuple[list[Stretch], list[int]]:
        stretches, positions = super()._stretches(ids)
        for stretch in stretches:
            draft = self._drafts.get(stretch.seq_id)
            if draft is None:
                continue
            tree = draft.tree
            if not draft.is_pending:
                raise StepError(
                    f"the tree of sequence {stretch.seq_id} awaits its commit; commit a chain, "
                    f"commit([]) to drop it, or propose the next frontier"
                )
            if stretch.n_tokens != tree.frontier_size or ids.count(stretch.seq_id) != len(
                tree.frontier_positions()
            ):
                raise StepError(
                    f"sequence {stretch.seq_id} proposed {tree.frontier_size} nodes; the step "
                    f"brings {ids.count(stretch.seq_id)} tokens for it"
                )
            stop = stretch.q_start + stretch.n_tokens
            positions[stretch.q_start : stop] = tree.frontier_positions()
        return stretches, positions

    def _implicit_step(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> OpenStep:
        if any(seq_id != 0 for seq_id in (*self._length, *self._drafts)):
            return super()._implicit_step(layer, n_tokens, positions)
        self.begin_step([0] * n_tokens, positions)
        assert self._open is not None
        return self._open

    def _claim(self, group: int, stretch: Stretch) -> list[Run]:
        draft = self._drafts.get(stretch.seq_id)
        if draft is None:
            return super()._claim(group, stretch)
        pool = self.pools[group]
        cells = draft.cells[group]
        if cells:
            after: int | None = cells[-1] + 1
        else:
            spans = pool.spans(stretch.seq_id)
            after = spans[-1].cell + spans[-1].length if spans else None
        runs = pool.take(stretch.n_tokens, after=after)
        taken = cells_of(runs)
        pool.pos[taken] = draft.tree.frontier_positions()
        cells.extend(taken.tolist())
        return runs

    def _reads(self, group: int, stretch: Stretch) -> list[AttendSpec]:
        draft = self._drafts.get(stretch.seq_id)
        if draft is None:
            return super()._reads(group, stretch)
        tree, window = draft.tree, self.groups[group].window
        queries = np.asarray(tree.frontier_positions())
        low = 0 if window is None else max(0, int(queries.min()) - window + 1)
        prefix = self.pools[group].spans(stretch.seq_id, low, tree.base)
        mask = tree.ancestor_mask()
        if window is not None:
            nodes = tree.base + np.asarray(tree.depths)
            mask = mask & position_mask(queries, nodes, window)
            if int(queries.max()) - window + 1 > low:
                keys = positions_of(prefix)
                mask = np.concatenate([position_mask(queries, keys, window), mask], axis=1)
        runs = join_runs((*as_runs(prefix), *runs_of(draft.cells[group])))
        return [AttendSpec(stretch.q_start, stretch.n_tokens, runs, AttendKind.EXPLICIT, mask)]

    def _complete(self, step: OpenStep) -> None:
        assert self._step is not None
        for stretch in self._step.stretches:
            draft = self._drafts.get(stretch.seq_id)
            if draft is not None:
                draft.is_pending = False
            else:
                self._length[stretch.seq_id] = stretch.first_pos + stretch.n_tokens

    def _undo(self, step: OpenStep) -> None:
        assert self._step is not None
        for stretch in self._step.stretches:
            draft = self._drafts.get(stretch.seq_id)
            if draft is None:
                continue
            for pool, cells in zip(self.pools, draft.cells, strict=True):
                pool.release(runs_of(cells[draft.tree.frontier_start :]))
                del cells[draft.tree.frontier_start :]
            draft.is_pending = True
        super()._undo(step)

    # Sequences ---------------------------------------------------------------------------------

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """As in :class:`SeqBookkeeping`; dropping the whole sequence drops its tree too.

        Raises:
            StepError: a part is dropped under a tree; commit it (or commit([])) first.
        """
        seq_id = whole(seq_id, "seq_id", UnknownSequenceError)
        p0, p1 = check_range(p0, p1)
        self._settle()
        if seq_id in self._drafts:
            is_all = p0 <= 0 and (p1 is None or p1 >= self._length.get(seq_id, 0))
            if not is_all:
                raise StepError(
                    f"sequence {seq_id} has {self.n_nodes(seq_id)} proposed nodes; commit them, or "
                    f"commit([]) to drop them, before a part of its history is dropped"
                )
            self.commit([], seq_id)
            if seq_id not in self._length:
                return
        super().seq_rm(seq_id, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """As in :class:`SeqBookkeeping`; the other sequences' trees go with them."""
        self._settle()
        self.seq_len(seq_id)
        for other in [s for s in self._drafts if s != seq_id]:
            self.commit([], other)
        super().seq_keep(seq_id)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """As in :class:`SeqBookkeeping`; only committed tokens are shared, never proposed nodes.

        Raises:
            StepError: ``dst`` has proposed nodes; nothing was changed.
        """
        src, dst = check_seq_id(src), check_seq_id(dst)
        self._settle()
        if src != dst:
            self._check_no_tree(dst)
        super().seq_cp(src, dst, p0, p1)

    def _check_no_tree(self, seq_id: int) -> None:
        if seq_id in self._drafts:
            raise StepError(
                f"sequence {seq_id} has {self.n_nodes(seq_id)} proposed nodes; commit them, or "
                f"commit([]) to drop them, before it gets other tokens"
            )

    def _check_start(self, verb: str, seq_id: int, tables: Sequence[IntArray]) -> list[int]:
        self._check_no_tree(seq_id)
        return super()._check_start(verb, seq_id, tables)

    def _clear(self) -> None:
        super()._clear()
        self._drafts.clear()

    def _held(self, pool: CellPool) -> list[int]:
        index = self.pools.index(pool)
        return [cell for draft in self._drafts.values() for cell in draft.cells[index]]

"""Sequences that may each carry a draft tree: the verbs of the cache's face."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kvcellar.bookkeeping.begin import begin_sequence_0, check_seq_id
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.bookkeeping.layouts.layout import Bytes
from kvcellar.bookkeeping.sequences import Sequences
from kvcellar.cache_config import CacheConfig
from kvcellar.checks import whole, wholes
from kvcellar.errors import CacheFullError, ProposalError, UnknownSequenceError


class TreeSequences(Sequences):
    """Sequences that may each carry a draft tree, over blocks of any size.

    In a step, a sequence with a proposed frontier brings exactly its nodes; one whose tree has been
    through a forward brings nothing until it is committed or has its next frontier (StepError). A
    cache used for one sequence needs no ``begin_step``: a forward without one means sequence 0.
    """

    def __init__(
        self, config: CacheConfig, pools: Bytes | None = None, *, block_size: int = 1
    ) -> None:
        """Create a cache without sequences; arguments and errors as in :class:`Sequences`."""
        super().__init__(config, pools, block_size=block_size, unasked=begin_sequence_0)

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
        self.steps.settle()
        drafts = self.steps.drafts
        tree = drafts.of(seq_id) or DraftTree(self.steps.lengths.get(seq_id, self.steps.origin))
        if tree.is_pending:
            raise ProposalError(
                f"sequence {seq_id} has a frontier of {tree.frontier_size} nodes that awaits "
                f"its forward; run it, or commit([]) to drop the tree"
            )
        tree.check_frontier(parents)
        place, is_new = tree.base + tree.n_nodes, not tree.n_nodes
        drafts.put(seq_id, tree)
        if not self.room.fits({**drafts.promised(), seq_id: (place, len(parents))}):
            if is_new:
                drafts.drop(seq_id)
            self._refuse_nodes(len(parents))
        tree.propose(parents)
        return tree.frontier_positions()

    def _refuse_nodes(self, n_nodes: int) -> NoReturn:
        """Raise CacheFullError: a frontier finds too few cells, or slots."""
        slots = ""
        if self.slots is not None:
            slots = f" and {self.slots.in_words(n_nodes)}, {self.slots.n_free} free"
        raise CacheFullError(
            f"a frontier of {n_nodes} nodes needs as many cells, {max(0, self.n_free)} "
            f"free of {self.capacity}{slots}; release a sequence or {self.config.more_room}"
        )

    def has_tree(self, seq_id: int = 0) -> bool:
        """Return true if the sequence has proposed nodes that are not committed."""
        return self.n_nodes(seq_id) > 0

    def n_nodes(self, seq_id: int = 0) -> int:
        """Return the number of proposed nodes of the sequence, 0 where it has no tree."""
        tree = self.steps.drafts.of(whole(seq_id, "seq_id", UnknownSequenceError))
        return tree.n_nodes if tree else 0

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
        self.steps.settle()
        tree = self.steps.drafts.of(seq_id)
        if tree is None:
            raise ProposalError(f"sequence {seq_id} has no proposed nodes; call propose first")
        rows = tree.commit_rows(accepted)
        for group, layout in enumerate(self.layouts):
            self.steps.move(group, layout.nodes_to_tokens(seq_id, tree.base, rows))
        if self.slots is not None:
            self.slots.nodes_to_tokens(seq_id, tree.base, rows)
        self.steps.drafts.drop(seq_id)
        if rows:
            self.steps.lengths[seq_id] = tree.base + len(rows)
        return rows

"""The radix index: every stored history is a path in a tree, and shared prefixes are stored once.

Edges are compressed: a node holds as many tokens as nothing branches off. A match that ends inside
a node splits it there, so that what was used and what was not age apart; nobody can see the split.

Sources: SGLang's RadixAttention (Zheng et al. 2023, arXiv:2312.07104) and mini-sglang's
walk-through of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcellar.history import common_prefix
from kvcellar.prefix.nodes import PathNode, Tokens, cells_array, joined, owned, token_array
from kvcellar.prefix.protocol import Inserted, PrefixHandle, PrefixMatch
from kvcellar.prefix.tree import PathTree
from kvcellar.sight import FULL, Sight
from kvcellar.types import IntArray


class RadixNode(PathNode):
    """A node with its tokens, and its children by their first block.

    Attributes:
        tokens: ``[stop - start]``.
        children: first block of a child's tokens, as bytes, to the child.
    """

    __slots__ = ("children", "tokens")

    def __init__(
        self,
        owner: RadixIndex,
        parent: RadixNode | None,
        start: int,
        tokens: IntArray,
        cells: IntArray,
        n_held: list[int],
    ) -> None:
        super().__init__(owner, parent, start, cells, n_held)
        self.tokens = tokens
        self.children: dict[bytes, RadixNode] = {}

    def ids(self) -> IntArray:
        """Return the node's tokens."""
        return self.tokens


class RadixIndex(PathTree):
    """Token histories to cells, by a compressed radix tree. See :class:`PathTree` for the rest."""

    _root: RadixNode

    def __init__(self, sights: Sequence[Sight] = (FULL,), block_size: int = 1) -> None:
        super().__init__(sights, block_size)

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest stored prefix of ``tokens`` from which every layer group can go on.

        Changes nothing that a caller can see, except that the match is the most recently used.
        A caller that needs the last token's logits leaves that token out.
        """
        node, n_matched = self._walk(token_array(tokens))
        length = self._resume_point(node, n_matched, 0)
        while length <= node.start and node.parent is not None:
            assert isinstance(node.parent, RadixNode)
            node = node.parent
        return self._match_at(self._ending_at(node, length), length, n_matched)

    def find_prefix(self, tokens: Tokens) -> PrefixHandle:
        """Return the longest stored prefix, whether it can be resumed or not; it counts as used."""
        node, n_matched = self._walk(token_array(tokens))
        node = self._ending_at(node, n_matched)
        self._touch(node)
        return PrefixHandle(node.stop, node)

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Return the cells of the longest stored prefix, per layer group; change nothing at all.

        -1 stands for a position that a window no longer holds.
        """
        node, n_matched = self._walk(token_array(tokens))
        return tuple(self._path_cells(node, 0, n_matched))

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Store a history; a rest that fills no block is left out.

        What is there already keeps its cells; where a window holds none, the new ones are adopted.

        Args:
            tokens: the history from position 0 on.
            cells: per layer group, the cell of each position; -1, in a window, for none.

        Raises:
            PrefixError: cells that do not fit the tokens; nothing was changed.
        """
        array = token_array(tokens)
        given = cells_array(cells, len(self.sights), array.size)
        stop = array.size - array.size % self.block_size
        node, n_present = self._walk(array)
        self._check_full(given[:, :stop], n_present)
        node = self._ending_at(node, n_present)
        adopted = self._fill(node, given)
        if n_present < stop:
            new = given[:, n_present:stop].copy()
            tail = array[n_present:stop].copy()
            leaf = RadixNode(self, node, n_present, tail, new, self._held(new))
            node.children[self._key(leaf)] = leaf
            self._append(leaf)
            adopted = [
                joined((old, group[group >= 0])) for old, group in zip(adopted, new, strict=True)
            ]
            node = leaf
        return self._inserted(node, n_present, adopted)

    def _walk(self, tokens: IntArray) -> tuple[RadixNode, int]:
        """Return the last node that has some of these tokens, and how many match: whole blocks."""
        node, at = self._root, 0
        stop = tokens.size - tokens.size % self.block_size
        while at < stop:
            child = node.children.get(tokens[at : at + self.block_size].tobytes())
            if child is None:
                break
            n = min(child.stop, stop) - at
            same = common_prefix(child.tokens[:n], tokens[at : at + n])
            at += same - same % self.block_size
            node = child
            if at < child.stop:
                break
        return node, at

    def _ending_at(self, node: RadixNode, stop: int) -> RadixNode:
        """Return the node of this path that ends at ``stop``: ``node``, or its head once split."""
        return node if node.stop == stop else self._split(node, stop)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two; return the new head.

        The object that was there becomes the tail, so handles and locks that end with it stay true;
        every lock on the tail holds the head too. The caller touches the head.
        """
        assert isinstance(node.parent, RadixNode) and node.start < at < node.stop
        n = at - node.start
        tokens, cells = owned(node.tokens[:n]), owned(node.cells[:, :n])
        head = RadixNode(self, node.parent, node.start, tokens, cells, self._held(cells))
        node.parent.children[self._key(head)] = head
        node.parent, node.start = head, at
        node.tokens, node.cells = owned(node.tokens[n:]), owned(node.cells[:, n:])
        node.n_held = [n - m for n, m in zip(node.n_held, head.n_held, strict=True)]
        head.children[self._key(node)] = node
        head.n_children = 1
        if node.is_locked:
            head.n_locked_children = 1
        else:
            self._lru[head] = None
        return head

    def _key(self, node: RadixNode) -> bytes:
        return node.tokens[: self.block_size].tobytes()

    # What the tree asks of its subclass --------------------------------------------------------

    def _new_root(self) -> RadixNode:
        return RadixNode(self, None, 0, np.empty(0, dtype=np.int64), self._no_cells(), [])

    def _forget(self, node: PathNode) -> None:
        assert isinstance(node, RadixNode) and isinstance(node.parent, RadixNode)
        del node.parent.children[self._key(node)]

    def _shorten(self, node: PathNode, stop: int) -> IntArray:
        assert isinstance(node, RadixNode)
        node.tokens = owned(node.tokens[: stop - node.start])
        return super()._shorten(node, stop)

    def _nodes(self) -> Iterator[RadixNode]:
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for node in self._nodes():
            assert node.tokens.size == node.stop - node.start
            assert isinstance(node.parent, RadixNode)
            assert node.parent.children[self._key(node)] is node
            for part in (node.tokens, node.cells):
                assert part.base is None or part.base.size <= 2 * part.size, "no base is leaked"

"""The hashed index: full blocks of tokens, found by a hash that is chained over those before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import xxhash

from kvcellar.prefix.nodes import PathNode, Tokens, cells_array, joined, token_array
from kvcellar.prefix.protocol import Inserted, PrefixHandle, PrefixMatch
from kvcellar.prefix.tree import PathTree
from kvcellar.sight import FULL, Sight
from kvcellar.types import IntArray

TOKEN_BYTES = 8
"""Bytes of a token where it is hashed or compared: little-endian int64."""


def block_digest(before: int | None, tokens: bytes) -> int:
    """Hash a block's tokens behind those of the blocks before it, with xxhash64.

    Args:
        before: digest of the block before this one, hashed as 8 little-endian bytes; None for the
            first block, which has no prefix.
        tokens: the block's tokens as little-endian int64.
    """
    prefix = b"" if before is None else before.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(prefix + tokens)


class HashedBlock(PathNode):
    """One full block of tokens; ``parent`` is the block before it.

    Attributes:
        digest: chained over this block and all before it.
        tokens: the block's tokens as int64 bytes.
    """

    __slots__ = ("digest", "tokens")

    def __init__(
        self,
        owner: HashedIndex,
        parent: HashedBlock | None,
        start: int,
        cells: IntArray,
        n_held: list[int],
        digest: int,
        tokens: bytes,
    ) -> None:
        super().__init__(owner, parent, start, cells, n_held)
        self.digest = digest
        self.tokens = tokens

    def ids(self) -> IntArray:
        """Return the block's tokens."""
        return np.frombuffer(self.tokens, dtype="<i8").astype(np.int64)


class HashedIndex(PathTree):
    """Token histories to cells, by a hash over each block that is chained over those before it.

    Only full blocks are hashed. A miss is sticky: nothing behind the first missing block is looked
    up. A digest alone proves nothing: a block counts as found if its tokens are the same and it
    follows the block that was found before it.

    Sources: vLLM's automatic prefix caching and ATOM's BlockManager.
    """

    _root: HashedBlock

    def __init__(
        self,
        sights: Sequence[Sight] = (FULL,),
        block_size: int = 16,
        *,
        digest: Callable[[int | None, bytes], int] = block_digest,
    ) -> None:
        """Create an empty index.

        Args:
            sights: per layer group, how much of its history a query sees.
            block_size: tokens per block.
            digest: from the digest before (None at the start) and a block's int64 bytes to the
                block's own.

        Raises:
            ConfigError: no sights, or a block size below 1.
        """
        self._digest = digest
        super().__init__(sights, block_size)

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest stored run of full blocks from which every layer group can go on.

        Changes nothing that a caller can see, except that the match is the most recently used.
        A caller that needs the last token's logits leaves that token out.
        """
        node = self._walk(self._chain(token_array(tokens)))
        n_matched = node.stop
        length = self._resume_point(node, n_matched, 0)
        while node.stop > length:
            assert isinstance(node.parent, HashedBlock)
            node = node.parent
        return self._match_at(node, length, n_matched)

    def find_prefix(self, tokens: Tokens) -> PrefixHandle:
        """Return the longest stored prefix, whether it can be resumed or not; it counts as used."""
        node = self._walk(self._chain(token_array(tokens)))
        self._touch(node)
        return PrefixHandle(node.stop, node)

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Return the cells of the longest stored run of blocks, per layer group; change nothing.

        -1 stands for a position that a window no longer holds.
        """
        node = self._walk(self._chain(token_array(tokens)))
        return tuple(self._path_cells(node, 0, node.stop))

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Store a history's full blocks; where two digests collide, only those before.

        What is there already keeps its cells; where a window holds none, the new ones are adopted.

        Args:
            tokens: the history from position 0 on.
            cells: per layer group, the cell of each position; -1, in a window, for none.

        Raises:
            PrefixError: cells that do not fit the tokens; nothing was changed.
        """
        array = token_array(tokens)
        given = cells_array(cells, len(self.sights), array.size)
        chain = list(self._chain(array))
        node, size = self._walk(chain), self.block_size
        n_present = node.stop
        self._check_full(given[:, : len(chain) * size], n_present)
        adopted = self._fill(node, given)
        new = given[:, n_present : len(chain) * size]
        held = np.count_nonzero(new.reshape(len(new), -1, size) >= 0, axis=2).T.tolist()
        for (digest, piece), n_held in zip(chain[n_present // size :], held, strict=True):
            if digest in self._blocks:
                break  # two histories, one digest: the one that came first stays
            cut = given[:, node.stop : node.stop + size].copy()
            node = HashedBlock(
                self, node, node.stop, cut, n_held if self._windowed else [], digest, piece
            )
            self._blocks[digest] = node
            self._append(node)
        adopted = [
            joined((old, new[new >= 0]))
            for old, new in zip(adopted, given[:, n_present : node.stop], strict=True)
        ]
        return self._inserted(node, n_present, adopted)

    def _chain(self, tokens: IntArray) -> Iterator[tuple[int, bytes]]:
        """Yield (digest, int64 bytes) of each full block; a rest that fills none is left out."""
        data, size = tokens.astype("<i8").tobytes(), self.block_size * TOKEN_BYTES
        digest: int | None = None
        for at in range(0, len(data) - size + 1, size):
            piece = data[at : at + size]
            digest = self._digest(digest, piece)
            yield digest, piece

    def _walk(self, chain: Iterable[tuple[int, bytes]]) -> HashedBlock:
        """Return the last block of the stored run that these begin with; the root for none."""
        node = self._root
        for digest, piece in chain:
            block = self._blocks.get(digest)
            if block is None or block.tokens != piece or block.parent is not node:
                break
            node = block
        return node

    # What the tree asks of its subclass --------------------------------------------------------

    def _new_root(self) -> HashedBlock:
        return HashedBlock(self, None, 0, self._no_cells(), [], 0, b"")

    def _forget(self, node: PathNode) -> None:
        assert isinstance(node, HashedBlock)
        del self._blocks[node.digest]

    def _nodes(self) -> Iterator[HashedBlock]:
        return iter(self._blocks.values())

    def _start_over(self) -> None:
        super()._start_over()
        self._blocks: dict[int, HashedBlock] = {}

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for digest, block in self._blocks.items():
            assert isinstance(block.parent, HashedBlock)
            before = block.parent.digest if block.parent is not self._root else None
            assert block.digest == digest == self._digest(before, block.tokens)
            assert block.stop - block.start == self.block_size
            assert block.cells.base is None, "a block keeps no larger array alive"

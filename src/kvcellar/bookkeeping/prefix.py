"""Prefix indexes: from token content to cells. One interface, three indexes.

An index says which cells hold the KV of tokens that were computed before. It refers to cells and
holds no bytes: the caller retains what ``insert_prefix`` adopted and releases what ``evict`` gave
up, each once. ``RadixIndex`` is the default, ``HashedIndex`` looks up hash-chained blocks, and
``NaiveIndex`` never finds anything.

How a sequence uses one: ``match_prefix`` its tokens but the last, ``lock_handle``, share the cells,
compute the rest; ``insert_prefix`` what it has computed as soon as others may want it, lock that
handle and unlock the old one; at its end insert once more, unlock, and let go of its own cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kvcellar.bookkeeping.blocks import block_digest, full_blocks
from kvcellar.bookkeeping.compaction import Relocation
from kvcellar.bookkeeping.prefix_tree import (
    Evicted,
    Inserted,
    PathNode,
    PathTree,
    PrefixHandle,
    PrefixMatch,
    SizeInfo,
    Tokens,
    check_windows,
    joined,
    spans_of,
    token_array,
)
from kvcellar.bookkeeping.radix import RadixIndex
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.types import IntArray

__all__ = [
    "Evicted",
    "HashedIndex",
    "Inserted",
    "NaiveIndex",
    "PrefixHandle",
    "PrefixIndex",
    "PrefixMatch",
    "RadixIndex",
    "SizeInfo",
    "make_index",
    "spans_of",
]


class PrefixIndex(Protocol):
    """Token content to cells. Integers only; what each method promises is said in PathTree."""

    windows: tuple[int | None, ...]
    page_size: int

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """The longest stored prefix from which every layer group can go on."""
        ...

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """The cells of the longest stored prefix; to look is not to use."""
        ...

    def lock_handle(self, handle: PrefixHandle) -> None:
        """Protect a whole path from eviction."""
        ...

    def unlock_handle(self, handle: PrefixHandle) -> None:
        """Take one lock back."""
        ...

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Store a history."""
        ...

    def evict(self, n_tokens: int) -> Evicted:
        """Give up at least so many tokens, the least recently used first."""
        ...

    def demote(self, handle: PrefixHandle) -> None:
        """Make what only this history needs the next to be evicted."""
        ...

    def drop_path(self, handle: PrefixHandle, keep: int = 0) -> Evicted:
        """Give up what only this history needs, down to ``keep`` tokens."""
        ...

    def chains(self) -> list[IntArray]:
        """Stretches of stored histories in which nothing branches off: their cells."""
        ...

    def relocate(self, moved: Relocation) -> None:
        """Cells were copied elsewhere: refer to where they are now."""
        ...

    def size_info(self) -> SizeInfo:
        """How much is stored, and how much of it could go."""
        ...

    def held_cells(self) -> tuple[IntArray, ...]:
        """Per layer group, every cell that the index refers to."""
        ...

    def locked_cells(self) -> tuple[IntArray, ...]:
        """Per layer group, those of them that must not be evicted."""
        ...

    def reset(self) -> tuple[IntArray, ...]:
        """Forget everything; per layer group, the cells to release."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...


def make_index(kind: str, windows: Sequence[int | None], page_size: int = 1) -> PrefixIndex:
    """An empty index.

    Args:
        kind: ``radix``, ``hashed`` or ``naive``.
        windows: per layer group, None for all of the history.
        page_size: tokens per page of the radix index, per block of the hashed one.

    Raises:
        ConfigError: an unknown kind, or a number below 1.
    """
    if kind == "radix":
        return RadixIndex(windows, page_size)
    if kind == "hashed":
        return HashedIndex(windows, page_size)
    if kind == "naive":
        return NaiveIndex(windows)
    raise ConfigError(f"prefix index {kind!r} is not known; choose radix, hashed or naive")


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
        windows: Sequence[int | None] = (None,),
        block_size: int = 16,
        *,
        digest: Callable[[int | None, bytes], int] = block_digest,
    ) -> None:
        """An empty index.

        Args:
            windows: per layer group, None for all of the history.
            block_size: tokens per block; the page size of this index.
            digest: from the digest before (None at the start) and a block's int64 bytes to the
                block's own.

        Raises:
            ConfigError: a window or a block size below 1.
        """
        self._digest = digest
        super().__init__(windows, block_size)

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """The longest stored run of full blocks from which every layer group can go on.

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

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Per layer group, the cells of the longest stored run of blocks; changes nothing at all.

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
        given = self._cells_array(cells, array.size)
        chain = list(self._chain(array))
        node, size = self._walk(chain), self.page_size
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
        self._touch(node)
        adopted = [
            joined((old, new[new >= 0]))
            for old, new in zip(adopted, given[:, n_present : node.stop], strict=True)
        ]
        return Inserted(n_present, PrefixHandle(node.stop, node), tuple(adopted))

    def _chain(self, tokens: IntArray) -> Iterator[tuple[int, bytes]]:
        """(digest, int64 bytes) of each full block, one after the other."""
        digest: int | None = None
        for piece in full_blocks(tokens, self.page_size):
            digest = self._digest(digest, piece)
            yield digest, piece

    def _walk(self, chain: Iterable[tuple[int, bytes]]) -> HashedBlock:
        """The last block of the stored run that these blocks begin with; the root for none."""
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
            assert block.stop - block.start == self.page_size
            assert block.cells.base is None, "a block keeps no larger array alive"


class NaiveIndex:
    """Stores nothing and never finds anything: every prompt is computed."""

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        """An index for so many layer groups.

        Raises:
            ConfigError: a window below 1.
        """
        self.windows = check_windows(windows)
        self.page_size = 1

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """Nothing."""
        return PrefixMatch(0, self.held_cells(), PrefixHandle(0, None), 0)

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Nothing."""
        return self.held_cells()

    def lock_handle(self, handle: PrefixHandle) -> None:
        """There is nothing to protect."""

    def unlock_handle(self, handle: PrefixHandle) -> None:
        """There is nothing to protect."""

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Adopt nothing."""
        return Inserted(0, PrefixHandle(0, None), self.held_cells())

    def evict(self, n_tokens: int) -> Evicted:
        """Give up nothing.

        Raises:
            CacheFullError: any tokens were asked for.
        """
        if n_tokens > 0:
            raise CacheFullError(
                f"asked to evict {n_tokens} tokens, 0 evictable of 0 stored: this index is naive; "
                f"end a sequence or ask for less"
            )
        return Evicted(0, self.held_cells())

    def demote(self, handle: PrefixHandle) -> None:
        """There is nothing to demote."""

    def drop_path(self, handle: PrefixHandle, keep: int = 0) -> Evicted:
        """There is nothing to give up."""
        return Evicted(0, self.held_cells())

    def chains(self) -> list[IntArray]:
        """None."""
        return []

    def relocate(self, moved: Relocation) -> None:
        """There is nothing to tell."""

    def size_info(self) -> SizeInfo:
        """Zeros."""
        return SizeInfo(0, 0, (0,) * len(self.windows))

    def held_cells(self) -> tuple[IntArray, ...]:
        """None, per layer group."""
        return tuple(_NONE.copy() for _ in self.windows)

    def locked_cells(self) -> tuple[IntArray, ...]:
        """None, per layer group."""
        return self.held_cells()

    def reset(self) -> tuple[IntArray, ...]:
        """Forget nothing."""
        return self.held_cells()

    def check(self) -> None:
        """There is nothing to go wrong."""


_NONE: IntArray = np.empty(0, dtype=np.int64)

"""Blocks of cells with reference counts, a table of them per sequence, and reuse by content.

A block is ``block_size`` consecutive cells: block b is the cells ``[b * block_size, (b + 1) *
block_size)``. A block that nobody refers to is free, and keeps what it holds until it is taken
again: a later sequence with the same tokens revives it.

Sources: vLLM's PagedAttention (Kwon et al. 2023, arXiv:2309.06180) and ATOM's BlockManager, whose
rule for when a table grows is not used: see ``n_blocks_for``.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvcellar.errors import (
    CacheFullError,
    ConfigError,
    PositionError,
    SequenceConflictError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.prefix.protocol import Tokens
from kvcellar.prefix.tree import token_array
from kvcellar.types import IntArray, Run, join_runs

TOKEN_BYTES = 8
"""Bytes of a token where it is hashed or compared: little-endian int64."""


def block_digest(before: int | None, tokens: bytes) -> int:
    """xxhash64 over the digest before, as 8 little-endian bytes, and a block's tokens.

    Args:
        before: digest of the block before this one; None for the first block, which has no prefix.
        tokens: the block's tokens as little-endian int64.
    """
    prefix = b"" if before is None else before.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(prefix + tokens)


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as little-endian int64."""
    return token_array(tokens).astype("<i8", copy=False).tobytes()


def full_blocks(tokens: IntArray, block_size: int) -> Iterator[bytes]:
    """The bytes of each full block; a rest that fills none is left out."""
    return _pieces(token_bytes(tokens), block_size)


def _pieces(data: bytes, block_size: int) -> Iterator[bytes]:
    size = block_size * TOKEN_BYTES
    return (data[i : i + size] for i in range(0, len(data) - size + 1, size))


def n_blocks_for(n_tokens: int, block_size: int) -> int:
    """How many blocks hold so many tokens: rounded up, whatever was there before."""
    return -(-n_tokens // block_size)


class Allocation(NamedTuple):
    """A new sequence's blocks.

    Attributes:
        block_table: the blocks, in position order; they cover every token that was given.
        n_cached: tokens whose KV is in them already; whole blocks.
    """

    block_table: tuple[int, ...]
    n_cached: int


class Appended(NamedTuple):
    """What a sequence needs before it writes on.

    Attributes:
        blocks: blocks that its table grew by.
        copy: (old, new) where the last block was shared: copy its cells' bytes before writing.
    """

    blocks: tuple[int, ...]
    copy: tuple[int, int] | None


@dataclass(slots=True, eq=False)
class Block:
    """Who refers to a block and what it holds.

    Attributes:
        n_owners: tables that have it, and holders that called ``retain``.
        digest: of its content and all before it; None unless it is full of known tokens.
        content_id: the same for two blocks exactly if they hold the same tokens behind the same
            prefix. The digest finds a block, this proves the prefix.
        prefix_id: content_id of the block before it, 0 for a first block.
        tokens: its tokens as bytes.
    """

    n_owners: int = 0
    digest: int | None = None
    content_id: int = 0
    prefix_id: int = 0
    tokens: bytes = b""


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks.

    Attributes:
        blocks: in position order; there may be more of them than its tokens need.
        n_tokens: tokens whose KV was written.
        tail: the tokens behind its last full block, as bytes; None behind unknown tokens.
    """

    blocks: list[int]
    n_tokens: int = 0
    tail: bytes | None = b""


class BlockManager:
    """Which sequence has which blocks, and which blocks hold content that can be used again.

    The life of a sequence: ``allocate`` its prompt, and ``record`` every chunk once a forward has
    written it; before each decode step ``may_append``, afterwards ``record`` what was accepted;
    ``deallocate``. A block can be found by others from the moment it is recorded as full, not
    before: until then its KV is not there.

    Invariants (asserted by ``check``):
      - a block is free exactly when it has no owner; the free ones are in the order they came free;
      - tokens are only ever written to blocks with one owner;
      - a block is found by its content exactly when it is full of known tokens.
    """

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        digest: Callable[[int | None, bytes], int] = block_digest,
    ) -> None:
        """All blocks free and empty. Costs the same for any number of blocks.

        Args:
            n_blocks: blocks in the pool.
            block_size: tokens per block.
            caching: whether blocks can be found by their content.
            digest: see :func:`block_digest`.

        Raises:
            ConfigError: no blocks, or blocks of no tokens.
        """
        if n_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"at least 1 block of at least 1 token, got {n_blocks} blocks of {block_size}"
            )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.caching = caching
        self._digest = digest
        self.reset()

    def reset(self) -> None:
        """Forget every sequence, owner and content."""
        self._blocks: list[Block] = []  # those that were ever taken; the others are free and empty
        self._free: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[int, BlockTable] = {}
        self._found: dict[int, dict[int, None]] = {}
        self._content_ids = itertools.count(1)

    # What is there -----------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Blocks that nobody refers to, whatever they still hold."""
        return self.n_blocks - len(self._blocks) + len(self._free)

    def seq_ids(self) -> list[int]:
        """The sequences, in the order they came."""
        return list(self._tables)

    def seq_len(self, seq_id: int) -> int:
        """Tokens of the sequence whose KV was written.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        return self._table(seq_id).n_tokens

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in position order; some at the end may hold no tokens yet.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        return tuple(self._table(seq_id).blocks)

    def n_owners(self, block: int) -> int:
        """How many tables and holders refer to a block."""
        return self._blocks[block].n_owners if block < len(self._blocks) else 0

    def runs(self, seq_id: int, p0: int = 0, p1: int | None = None) -> tuple[Run, ...]:
        """The cells of positions ``[p0, p1)``, as the fewest runs; to the last token by default.

        Raises:
            UnknownSequenceError: no such sequence.
            PositionError: the table does not cover ``p1``.
        """
        table, size = self._table(seq_id), self.block_size
        stop = table.n_tokens if p1 is None else p1
        if stop > len(table.blocks) * size:
            raise PositionError(
                f"sequence {seq_id} has {len(table.blocks)} blocks of {size}, asked for positions "
                f"up to {stop - 1}; may_append first"
            )
        parts = []
        for i in range(p0 // size, n_blocks_for(stop, size)):
            lo, hi = max(p0 - i * size, 0), min(stop - i * size, size)
            parts.append(Run(table.blocks[i] * size + lo, hi - lo))
        return join_runs(parts)

    def _table(self, seq_id: int) -> BlockTable:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise UnknownSequenceError(f"sequence {seq_id} has no block table here") from None

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise SequenceConflictError(
                f"sequence {seq_id} has a block table already; deallocate it first"
            )

    # Allocation --------------------------------------------------------------------------------

    def can_allocate(self, tokens: Tokens, *, max_cached: int | None = None) -> bool:
        """Whether ``allocate`` would succeed."""
        array = token_array(tokens)
        found = self._find_run(array, max_cached)
        return self._n_to_take(array.size, found) <= self.n_free

    def allocate(self, seq_id: int, tokens: Tokens, *, max_cached: int | None = None) -> Allocation:
        """Start a sequence on blocks for all of ``tokens``, shared where their KV is there already.

        The sequence then has ``n_cached`` tokens; what a forward writes is said with ``record``.

        Args:
            seq_id: a sequence that is not there.
            tokens: its prompt; may be empty.
            max_cached: take at most so many tokens from the cache. A caller that needs the last
                token's logits passes ``len(tokens) - 1``.

        Raises:
            CacheFullError: too few blocks are free; nothing was changed.
            SequenceConflictError: the sequence is there; nothing was changed.
        """
        self._check_new(seq_id)
        array = token_array(tokens)
        found = self._find_run(array, max_cached)
        n_take = self._n_to_take(array.size, found)
        if n_take > self.n_free:
            raise self._full(f"{array.size} tokens, {len(found) * self.block_size} cached,", n_take)
        for block in found:  # before any is taken: taking must not pick one of them
            self._own(block)
        blocks = [*found, *(self._take() for _ in range(self._n_missing(array.size, found)))]
        n_cached = len(found) * self.block_size
        self._tables[seq_id] = BlockTable(blocks, n_cached)
        return Allocation(tuple(blocks), n_cached)

    def _n_missing(self, n_tokens: int, found: list[int]) -> int:
        return n_blocks_for(n_tokens, self.block_size) - len(found)

    def _n_to_take(self, n_tokens: int, found: list[int]) -> int:
        """Blocks that leave the free ones: those that are missing, and those that are revived."""
        n_revived = sum(self._blocks[block].n_owners == 0 for block in found)
        return self._n_missing(n_tokens, found) + n_revived

    def _find_run(self, tokens: IntArray, max_cached: int | None) -> list[int]:
        """The blocks that hold the longest prefix of these tokens. The first miss is the end."""
        found: list[int] = []
        if not self.caching:
            return found
        n = tokens.size if max_cached is None else max(0, min(max_cached, tokens.size))
        digest, content_id = None, 0
        for piece in full_blocks(tokens[:n], self.block_size):
            digest = self._digest(digest, piece)
            block = self._find(digest, piece, content_id)
            if block is None:
                break
            found.append(block)
            content_id = self._blocks[block].content_id
        return found

    def _find(self, digest: int, tokens: bytes, prefix_id: int) -> int | None:
        """A block with this content behind this prefix; equal digests alone prove nothing."""
        for block in self._found.get(digest, ()):
            there = self._blocks[block]
            if there.prefix_id == prefix_id and there.tokens == tokens:
                return block
        return None

    def deallocate(self, seq_id: int) -> None:
        """End a sequence. Its blocks come free from last to first, so that prefixes stay longest.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        self.release(reversed(self._table(seq_id).blocks))
        del self._tables[seq_id]

    # Growing -----------------------------------------------------------------------------------

    def can_append(self, seq_id: int, n_tokens: int = 1) -> bool:
        """Whether ``may_append`` would succeed.

        Raises:
            UnknownSequenceError: no such sequence.
        """
        return self._n_to_append(self._table(seq_id), n_tokens) <= self.n_free

    def may_append(self, seq_id: int, n_tokens: int = 1) -> Appended:
        """Make sure that the next ``n_tokens`` of a sequence can be written. All or nothing.

        Call it before every step that writes, with as many tokens as the step brings, drafted ones
        included. What is not recorded stays reserved for the next ones.

        A table covers ``len(block_table) * block_size`` positions, and the step writes positions
        ``[seq_len, seq_len + n_tokens)``: it grows by what the last of them needs. (ATOM's rule,
        a block if ``(seq_len + n_tokens) % block_size`` is in ``(0, n_tokens]``, adds one where
        several are needed and none where the tokens end with a block.)

        Raises:
            CacheFullError: too few blocks are free; nothing was changed.
            UnknownSequenceError: no such sequence.
        """
        table = self._table(seq_id)
        n_take = self._n_to_append(table, n_tokens)
        if n_take > self.n_free:
            raise self._full(f"sequence {seq_id} and {n_tokens} more tokens", n_take)
        copy = self.writable_block(seq_id) if n_tokens > 0 else None
        blocks = tuple(self._take() for _ in range(n_take - (copy is not None)))
        table.blocks.extend(blocks)
        return Appended(blocks, copy)

    def _n_to_append(self, table: BlockTable, n_tokens: int) -> int:
        n_all = n_blocks_for(table.n_tokens + n_tokens, self.block_size)
        return max(0, n_all - len(table.blocks)) + (n_tokens > 0 and self._must_copy(table))

    def _must_copy(self, table: BlockTable) -> bool:
        """Whether the block that the next token goes to has tokens of others in it."""
        i, rest = divmod(table.n_tokens, self.block_size)
        return rest > 0 and self._blocks[table.blocks[i]].n_owners > 1

    def writable_block(self, seq_id: int) -> tuple[int, int] | None:
        """Give the sequence a last block of its own. ``may_append`` does it too.

        Returns:
            (old, new) where the partial last block was shared: the caller copies the bytes of its
            cells; None where there is nothing to copy. A block that was full and is written again,
            after ``truncate``, can no longer be found by its content.

        Raises:
            CacheFullError: no block is free; nothing was changed.
            UnknownSequenceError: no such sequence.
        """
        table = self._table(seq_id)
        i, rest = divmod(table.n_tokens, self.block_size)
        if not rest:
            return None
        old = table.blocks[i]
        if not self._must_copy(table):
            self._forget(old)
            return None
        if not self.n_free:
            raise self._full(f"sequence {seq_id}, to write on in a shared block,", 1)
        new = self._take()
        self._blocks[old].n_owners -= 1
        table.blocks[i] = new
        return old, new

    def record(self, seq_id: int, tokens: Tokens) -> None:
        """These tokens' KV was written behind what was there; full blocks can be found from now on.

        Raises:
            StepError: the table does not cover them, or their block is shared: ``may_append`` was
                not called. Nothing was changed.
            UnknownSequenceError: no such sequence.
        """
        data = token_bytes(tokens)
        self._advance(seq_id, len(data) // TOKEN_BYTES, data)

    def advance(self, seq_id: int, n_tokens: int) -> None:
        """As ``record``, for tokens that are not known: no block from here on can be found.

        Raises:
            StepError: as ``record``.
            UnknownSequenceError: no such sequence.
        """
        self._advance(seq_id, n_tokens, None)

    def _advance(self, seq_id: int, n_tokens: int, data: bytes | None) -> None:
        table, size = self._table(seq_id), self.block_size
        first, rest = divmod(table.n_tokens, size)
        stop = table.n_tokens + n_tokens
        if not n_tokens:
            return
        if n_tokens < 0 or stop > len(table.blocks) * size:
            raise StepError(
                f"sequence {seq_id} has room for {len(table.blocks) * size} tokens, recorded are "
                f"{stop}; call may_append before the step"
            )
        if rest:
            block = self._blocks[table.blocks[first]]
            if block.n_owners > 1 or block.digest is not None:
                raise StepError(
                    f"the last block of sequence {seq_id} holds more than its own {rest} tokens; "
                    f"call may_append before the step"
                )
        known = table.tail + data if table.tail is not None and data is not None else None
        table.n_tokens = stop
        n_full = stop // size - first
        if known is not None:
            for i, piece in enumerate(_pieces(known, size)):
                self._register(table, first + i, piece)
            table.tail = known[n_full * size * TOKEN_BYTES :]
        else:
            table.tail = None

    def _register(self, table: BlockTable, i: int, tokens: bytes) -> None:
        """Block i of a table is full of known tokens: it can be found, if its prefix can."""
        if not self.caching:
            return
        before, prefix_id = None, 0
        if i:
            last = self._blocks[table.blocks[i - 1]]
            before, prefix_id = last.digest, last.content_id
            if before is None:
                return
        digest = self._digest(before, tokens)
        same = self._find(digest, tokens, prefix_id)
        block = self._blocks[table.blocks[i]]
        block.content_id = (
            next(self._content_ids) if same is None else self._blocks[same].content_id
        )
        block.digest, block.prefix_id, block.tokens = digest, prefix_id, tokens
        self._found.setdefault(digest, {})[table.blocks[i]] = None

    # Sharing and cutting back ------------------------------------------------------------------

    def fork(self, src: int, dst: int, n_tokens: int | None = None) -> None:
        """Start ``dst`` on the blocks of the first ``n_tokens`` of ``src``. Moves no bytes.

        Raises:
            PositionError: ``src`` has fewer tokens; nothing was changed.
            SequenceConflictError: ``dst`` is there; nothing was changed.
            UnknownSequenceError: ``src`` is not there; nothing was changed.
        """
        table = self._table(src)
        self._check_new(dst)
        n = table.n_tokens if n_tokens is None else n_tokens
        tail = self._tail_at(src, table, n)
        blocks = table.blocks[: n_blocks_for(n, self.block_size)]
        self.retain(blocks)
        self._tables[dst] = BlockTable(blocks, n, tail)

    def share(self, seq_id: int, blocks: Sequence[int]) -> None:
        """Start a sequence on full blocks that somebody owns, as a prefix index gives them.

        Raises:
            SequenceConflictError: the sequence is there; nothing was changed.
        """
        self._check_new(seq_id)
        self.retain(blocks)
        self._tables[seq_id] = BlockTable(list(blocks), len(blocks) * self.block_size)

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        """Cut a sequence back to ``n_tokens``; blocks that it needs no longer come free.

        With its own length it gives back what ``may_append`` reserved.

        Raises:
            PositionError: the sequence has fewer tokens; nothing was changed.
            UnknownSequenceError: no such sequence.
        """
        table = self._table(seq_id)
        tail = self._tail_at(seq_id, table, n_tokens)
        n_keep = n_blocks_for(n_tokens, self.block_size)
        gone = table.blocks[n_keep:]
        del table.blocks[n_keep:]
        table.n_tokens, table.tail = n_tokens, tail
        self.release(reversed(gone))

    def _tail_at(self, seq_id: int, table: BlockTable, n_tokens: int) -> bytes | None:
        """The tokens behind the last full block of the first ``n_tokens``; None if not known."""
        if not 0 <= n_tokens <= table.n_tokens:
            raise PositionError(
                f"sequence {seq_id} has {table.n_tokens} tokens, asked for the first {n_tokens}"
            )
        i, rest = divmod(n_tokens, self.block_size)
        if not rest:
            return b""
        known: bytes | None = table.tail
        if i < table.n_tokens // self.block_size:
            block = self._blocks[table.blocks[i]]
            known = None if block.digest is None else block.tokens
        return None if known is None else known[: rest * TOKEN_BYTES]

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one owner, that is no sequence, to blocks that somebody owns."""
        for block in blocks:
            assert self._blocks[block].n_owners, f"block {block} is free"
            self._blocks[block].n_owners += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one owner of each; without one they come free in this order, with what they hold."""
        for block in blocks:
            self._blocks[block].n_owners -= 1
            if not self._blocks[block].n_owners:
                self._free[block] = None

    # One block ---------------------------------------------------------------------------------

    def _own(self, block: int) -> None:
        """One more owner for a block that may be free."""
        self._free.pop(block, None)
        self._blocks[block].n_owners += 1

    def _take(self) -> int:
        """The block that is free for longest; one that was never used is free since the start."""
        if len(self._blocks) < self.n_blocks:
            block = len(self._blocks)
            self._blocks.append(Block())
        else:
            block, _ = self._free.popitem(last=False)
            self._forget(block)
        self._blocks[block].n_owners = 1
        return block

    def _forget(self, block: int) -> None:
        """The block's content goes: nobody finds it any more."""
        there = self._blocks[block]
        if there.digest is None:
            return
        same = self._found[there.digest]
        del same[block]
        if not same:
            del self._found[there.digest]
        there.digest, there.tokens = None, b""

    def _full(self, who: str, n_take: int) -> CacheFullError:
        return CacheFullError(
            f"{who} needs {n_take} blocks of {self.block_size}, {self.n_free} free of "
            f"{self.n_blocks}; end a sequence or raise capacity"
        )

    # Proof -------------------------------------------------------------------------------------

    def check(self, held: Sequence[int] = ()) -> None:
        """Assert the invariants.

        Args:
            held: blocks owned by holders that are not sequences, once per holder.
        """
        owners = [0] * len(self._blocks)
        for block in itertools.chain(held, *(t.blocks for t in self._tables.values())):
            owners[block] += 1
        assert owners == [block.n_owners for block in self._blocks]
        assert set(self._free) == {i for i, n in enumerate(owners) if not n}
        found = {(digest, block) for digest, same in self._found.items() for block in same}
        assert found == {(b.digest, i) for i, b in enumerate(self._blocks) if b.digest is not None}
        assert all(self._found.values()), "no empty entry is kept"
        for seq_id, table in self._tables.items():
            rest = table.n_tokens % self.block_size
            assert n_blocks_for(table.n_tokens, self.block_size) <= len(table.blocks)
            assert table.tail is None or len(table.tail) == rest * TOKEN_BYTES
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq_id} repeats a block"

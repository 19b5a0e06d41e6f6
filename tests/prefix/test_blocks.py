"""The block manager against a slow oracle with bytes to lose, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.errors import (
    CacheFullError,
    ConfigError,
    PositionError,
    SequenceConflictError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.prefix.blocks import BlockManager, block_digest
from kvcellar.types import cells_of

# Against an oracle --------------------------------------------------------------------------------


@dataclass(eq=False)
class Content:
    """What a full block holds, behind what; two blocks share the object if they hold the same."""

    before: Content | None
    tokens: tuple[int, ...]


@dataclass
class Seq:
    """A history, and how many of its tokens the manager was told (the rest it only counts)."""

    tokens: list[int]
    table: list[int]
    unknown: list[bool]


class BlocksAgainstLists(RuleBasedStateMachine):
    """The oracle: lists that are searched from end to end, and the history that wrote each cell."""

    @initialize(
        n_blocks=st.sampled_from([1, 2, 3, 4, 4, 5, 5, 9]),
        size=st.sampled_from([1, 1, 2, 2, 3]),
        caching=st.sampled_from([True, True, True, False]),
        n_digests=st.sampled_from([None, None, 1, 3]),
    )
    def start(self, n_blocks, size, caching, n_digests):
        def digest(before, tokens):
            found = block_digest(before, tokens)
            return found if n_digests is None else found % n_digests

        self.n, self.size, self.caching = n_blocks, size, caching
        self.blocks = BlockManager(n_blocks, size, caching=caching, digest=digest)
        self.free = list(range(n_blocks))  # longest free first
        self.content = {}  # block -> Content, in the order in which they were written
        self.seqs = {}
        self.held = []
        self.memory = {}  # cell -> the history up to and with the token that it holds
        self.known = [[]]
        self.next_id = 0

    # The oracle's own small steps

    def owners(self, block):
        return sum(block in seq.table for seq in self.seqs.values()) + self.held.count(block)

    def take(self):
        block = self.free.pop(0)
        self.content.pop(block, None)
        return block

    def let_go(self, blocks, seq_id=None):
        for block in blocks:
            if seq_id is not None:
                self.seqs[seq_id].table.remove(block)
            if not self.owners(block):
                self.free.append(block)

    def find_run(self, tokens):
        """The blocks that hold the most of these tokens, by looking at every block."""
        found, before = [], None
        for i in range(0, len(tokens) - self.size + 1, self.size):
            block = self.find(before, tuple(tokens[i : i + self.size]))
            if block is None:
                break
            found.append(block)
            before = self.content[block]
        return found

    def find(self, before, tokens):
        same = (b for b, c in self.content.items() if c.before is before and c.tokens == tokens)
        return next(same, None)

    def n_needed(self, n_tokens):
        """How many blocks hold so many tokens, counted one token at a time."""
        return len({p // self.size for p in range(n_tokens)})

    def refused(self, error, match, verb, *args):
        before = [(self.blocks.block_table(s), self.blocks.seq_len(s)) for s in self.seqs]
        n_free = self.blocks.n_free
        with pytest.raises(error, match=match):
            verb(*args)
        assert before == [(self.blocks.block_table(s), self.blocks.seq_len(s)) for s in self.seqs]
        assert n_free == self.blocks.n_free

    def a_seq(self, i):
        return sorted(self.seqs)[i % len(self.seqs)]

    def cells(self, seq_id, p0, p1):
        table = self.seqs[seq_id].table
        return [table[p // self.size] * self.size + p % self.size for p in range(p0, p1)]

    def write(self, seq_id, tokens, known):
        """A forward writes; then the manager is told, or only the number."""
        seq = self.seqs[seq_id]
        first = len(seq.tokens)
        seq.tokens = seq.tokens + tokens
        seq.unknown = seq.unknown + [not known] * len(tokens)
        for p, cell in enumerate(self.cells(seq_id, first, len(seq.tokens)), start=first):
            self.memory[cell] = tuple(seq.tokens[: p + 1])
        if known:
            self.blocks.record(seq_id, tokens)
        else:
            self.blocks.advance(seq_id, len(tokens))
        for i in range(first // self.size, len(seq.tokens) // self.size):
            before = self.content.get(seq.table[i - 1]) if i else None
            lo, hi = i * self.size, (i + 1) * self.size
            if not self.caching or (i and before is None) or any(seq.unknown[:hi]):
                continue
            piece = tuple(seq.tokens[lo:hi])
            same = self.find(before, piece)
            assert seq.table[i] not in self.content
            self.content[seq.table[i]] = (
                Content(before, piece) if same is None else self.content[same]
            )

    # The rules

    @rule(
        base=st.integers(0, 20),
        cut=st.sampled_from([0, 0, 1, 4]),
        more=st.lists(st.integers(0, 1), max_size=4),
        cap=st.sampled_from([None, None, None, 0, 1, -1]),
        later=st.sampled_from([False, False, False, True]),
    )
    def allocate(self, base, cut, more, cap, later):
        tokens = self.known[base % len(self.known)]
        tokens = tokens[: max(0, len(tokens) - cut)] + more
        max_cached = cap if cap is None or cap >= 0 else max(0, len(tokens) - 1)
        found = self.find_run(tokens if max_cached is None else tokens[:max_cached])
        n_take = self.n_needed(len(tokens)) - sum(block not in self.free for block in found)
        fits = n_take <= len(self.free)
        assert self.blocks.can_allocate(tokens, max_cached=max_cached) == fits
        seq_id = self.next_id
        if not fits:
            self.refused(
                CacheFullError,
                f"needs {n_take} blocks of {self.size}, {len(self.free)} free of {self.n}",
                lambda: self.blocks.allocate(seq_id, tokens, max_cached=max_cached),
            )
            return
        allocation = self.blocks.allocate(seq_id, tokens, max_cached=max_cached)
        self.free = [block for block in self.free if block not in found]
        table = found + [self.take() for _ in range(self.n_needed(len(tokens)) - len(found))]
        n_cached = len(found) * self.size
        assert allocation == (tuple(table), n_cached)
        self.seqs[seq_id] = Seq(tokens[:n_cached], table, [False] * n_cached)
        self.known.append(tokens)
        self.next_id += 1
        self.refused(SequenceConflictError, "already", self.blocks.allocate, seq_id, [])
        if len(tokens) > n_cached and not later:  # else its forward comes later, or never
            self.write(seq_id, tokens[n_cached:], known=True)

    @precondition(lambda self: self.seqs)
    @rule(
        i=st.integers(0, 9),
        n=st.integers(0, 9),
        tokens=st.lists(st.integers(0, 1), max_size=9),
        known=st.sampled_from([True, True, True, False]),
    )
    def step(self, i, n, tokens, known):
        """Reserve n tokens, write some, let the drafted rest be rejected."""
        seq_id = self.a_seq(i)
        seq = self.seqs[seq_id]
        length, table = len(seq.tokens), seq.table
        last = table[length // self.size] if length % self.size else None
        copies = n > 0 and last is not None and self.owners(last) > 1
        n_grow = max(0, self.n_needed(length + n) - len(table))
        fits = n_grow + copies <= len(self.free)
        assert self.blocks.can_append(seq_id, n) == fits
        if not fits:
            self.refused(
                CacheFullError,
                f"needs {n_grow + copies} blocks",
                self.blocks.may_append,
                seq_id,
                n,
            )
            return
        appended = self.blocks.may_append(seq_id, n)
        if copies:
            new = self.take()
            assert appended.copy == (last, new)
            table[length // self.size] = new
            for offset in range(length % self.size):
                old_cell = last * self.size + offset
                self.memory[new * self.size + offset] = self.memory[old_cell]
        else:
            assert appended.copy is None
            if n and last is not None:
                self.content.pop(last, None)  # it is about to be overwritten
        grown = [self.take() for _ in range(n_grow)]
        assert appended.blocks == tuple(grown)
        seq.table = table = table + grown
        if n:
            self.write(seq_id, tokens[:n], known)
        room = len(table) * self.size - len(seq.tokens)
        self.refused(StepError, "call may_append", self.blocks.record, seq_id, [0] * (room + 1))

    @precondition(lambda self: self.seqs)
    @rule(i=st.integers(0, 9), part=st.integers(0, 12))
    def fork(self, i, part):
        src, dst = self.a_seq(i), self.next_id
        seq = self.seqs[src]
        n = len(seq.tokens) if part > len(seq.tokens) else part
        self.blocks.fork(src, dst, None if part > len(seq.tokens) else n)
        table = seq.table[: self.n_needed(n)]
        self.seqs[dst] = Seq(seq.tokens[:n], table, seq.unknown[:n])
        for p in range(n // self.size * self.size, n):
            # tokens are known from the table's tail or from a full block that can be found
            full = p // self.size < len(seq.tokens) // self.size
            if full and seq.table[p // self.size] not in self.content:
                self.seqs[dst].unknown[p] = True
        self.next_id += 1
        self.refused(SequenceConflictError, "already", self.blocks.fork, src, dst)
        self.refused(
            PositionError, "tokens, asked", self.blocks.fork, src, dst + 1, len(seq.tokens) + 1
        )

    @precondition(lambda self: self.seqs)
    @rule(i=st.integers(0, 9), back=st.integers(0, 7))
    def truncate(self, i, back):
        seq_id = self.a_seq(i)
        seq = self.seqs[seq_id]
        n = max(0, len(seq.tokens) - back)
        self.refused(
            PositionError, "tokens, asked", self.blocks.truncate, seq_id, len(seq.tokens) + 1
        )
        self.blocks.truncate(seq_id, n)
        for p in range(n // self.size * self.size, n):
            full = p // self.size < len(seq.tokens) // self.size
            if full and seq.table[p // self.size] not in self.content:
                seq.unknown[p] = True
        seq.tokens, seq.unknown = seq.tokens[:n], seq.unknown[:n]
        self.let_go(reversed(seq.table[self.n_needed(n) :]), seq_id)

    @precondition(lambda self: self.seqs)
    @rule(i=st.integers(0, 9))
    def deallocate(self, i):
        seq_id = self.a_seq(i)
        self.blocks.deallocate(seq_id)
        self.let_go(self.seqs[seq_id].table[::-1], seq_id)
        del self.seqs[seq_id]
        self.refused(UnknownSequenceError, "no block table", self.blocks.deallocate, seq_id)

    @precondition(lambda self: len(self.seqs) > 2)
    @rule(i=st.integers(0, 9))
    def deallocate_once_there_are_some(self, i):
        self.deallocate(i)

    @precondition(lambda self: len(self.free) < 2 and self.seqs)
    @rule(i=st.integers(0, 9))
    def deallocate_where_blocks_are_scarce(self, i):
        self.deallocate(i)

    @precondition(lambda self: self.seqs)
    @rule(i=st.integers(0, 9), n=st.integers(0, 3))
    def hold(self, i, n):
        """An index refers to full blocks of a sequence."""
        seq = self.seqs[self.a_seq(i)]
        blocks = seq.table[: min(n, len(seq.tokens) // self.size)]
        self.blocks.retain(blocks)
        self.held.extend(blocks)

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 9))
    def let_go_of_held(self, i):
        block = self.held.pop(i % len(self.held))
        self.blocks.release([block])
        self.let_go([block])

    @precondition(lambda self: self.seqs)
    @rule(i=st.integers(0, 9), n=st.integers(0, 3))
    def share(self, i, n):
        """A sequence starts on full blocks that an index found."""
        seq = self.seqs[self.a_seq(i)]
        n = min(n, len(seq.tokens) // self.size)
        self.blocks.share(self.next_id, seq.table[:n])
        lo = n * self.size
        self.seqs[self.next_id] = Seq(seq.tokens[:lo], seq.table[:n], seq.unknown[:lo])
        self.next_id += 1

    @invariant()
    def agrees(self):
        self.blocks.check(self.held)
        assert (
            self.blocks.n_free
            == len(self.free)
            == self.n - len({b for seq in self.seqs.values() for b in seq.table} | set(self.held))
        )
        assert self.blocks.seq_ids() == list(self.seqs)
        for seq_id, seq in self.seqs.items():
            assert self.blocks.block_table(seq_id) == tuple(seq.table)
            assert self.blocks.seq_len(seq_id) == len(seq.tokens)
            cells = self.cells(seq_id, 0, len(seq.tokens))
            assert cells_of(self.blocks.runs(seq_id)).tolist() == cells
            for p, cell in enumerate(cells):
                assert self.memory[cell] == tuple(seq.tokens[: p + 1]), "bytes of another history"
            assert all(self.blocks.n_owners(b) == self.owners(b) for b in seq.table)

    def teardown(self):
        for seq_id in list(self.seqs):
            self.blocks.deallocate(seq_id)
        self.blocks.release(self.held)
        assert self.blocks.n_free == self.n


TestBlocksAgainstLists = BlocksAgainstLists.TestCase
TestBlocksAgainstLists.settings = settings(max_examples=4 * settings().max_examples)


@given(
    size=st.integers(1, 9),
    length=st.integers(0, 40),
    reserved=st.integers(0, 20),
    n=st.integers(0, 40),
)
def test_a_table_grows_by_exactly_the_blocks_that_the_new_positions_touch(
    size, length, reserved, n
):
    blocks = BlockManager(200, size)
    blocks.allocate(0, [0] * length)
    blocks.record(0, [0] * length)
    blocks.may_append(0, reserved)
    before = {p // size for p in range(length + reserved)}
    grown = blocks.may_append(0, n).blocks
    assert len(grown) == len({p // size for p in range(length + n)} - before)


@pytest.mark.parametrize(
    "length, n, want",
    [
        (3, 6, 2),  # 9 tokens: ATOM's rule adds one block, two are needed
        (2, 6, 1),  # 8 tokens: it adds none, since they end with a block
        (4, 4, 1),
        (4, 9, 3),
        (4, 1, 1),
        (3, 1, 0),
    ],
)
def test_several_tokens_at_once_get_all_the_blocks_they_need(length, n, want):
    blocks = BlockManager(10, 4)
    blocks.allocate(0, [0] * length)
    blocks.record(0, [0] * length)
    assert len(blocks.may_append(0, n).blocks) == want


# One rule at a time -------------------------------------------------------------------------------


def prefilled(blocks, seq_id, tokens):
    allocation = blocks.allocate(seq_id, tokens)
    blocks.record(seq_id, tokens[allocation.n_cached :])
    return allocation


PROMPT = list(range(10))


def test_a_block_in_use_is_shared_and_the_partial_last_one_is_not():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT)
    allocation = blocks.allocate(1, PROMPT)
    assert allocation.n_cached == 8
    assert allocation.block_table[:2] == blocks.block_table(0)[:2]
    assert allocation.block_table[2] != blocks.block_table(0)[2]
    assert blocks.n_free == 8 - 4


def test_a_freed_block_that_still_holds_its_content_is_revived():
    blocks = BlockManager(8, 4)
    table = prefilled(blocks, 0, PROMPT).block_table
    blocks.deallocate(0)
    assert blocks.n_free == 8
    allocation = blocks.allocate(1, PROMPT)
    assert (allocation.n_cached, allocation.block_table[:2]) == (8, table[:2])
    assert blocks.n_free == 5


def test_a_revived_block_is_not_given_out_as_a_new_one_too():
    blocks = BlockManager(2, 4)
    for seq_id, prompt in enumerate((PROMPT[:4], [7] * 4)):
        prefilled(blocks, seq_id, prompt)
    blocks.deallocate(0)  # so its block is the next to be taken
    blocks.deallocate(1)
    assert blocks.allocate(2, PROMPT[:5]) == ((0, 1), 4)


def test_a_block_that_was_taken_again_is_no_longer_found_by_what_it_held():
    blocks = BlockManager(1, 4)
    prefilled(blocks, 0, PROMPT[:4])
    blocks.deallocate(0)
    prefilled(blocks, 1, [7])
    blocks.deallocate(1)
    assert blocks.allocate(2, PROMPT[:4]).n_cached == 0


def test_what_two_sequences_computed_alike_continues_as_one():
    blocks = BlockManager(6, 2)
    for seq_id in (0, 1):  # neither finds the other: both are admitted before a forward
        blocks.allocate(seq_id, [1, 1, 2, 2])
    blocks.record(0, [1, 1])
    blocks.record(1, [1, 1, 2, 2])
    assert blocks.allocate(2, [1, 1, 2, 2]) == ((0, 3), 4)
    blocks.deallocate(0)
    blocks.deallocate(2)
    assert blocks.allocate(3, [1, 1, 2, 2]).n_cached == 4


def test_a_prompt_that_needs_revived_blocks_counts_them():
    blocks = BlockManager(3, 4)
    prefilled(blocks, 0, PROMPT)
    blocks.deallocate(0)
    prefilled(blocks, 1, [7])  # takes the partial one, freed first
    assert not blocks.can_allocate([*PROMPT[:8], 1])
    with pytest.raises(CacheFullError, match="9 tokens, 8 cached, needs 3 blocks of 4, 2 free of"):
        blocks.allocate(2, [*PROMPT[:8], 1])
    assert blocks.can_allocate(PROMPT[:8])


def test_blocks_are_reused_longest_free_first_and_prefixes_last():
    blocks = BlockManager(4, 2)
    prefilled(blocks, 0, [1, 1, 2, 2, 3, 3])
    blocks.deallocate(0)  # frees [3, 3], then [2, 2], then [1, 1]
    prefilled(blocks, 1, [9, 9, 8, 8])  # takes the unused one and that of [3, 3]
    assert blocks.allocate(2, [1, 1, 2, 2]).n_cached == 4


def test_nothing_is_found_before_its_kv_was_written():
    blocks = BlockManager(9, 4)
    blocks.allocate(0, PROMPT)
    assert blocks.allocate(1, PROMPT).n_cached == 0
    blocks.record(0, PROMPT[:5])  # a chunk
    assert blocks.allocate(2, PROMPT).n_cached == 4


def test_a_decoded_block_is_found_once_it_is_full():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT[:6])
    for token in (6, 7):
        blocks.may_append(0)
        assert blocks.can_allocate(PROMPT[:8])
        blocks.record(0, [token])
    assert blocks.allocate(1, PROMPT[:8]).n_cached == 8


def test_a_miss_is_sticky():
    blocks = BlockManager(8, 2)
    prefilled(blocks, 0, [1, 1, 2, 2, 3, 3])
    assert blocks.allocate(1, [1, 1, 9, 9, 3, 3]).n_cached == 2


def test_a_caller_can_leave_the_last_token_to_be_computed():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT[:8])
    assert blocks.allocate(1, PROMPT[:8], max_cached=7).n_cached == 4


def test_equal_digests_are_no_hit_for_other_tokens_or_another_prefix():
    blocks = BlockManager(8, 1, digest=lambda before, tokens: 7)
    prefilled(blocks, 0, [1, 5])
    assert blocks.can_allocate([5])
    assert blocks.allocate(1, [5]).n_cached == 0
    assert blocks.allocate(2, [1, 5]).n_cached == 2
    assert blocks.allocate(3, [1, 1]).n_cached == 1


def test_a_fork_shares_its_blocks_until_one_of_the_two_writes_on():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT)
    blocks.fork(0, 1)
    assert blocks.block_table(0) == blocks.block_table(1)
    assert blocks.n_free == 5
    with pytest.raises(StepError, match="call may_append"):
        blocks.record(1, [1])
    old, new = blocks.writable_block(1)
    assert (old, new) == (blocks.block_table(0)[2], blocks.block_table(1)[2])
    assert old != new
    assert blocks.writable_block(1) is None
    assert blocks.writable_block(0) is None  # it is the only one left


def test_a_fork_at_a_full_block_needs_no_copy():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT[:8])
    blocks.fork(0, 1)
    assert blocks.may_append(1) == ((2,), None)


def test_a_fork_that_cannot_copy_is_refused_and_changes_nothing():
    blocks = BlockManager(3, 4)
    prefilled(blocks, 0, PROMPT)
    blocks.fork(0, 1)
    assert not blocks.can_append(1)
    for verb in (blocks.may_append, blocks.writable_block):
        with pytest.raises(CacheFullError, match="needs 1 blocks of 4, 0 free of 3"):
            verb(1)
    assert blocks.block_table(0) == blocks.block_table(1)


def test_a_full_block_that_is_cut_and_written_again_is_no_longer_found():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT[:8])
    blocks.truncate(0, 6)
    assert blocks.allocate(1, PROMPT[:8]).n_cached == 8  # its bytes are still there
    blocks.deallocate(1)
    with pytest.raises(StepError, match="call may_append"):
        blocks.record(0, [1])
    blocks.may_append(0, 2)
    blocks.record(0, [90, 91])
    assert blocks.allocate(2, PROMPT[:8]).n_cached == 4
    assert blocks.allocate(3, [*PROMPT[:6], 90, 91]).n_cached == 8


def test_rejected_drafts_leave_their_room_to_the_next_tokens():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT[:4])
    assert len(blocks.may_append(0, 6).blocks) == 2
    blocks.record(0, [4])
    assert blocks.may_append(0, 7).blocks == ()
    blocks.truncate(0, 5)  # gives back what is reserved
    assert len(blocks.block_table(0)) == 2


def test_blocks_behind_unknown_tokens_are_not_found():
    blocks = BlockManager(8, 2)
    prefilled(blocks, 0, [1, 1, 2])
    blocks.may_append(0, 5)
    blocks.advance(0, 1)
    blocks.record(0, [3, 3])
    assert blocks.allocate(1, [1, 1, 2, 2, 3, 3]).n_cached == 2


def test_a_block_behind_an_unknown_one_is_not_taken_for_a_first_block():
    blocks = BlockManager(8, 2)
    blocks.allocate(0, [1, 1])
    blocks.advance(0, 2)
    blocks.fork(0, 1)
    blocks.may_append(1, 2)
    blocks.record(1, [3, 3])
    assert blocks.allocate(2, [3, 3]).n_cached == 0


def test_recording_no_tokens_forgets_none():
    blocks = BlockManager(8, 2)
    prefilled(blocks, 0, [1])
    blocks.advance(0, 0)
    blocks.may_append(0)
    blocks.record(0, [2])
    assert blocks.allocate(1, [1, 2]).n_cached == 2


def test_without_caching_nothing_is_found():
    blocks = BlockManager(8, 4, caching=False)
    prefilled(blocks, 0, PROMPT)
    assert blocks.allocate(1, PROMPT).n_cached == 0


def test_positions_beyond_the_table_have_no_cells():
    blocks = BlockManager(8, 4)
    prefilled(blocks, 0, PROMPT)
    assert blocks.runs(0, 3, 12) == ((3, 9),)
    with pytest.raises(PositionError, match="3 blocks of 4, asked for positions up to 12"):
        blocks.runs(0, 0, 13)


@pytest.mark.parametrize("n_blocks, size", [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(n_blocks, size):
    with pytest.raises(ConfigError, match="at least 1 block of at least 1 token"):
        BlockManager(n_blocks, size)

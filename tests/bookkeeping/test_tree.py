"""Sequences with draft trees beside sequences without, against dicts of token ids."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvcellar.errors import CacheFullError, ProposalError, StepError
from kvcellar.types import AttendKind
from tests.bookkeeping.actions import action
from tests.bookkeeping.byte_simulator import (
    SimulatedTree,
    check_causal_masks,
    settled,
    sight_of,
    visible,
)
from tests.bookkeeping.test_sequences import (
    CAPACITY,
    PICK,
    PLACE,
    SEQ,
    SLACK,
    WINDOWS,
    History,
    SeqCacheAgainstHistories,
)


@dataclass
class Tree:
    """What one draft tree is: a parent and a token per node; a token of None awaits its forward."""

    base: int
    parents: list[int] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)

    def lineage(self, node):
        """The nodes from a root down to ``node``."""
        return [*self.lineage(self.parents[node]), node] if node >= 0 else []

    def position(self, node):
        return self.base + len(self.lineage(node)) - 1

    def frontier(self):
        """The nodes that await their forward."""
        return [node for node, token in enumerate(self.tokens) if token is None]


class TreeCacheAgainstHistories(SeqCacheAgainstHistories):
    """All of the sequence cache's rules, and trees: one oracle tree per sequence that has one."""

    cache_class = SimulatedTree

    @initialize(windows=WINDOWS, capacity=CAPACITY, slack=SLACK)
    def start(self, windows, capacity, slack):
        super().start(windows, capacity, slack)
        self.trees: dict[int, Tree] = {}

    # The oracle's own words -----------------------------------------------------------------------

    def state(self):
        return (self.want, self.trees)

    def restore(self, state):
        self.want, self.trees = state

    def n_needed(self, group):
        return super().n_needed(group) + sum(len(tree.tokens) for tree in self.trees.values())

    def n_pending(self):
        return sum(len(tree.frontier()) for tree in self.trees.values())

    def extra_cells(self, group):
        return sum(len(tree.tokens) for tree in self.trees.values()) - self.n_pending()

    def nodes_of(self, seq):
        """They follow the history in the order they were proposed."""
        tree = self.trees.get(seq, Tree(0))
        return {tree.base + i: t for i, t in enumerate(tree.tokens) if t is not None}

    def batch_of(self, draws):
        """A tree that awaits its forward comes whole and once, whatever was drawn."""
        draws = dict(draws).items() if any(seq in self.trees for seq, _ in draws) else draws
        if any(seq in self.trees and not self.trees[seq].frontier() for seq, _ in draws):
            return None
        stretches = []
        for stretch in super().batch_of(draws):
            seq = stretch[0]
            if seq in self.trees:
                tree = self.trees[seq]
                nodes = tree.frontier()
                positions = [tree.position(node) for node in nodes]
                stretch = (seq, positions, self.new_ids(len(nodes)))
            stretches.append(stretch)
        return stretches

    def n_proposed(self, stretches):
        return sum(len(positions) for seq, positions, _ in stretches if seq in self.trees)

    def expected(self, stretches, window):
        plain = [s for s in stretches if s[0] not in self.trees]
        rows = iter(super().expected(plain, window))
        out = []
        for seq, positions, tokens in stretches:
            if seq in self.trees:
                out += self.expected_of_tree(seq, tokens, window)
            else:
                out += [next(rows) for _ in positions]
        return out

    def expected_of_tree(self, seq, tokens, window):
        tree = copy.deepcopy(self.trees[seq])
        nodes = tree.frontier()
        for node, token in zip(nodes, tokens, strict=True):
            tree.tokens[node] = token
        history = self.want[seq].tokens if seq in self.want else {}
        rows = []
        for node in nodes:
            path = {tree.position(above): tree.tokens[above] for above in tree.lineage(node)}
            assert not set(path) & set(history)
            rows.append(visible(history | path, tree.position(node), window))
        return rows

    def accept(self, stretches):
        super().accept([s for s in stretches if s[0] not in self.trees])
        for seq, _, tokens in stretches:
            if seq in self.trees:
                tree = self.trees[seq]
                for node, token in zip(tree.frontier(), tokens, strict=True):
                    tree.tokens[node] = token

    def check_masks(self, stretches):
        """Trees alone have masks in full groups, and those cover no more than their nodes."""
        trees = {}
        q = 0
        for seq, positions, _ in stretches:
            if seq in self.trees:
                trees[q] = self.trees[seq]
            q += len(positions)
        for group, window in enumerate(self.windows):
            reads = self.cache.plans[group].reads
            check_causal_masks([r for r in reads if r.q_start not in trees], window)
            for read in reads:
                if read.q_start in trees:
                    assert read.kind is AttendKind.EXPLICIT
                    if window is None:
                        assert read.mask.shape[1] == len(trees[read.q_start].tokens)
                    else:
                        most = sight_of(window).most_before
                        assert read.read_len <= most + len(trees[read.q_start].tokens)

    # Trees ----------------------------------------------------------------------------------------

    @action(weight=7, seq=SEQ, draws=st.lists(st.integers(0, 50), min_size=1, max_size=9))
    def propose(self, seq, draws):
        tree = self.trees.get(seq)
        length = self.want[seq].length if seq in self.want else 0
        n_nodes = len(tree.tokens) if tree else 0
        parents = [draw % (n_nodes + i + 1) - 1 for i, draw in enumerate(draws)]
        if tree and tree.frontier():
            self.refused(ProposalError, self.cache.propose, parents, seq)
            return
        before = settled(self.cache)
        if not self.fits_frontier(before, seq, len(parents)):
            self.refused(CacheFullError, self.cache.propose, parents, seq)
            return
        self.undo = None
        got = self.cache.propose(parents, seq)
        tree = self.trees.setdefault(seq, Tree(length))
        tree.parents += parents
        tree.tokens += [None] * len(parents)
        assert got == [tree.position(node) for node in tree.frontier()]
        self.check()

    def fits_frontier(self, before, seq, n):
        """True if a frontier has its cells: what the cache says, shown to be true."""
        fits = before.can_extend(n)
        assert self.may_be_full(n) if not fits else not self.must_be_full(n)
        return fits

    @action(
        seq=SEQ, draws=st.lists(st.integers(0, 50), max_size=6), bad=st.sampled_from([-2, 0, 3])
    )
    def propose_a_parent_that_is_no_earlier_node(self, seq, draws, bad):
        tree = self.trees.get(seq)
        n_nodes = len(tree.tokens) if tree else 0
        parents = [draw % (n_nodes + i + 1) - 1 for i, draw in enumerate(draws)]
        parents.append(bad if bad < 0 else n_nodes + len(parents) + bad)
        self.refused(ProposalError, self.cache.propose, parents, seq)
        self.refused(ProposalError, self.cache.propose, [], seq)

    @action(weight=6, pick=PICK, draw=PLACE, nothing=st.sampled_from([False, False, False, True]))
    def commit(self, pick, draw, nothing):
        there = sorted(self.trees)
        seq = there[pick % len(there)] if there and pick < 10 else pick % 6
        tree = self.trees.get(seq)
        if tree is None:
            self.refused(ProposalError, self.cache.commit, [], seq)
            return
        chain = [] if nothing else tree.lineage(draw % len(tree.tokens))
        if any(tree.tokens[node] is None for node in chain):
            self.refused(ProposalError, self.cache.commit, chain, seq)
            return
        self.undo = None
        assert self.cache.commit(chain, seq) == chain
        del self.trees[seq]
        if chain:
            history = self.want.setdefault(seq, History())
            for node in chain:
                history.tokens[history.length] = tree.tokens[node]
                history.length += 1
        self.probe(seq)

    @action(seq=SEQ, chain=st.lists(st.integers(-2, 12), min_size=1, max_size=4))
    def commit_what_is_no_chain(self, seq, chain):
        tree = self.trees.get(seq, Tree(0))
        if chain[-1] in range(len(tree.tokens)) and chain == tree.lineage(chain[-1]):
            return
        self.refused(ProposalError, self.cache.commit, chain, seq)

    @action(n=st.integers(1, 12), twice=st.booleans())
    def bring_other_tokens_than_were_proposed(self, n, twice):
        for seq, tree in self.trees.items():
            size = len(tree.frontier())
            if not size:
                self.refused(StepError, self.cache.begin_step, [(seq, min(n, len(tree.tokens)))])
            other = next(s for s in range(9) if s != seq and s not in self.trees)
            if size and n != size:
                self.refused(StepError, self.cache.begin_step, [(seq, n)])
            if size > 1 and twice:
                parts = [(seq, 1), (other, 1), (seq, size - 1)]
                self.refused(StepError, self.cache.begin_step, parts)
                self.refused(StepError, self.cache.begin_step, [(seq, 1), (seq, size - 1)])
            if size and twice:
                self.refused(StepError, self.cache.begin_step, [(seq, size), (other, 1), (seq, 1)])

    # Sequences ------------------------------------------------------------------------------------

    def cut_seq(self, seq, at):
        if seq not in self.trees:
            super().cut_seq(seq, at)
            return
        p0 = self.place(seq, at)
        length = self.want[seq].length if seq in self.want else 0
        if p0 > 0:
            self.refused(StepError, self.cache.seq_rm, seq, p0)
        elif p0 < length or length == 0:
            self.undo = None
            self.cache.seq_rm(seq, p0)
            del self.trees[seq]
            self.want.pop(seq, None)

    def make_a_hole_in(self, seq, a, b):
        if seq not in self.trees or seq not in self.want:
            super().make_a_hole_in(seq, a, b)
            return
        p0, p1 = sorted((self.place(seq, a), self.place(seq, b)))
        if p1 < self.want[seq].length:
            self.refused(StepError, self.cache.seq_rm, seq, p0, p1)

    def copy_seq(self, src, dst, a, b, whole, to_end):
        if dst in self.trees and src != dst:
            self.refused(StepError, self.cache.seq_cp, src, dst)
            return
        super().copy_seq(src, dst, a, b, whole, to_end)

    def keep_seq(self, seq):
        if seq in self.want:
            self.trees = {s: tree for s, tree in self.trees.items() if s == seq}
        super().keep_seq(seq)

    def clear(self):
        self.trees.clear()
        super().clear()

    def may_begin(self, seq, source, verb):
        if seq in self.trees:
            self.refused(StepError, verb, seq, source.tables)
            return False
        return super().may_begin(seq, source, verb)

    def probe(self, seq):
        if seq not in self.trees:
            super().probe(seq)

    def ask(self, n, seq, length):
        super().ask(n, seq, length)
        for other in self.trees.keys() - self.want.keys():
            self.check_cells(other, History())
        assert self.cache.has_tree(seq) == (seq in self.trees)
        tree = self.trees.get(seq, Tree(0))
        assert self.cache.n_nodes(seq) == len(tree.tokens)


TestTreeCacheAgainstHistories = TreeCacheAgainstHistories.TestCase
TestTreeCacheAgainstHistories.settings = settings(max_examples=2 * settings().max_examples)

"""Random walks over the verbs: whatever the order, every output is the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcellar.errors import (
    CacheFullError,
    KVCellarError,
    RewindError,
    SequenceConflictError,
    StepError,
    UnknownSequenceError,
)
from kvcellar.testing.adapter import BackendAdapter
from kvcellar.testing.cases import Case
from kvcellar.testing.driver import Driver
from kvcellar.testing.opening import open_driver

SEQ = st.integers(0, 4)
BATCH = st.lists(st.tuples(SEQ, st.integers(1, 6)), min_size=1, max_size=4)
NODES = st.lists(st.integers(0, 99), min_size=1, max_size=6)
BOUND = st.integers(0, 40)
FATES = st.sampled_from(
    ["done", "done", "done", "done", "done", "cancelled", "raised", "raised and cancelled"]
)
RARELY = st.integers(0, 9).map(lambda n: n == 7)


class Walk(RuleBasedStateMachine):
    """Base of the walks: an open driver, closed again when a walk has ended."""

    def __init__(self, adapter: BackendAdapter, case: Case, kind: str, **settings: Any) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.d: Driver = self.stack.enter_context(open_driver(adapter, case, kind, **settings))

    def teardown(self) -> None:
        self.stack.close()

    def step(self, batch: list[tuple[int, int]], fate: str, n_layers: int) -> None:
        """Run a forward that is let be, is taken back whole, or ends after some layers."""
        d = self.d
        if fate == "done":
            d.forward(*batch)
        elif fate == "cancelled":
            inputs = d.random_inputs(sum(n for _, n in batch))
            first = d.forward(*batch, inputs=inputs)
            d.cancel()
            for a, b in zip(first, d.forward(*batch, inputs=inputs), strict=True):
                np.testing.assert_array_equal(a, b)
            d.cancel()
        else:
            d.abort(n_layers % len(d.turns), *batch)
            if fate == "raised and cancelled":
                d.cancel()

    @precondition(lambda self: self.d.last_step is not None)
    @rule(is_cancelled=RARELY)
    def end_step(self, is_cancelled: bool) -> None:
        if is_cancelled:
            self.d.cancel()
        else:
            self.d.cache.end_step()
            self.d.last_step = None

    @precondition(lambda self: sum(self.d.lengths.values()) > 30)
    @rule(really=RARELY)
    def clear(self, really: bool) -> None:
        if really:
            self.d.clear()

    def refused(self, verb: Callable[..., object], *args: Any) -> KVCellarError | None:
        """Call a verb; where it refuses, nothing may have changed. Returns the refusal."""
        self.d.cache.end_step()
        self.d.last_step = None
        before = self.d.state()
        try:
            verb(*args)
        except KVCellarError as error:
            assert self.d.state() == before
            return error
        return None

    @invariant()
    def agrees(self) -> None:
        self.d.agrees()


class SequenceWalk(Walk):
    """Forwards, forks, cuts, and trees where the session has them."""

    def __init__(self, adapter: BackendAdapter, case: Case, kind: str) -> None:
        super().__init__(adapter, case, kind, capacity=80, min_chunk=4, window_slack=6)

    def seq(self, pick: int) -> int:
        """Return a sequence that is there, as a rule."""
        there = sorted({*self.d.histories, *self.d.trees})
        return there[pick % len(there)] if there and pick < 9 else 4

    def batch(self, drawn: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what was drawn, as far as trees allow: a frontier comes whole and once."""
        out: list[tuple[int, int]] = []
        for seq, n in drawn:
            tree = self.d.trees.get(seq)
            if tree is None:
                out.append((seq, n))
            elif tree.is_pending and not any(s == seq for s, _ in out):
                out.append((seq, len(tree.parents) - tree.frontier))
        return out

    @initialize(n=st.integers(0, 12), m=st.integers(0, 12))
    def prefill(self, n: int, m: int) -> None:
        if n or m:
            self.d.forward(*[(seq, k) for seq, k in ((0, n), (1, m)) if k])

    @rule(drawn=BATCH, fate=FATES, n_layers=st.integers(0, 3))
    def forward(self, drawn: list[tuple[int, int]], fate: str, n_layers: int) -> None:
        d = self.d
        batch = self.batch(drawn)
        if not batch:
            return
        d.cache.end_step()
        fits = d.cache.can_extend(sum(n for s, n in batch if s not in d.trees))
        if fits or d.cache.can_begin_step(batch):
            self.step(batch, fate, n_layers)  # in blocks these sequences may have room, others none
        else:
            assert isinstance(self.refused(d.begin, *batch), CacheFullError)

    @rule(really=RARELY)
    def compact(self, really: bool) -> None:
        if really:
            self.d.compact()

    @rule(seqs=st.lists(SEQ, min_size=1, max_size=5, unique=True))
    def decode(self, seqs: list[int]) -> None:
        self.forward([(seq, 1) for seq in seqs], "done", 0)

    @rule(pick=st.integers(0, 9), dst=SEQ, p0=st.just(0) | BOUND, p1=st.none() | BOUND)
    def cp(self, pick: int, dst: int, p0: int, p1: int | None) -> None:
        d = self.d
        src = self.seq(pick)
        mine = {t.pos: t for t in d.histories.get(dst, [])}
        parts = d._range(src, p0, p1)
        conflicts = any(mine.get(t.pos, t) is not t for t in parts)
        error = self.refused(d.cp, src, dst, p0, p1)
        if error is None:
            assert src in d.histories
            assert not (conflicts and any(g.is_full for g in d.case.groups))
        elif isinstance(error, UnknownSequenceError):
            assert src not in d.histories
        elif isinstance(error, SequenceConflictError):
            assert conflicts
        elif isinstance(error, StepError):
            assert dst in d.trees
        else:
            assert isinstance(error, RewindError) and (d.case.lets_go or d.recurrence)

    @rule(src=st.integers(0, 8), dst=SEQ)
    def fork(self, src: int, dst: int) -> None:
        d = self.d
        src = self.seq(src)
        if src in d.histories and src != dst:
            if dst in {*d.histories, *d.trees}:
                d.rm(dst)
            d.cp(src, dst)

    @rule(pick=st.integers(0, 9), p0=st.just(0) | BOUND, p1=st.none() | BOUND)
    def rm(self, pick: int, p0: int, p1: int | None) -> None:
        d = self.d
        seq = self.seq(pick)
        error = self.refused(d.rm, seq, p0, p1)
        if isinstance(error, StepError):
            assert seq in d.trees
        elif isinstance(error, RewindError):
            assert d.recurrence is not None, "a hole"
            assert p1 is not None and p0 < p1 < d.lengths[seq]
        elif error is not None:
            assert isinstance(error, UnknownSequenceError)
            assert seq not in d.histories

    @precondition(lambda self: self.d.lengths)
    @rule(pick=st.integers(0, 8))
    def keep_point(self, pick: int) -> None:
        self.d.cache.end_step()
        seq = sorted(self.d.lengths)[pick % len(self.d.lengths)]
        self.d.keep_point(seq)

    @precondition(lambda self: any(self.d.points.values()))
    @rule(pick=st.integers(0, 99))
    def drop_point(self, pick: int) -> None:
        there = sorted((seq, at) for seq, points in self.d.points.items() for at in points)
        seq, at = there[pick % len(there)]
        self.d.drop_point(at, seq)

    @rule(pick=st.integers(0, 8), n=st.integers(1, 8))
    def rollback(self, pick: int, n: int) -> None:
        d = self.d
        seq = self.seq(pick)
        length = d.lengths.get(seq, 0)
        if length > n and seq not in d.trees and d.cache.can_resume(seq, length - n):
            d.rm(seq, length - n)

    @precondition(lambda self: len(self.d.lengths) > 2)
    @rule(pick=st.integers(0, 9), really=RARELY)
    def keep(self, pick: int, really: bool) -> None:
        seq = self.seq(pick)
        was_there = seq in self.d.histories
        if really:
            assert (self.refused(self.d.keep, seq) is None) == was_there

    @precondition(lambda self: self.d.has_trees)
    @rule(seq=SEQ, draws=NODES)
    def propose(self, seq: int, draws: list[int]) -> None:
        d = self.d
        tree = d.trees.get(seq)
        if tree is not None and tree.is_pending:
            return
        n_nodes = len(tree.parents) if tree else 0
        parents = [draw % (n_nodes + i + 1) - 1 for i, draw in enumerate(draws)]
        d.cache.end_step()
        fits = d.cache.can_extend(len(parents))
        error = self.refused(d.propose, parents, seq)
        assert (error is None) == fits

    @precondition(lambda self: self.d.has_trees)
    @rule(
        seqs=st.lists(SEQ, min_size=1, max_size=3),
        levels=st.lists(NODES, max_size=3),
        drawn=BATCH,
        fate=FATES,
        pick=st.integers(0, 9),
        leaf=st.integers(0, 99),
    )
    def speculate(
        self,
        seqs: list[int],
        levels: list[list[int]],
        drawn: list[tuple[int, int]],
        fate: str,
        pick: int,
        leaf: int,
    ) -> None:
        """Whole rounds: frontiers on some sequences, each verified, and one committed."""
        for draws in levels:
            for seq in seqs:
                self.propose(seq, draws)
            self.verify(drawn, fate, 2)
        if any(not t.is_pending for t in self.d.trees.values()):
            self.commit(pick, leaf, False)

    @precondition(lambda self: any(t.is_pending for t in self.d.trees.values()))
    @rule(drawn=BATCH, fate=FATES, n_layers=st.integers(0, 3))
    def verify(self, drawn: list[tuple[int, int]], fate: str, n_layers: int) -> None:
        pending = [(seq, 1) for seq, tree in self.d.trees.items() if tree.is_pending]
        plain = [(seq, n) for seq, n in drawn if seq not in self.d.trees]
        self.forward([*plain[:1], *pending, *plain[1:]], fate, n_layers)

    @precondition(lambda self: any(not t.is_pending for t in self.d.trees.values()))
    @rule(pick=st.integers(0, 9), leaf=st.integers(0, 99), is_dropped=RARELY)
    def commit(self, pick: int, leaf: int, is_dropped: bool) -> None:
        d = self.d
        seen = sorted(seq for seq, tree in d.trees.items() if not tree.is_pending)
        seq = seen[pick % len(seen)]
        tree = d.trees[seq]
        chain = sorted(tree.ancestors(leaf % len(tree.parents)))
        d.commit([] if is_dropped else chain, seq)

    @precondition(lambda self: any(t.is_pending for t in self.d.trees.values()))
    @rule(pick=st.integers(0, 9), leaf=st.integers(0, 99), really=RARELY)
    def commit_early(self, pick: int, leaf: int, really: bool) -> None:
        """Commit before the last frontier was verified, which drops it; earlier nodes may stay."""
        d = self.d
        pending = sorted(seq for seq, tree in d.trees.items() if tree.is_pending)
        if really:
            seq = pending[pick % len(pending)]
            n_seen = d.trees[seq].frontier
            chain = sorted(d.trees[seq].ancestors(leaf % n_seen)) if n_seen else []
            d.commit(chain, seq)


class SingleWalk(Walk):
    """One sequence: forwards and rewinds."""

    def __init__(self, adapter: BackendAdapter, case: Case) -> None:
        super().__init__(adapter, case, "decode", capacity=150, min_chunk=4, window_slack=5)

    @rule(n=st.integers(1, 14), fate=FATES, n_layers=st.integers(0, 3))
    def forward(self, n: int, fate: str, n_layers: int) -> None:
        if self.d.cache.can_extend(n):
            if fate.startswith("raised"):  # a layer that met the cache has begun the step
                n_layers = max(1, n_layers % len(self.d.turns))
                fate = fate if n_layers < len(self.d.turns) else "done"
            self.step([(0, n)], fate, n_layers)
        else:
            tokens = self.d.new_tokens([0] * n)
            inputs = self.d.random_inputs(n)
            error = self.refused(self.d.attend, 0, tokens, inputs, self.d.case.in_dtype)
            assert isinstance(error, CacheFullError)

    @rule(n=st.integers(1, 8))
    def decode(self, n: int) -> None:
        for _ in range(n):
            self.forward(1, "done", 0)

    @precondition(lambda self: self.d.lengths.get(0, 0) > 0)
    @rule(n=st.integers(0, 12))
    def rewind(self, n: int) -> None:
        length = self.d.lengths.get(0, 0)
        target, low = max(0, length - n), self.d.cache.resumable_from()
        assert self.d.rewind(target) == target or target < low

    @precondition(lambda self: self.d.lengths.get(0, 0) > 0)
    @rule(is_dropped=RARELY)
    def keep_point(self, is_dropped: bool) -> None:
        self.d.cache.end_step()
        self.d.keep_point()
        if is_dropped:
            self.d.drop_point(min(self.d.points[0]))


def walk_sequences(adapter: BackendAdapter, case: Case, kind: str) -> None:
    """Walk at random through the verbs of a session for many sequences."""
    run_walks(lambda: SequenceWalk(adapter, case, kind))


def walk_one_sequence(adapter: BackendAdapter, case: Case) -> None:
    """Walk at random through the verbs of a session for one sequence."""
    run_walks(lambda: SingleWalk(adapter, case))


def run_walks(make: Callable[[], Walk]) -> None:
    """Run walks, a sixth of the Hypothesis profile's examples: there is one per case and kind."""
    profile = settings.default
    assert profile is not None
    few = settings(
        max_examples=max(3, profile.max_examples // 6),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # a backend may be slow, or its machine
    )
    run_state_machine_as_test(make, settings=few)  # type: ignore[arg-type]  # any factory will do

"""One sequence with mixed layer groups, against a list of token ids."""

from __future__ import annotations

import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvcellar.cache_config import GroupUsage
from kvcellar.errors import CacheFullError, PositionError, RewindError, StepError
from kvcellar.sight import Sight
from tests.bookkeeping.actions import ActionMachine, action
from tests.bookkeeping.byte_simulator import (
    SimulatedContiguous,
    check_causal_masks,
    config_of,
    first_seen,
    settled,
    sight_of,
    snapshot,
    visible,
)

WINDOWS = st.sampled_from(
    [
        *((None,), (None, 4), (None, 1, 7), (3,), (1,), (None, 70), (2, 20)),
        *((None, Sight(chunk=4)), (Sight(chunk=9),), (None, Sight(chunk=1), 5)),
        *((Sight(chunk=70), None), (Sight(chunk=6), Sight(chunk=4)), (3, Sight(chunk=20))),
    ]
)


class ContiguousCacheAgainstAList(ActionMachine):
    """The oracle: the list of the token ids so far."""

    @initialize(
        windows=WINDOWS,
        capacity=st.sampled_from([1, 10, 60, 400, 1500]),
        slack=st.sampled_from([0, 0, 1, 5, 20]),
        min_chunk=st.sampled_from([1, 8, 40]),
    )
    def start(self, windows, capacity, slack, min_chunk):
        self.windows, self.capacity, self.slack = windows, capacity, slack
        self.min_chunk = min_chunk
        self.cache = SimulatedContiguous(config_of(windows, capacity, slack, min_chunk))
        self.want: list[int] = []
        self.undo: list[int] | None = None
        self.is_uncut = True
        self.n_ids = 0
        self.longest_step = 0

    def refused(self, error, verb, *args):
        before = snapshot(settled(self.cache))
        self.undo = None
        with pytest.raises(error) as info:
            verb(*args)
        assert len(str(info.value)) > 20
        assert snapshot(settled(self.cache)) == before

    @action(
        weight=10,
        n=st.sampled_from([1, 1, 1, 2, 3, 9, 70, 150, 300]),
        end=st.sampled_from(["finish", "finish", "finish", "finish", "cancel", "abandon"]),
        n_layers=st.integers(1, 4),
        say_positions=st.booleans(),
    )
    def step(self, n, end, n_layers, say_positions):
        cache = self.cache
        fits = len(self.want) + n <= self.capacity
        assert settled(cache).can_extend(n) == fits
        positions = list(range(len(self.want), len(self.want) + n))
        said = positions if say_positions else None
        if not fits:
            self.refused(CacheFullError, cache.plan, 0, n, said)
            return
        self.undo = None
        tokens = list(range(self.n_ids, self.n_ids + n))
        self.n_ids += n
        history = dict(enumerate(self.want + tokens))
        n_layers = cache.n_layers if end == "finish" else min(n_layers, cache.n_layers)
        if end == "abandon":  # a cache without begin_step knows no forward before its first layer
            n_layers = min(n_layers, cache.n_layers - 1)
        for layer, window in list(enumerate(cache.layer_windows()))[:n_layers]:
            seen = cache.run_layer(layer, tokens, said)
            assert seen == [visible(history, p, window) for p in positions]
            plan = cache.plans[cache.group_of(layer)]
            check_causal_masks(plan.reads, window)
            assert len(plan.writes) == 1, "history stays in one run"
            assert plan.n_cells == plan.writes[0].run.stop
            assert all(len(read.runs) == 1 for read in plan.reads)
        if end == "finish":
            self.undo, self.want = self.want, self.want + tokens
        elif end == "cancel":
            cache.cancel_step()
        self.longest_step = max(self.longest_step, n)

    @action(weight=2)
    def cancel(self):
        self.cache.cancel_step()
        if self.undo is not None:
            self.want, self.undo = self.undo, None

    @action()
    def end_step(self):
        self.cache.end_step()
        self.undo = None

    @action(weight=4, draw=st.integers(0, 2000), back=st.booleans())
    def rewind(self, draw, back):
        length = len(self.want)
        new_length = max(0, length - draw % 12) if back else draw % (length + 3)
        gone = self.is_gone(new_length)
        assert gone == (settled(self.cache).steps.resume_at(0, new_length) != new_length)
        if new_length > length:
            self.refused(RewindError, self.cache.rewind, new_length)
            return
        asked = new_length
        if gone:
            assert new_length < settled(self.cache).resumable_from()
            new_length = next(n for n in range(new_length, -1, -1) if not self.is_gone(n) or not n)
        self.undo = None
        assert self.cache.rewind(asked) == new_length
        del self.want[new_length:]
        self.is_uncut &= new_length in (0, length)
        twin = copy.deepcopy(self.cache)
        if twin.can_extend(1):
            history = dict(enumerate([*self.want, -2]))
            for layer, window in enumerate(twin.layer_windows()):
                assert twin.run_layer(layer, [-2]) == [visible(history, new_length, window)]

    def is_gone(self, new_length):
        """True if some group has no cell for a position that the next token would look at."""
        bases = [layout.base for layout in settled(self.cache).layouts]
        return any(
            first_seen(window, new_length) < min(base, new_length)
            for window, base in zip(self.windows, bases, strict=True)
        )

    @action()
    def clear(self):
        self.cache.clear()
        self.want.clear()
        self.undo = None
        self.is_uncut = True

    @action(off=st.sampled_from([-3, -1, 1, 4]), n=st.integers(1, 9))
    def bring_other_positions(self, off, n):
        length, plan = len(self.want), self.cache.plan
        if n > 1:
            self.refused(PositionError, plan, 0, n, [length] * n)
            self.refused(PositionError, plan, 0, n, list(range(length, length + n - 1)))
            self.refused(PositionError, plan, 0, n, [length, *range(length + 2, length + n + 1)])
        self.refused(PositionError, plan, 0, n, list(range(length + off, length + off + n)))
        self.refused(PositionError, plan, 0, n, list(range(length, length + n + 1)))
        self.refused(PositionError, plan, 0, n, [])
        self.refused(StepError, plan, 0, 0, [])
        self.refused(StepError, plan, 99, n, None)

    @action(weight=2, n=st.integers(0, 100))
    def questions_change_nothing(self, n):
        cache = self.cache
        before = snapshot(cache)
        cache.can_extend(n), cache.is_step_open, cache.needs_positions(), cache.usage()
        cache.resumable_from(), cache.length, cache.capacity
        assert snapshot(cache) == before

    @invariant()
    def agrees(self):
        cache = self.cache
        assert cache.length == len(self.want)
        low = cache.resumable_from()
        assert 0 <= low <= len(self.want) or self.cache.is_step_open
        if self.is_uncut:
            assert low <= max(0, len(self.want) - self.slack), "the slack is kept"
        for group, usage in enumerate(cache.usage().groups):
            window = self.windows[group]
            if window is None:
                assert usage.live == usage.n_cells == len(self.want)
            else:
                keep = sight_of(window).most_before + self.slack
                assert usage.n_cells <= max(2 * keep, self.min_chunk) + self.longest_step


TestContiguousCacheAgainstAList = ContiguousCacheAgainstAList.TestCase


def test_a_history_from_elsewhere_goes_on_where_its_rows_are():
    cache = SimulatedContiguous(config_of((None, 4), capacity=12))
    cache.adopt(9, [9, 5])
    assert (cache.length, cache.held(0), cache.held(1), cache.resumable_from()) == (9, 9, 5, 7)
    assert cache.usage().groups == (GroupUsage(None, 12, 9, 0, 9), GroupUsage(4, 12, 5, 0, 5))
    for layer, first in ((0, 0), (1, 4), (2, 0)):
        cache.stored[layer][: 9 - first] = range(first, 9)
    history = dict(enumerate(range(12)))
    for layer, window in enumerate(cache.layer_windows()):
        assert [cache.length_in(other) for other in range(3)] == [
            12 if layer > i else 9 for i in range(3)
        ]
        assert cache.run_layer(layer, [9, 10, 11]) == [
            visible(history, p, window) for p in (9, 10, 11)
        ]
    assert [cache.length_in(layer) for layer in range(3)] == [12] * 3


def test_a_history_that_cannot_go_on_or_does_not_fit_is_not_adopted():
    cache = SimulatedContiguous(config_of((None, 4), capacity=12))
    before = snapshot(cache)
    for length, held, error, said in (
        (9, [8, 5], RewindError, r"of 9 tokens needs the last 9 in layers \(0, 2\), and 8 are"),
        (9, [9, 2], RewindError, r"of 9 tokens needs the last 3 in layers \(1,\), and 2 are"),
        (9, [9, 10], RewindError, r"needs the last 3 in layers \(1,\), and 10 are there"),
        (13, [13, 3], CacheFullError, "of 13 tokens, 12 cells; raise capacity"),
    ):
        with pytest.raises(error, match=said):
            cache.adopt(length, held)
        assert snapshot(cache) == before
    cache.adopt(12, [12, 3])
    with pytest.raises(RewindError, match="of 2 tokens cannot start here: the cache holds 12;"):
        cache.adopt(2, [2, 2])
    cache.clear()
    cache.adopt(0, [0, 0])
    assert cache.length == 0 and cache.forward([5])[0] == [[5]]


@pytest.mark.parametrize("window, slack", [(2, 0), (64, 0), (64, 10), (1000, 64)])
def test_a_window_copies_about_one_cell_per_token_and_never_onto_itself(window, slack):
    cache = SimulatedContiguous(config_of((window,), 20_000, slack, min_chunk=2))
    moved = []

    def move(group, base, src_cells):
        assert base == 0 and src_cells.min() >= len(src_cells)
        moved.append(len(src_cells))

    cache.ids.move_cells = move
    for _ in range(10_000):
        for layer in range(cache.n_layers):
            cache.plan(layer, 1, None)
            cache.wrote(layer)
    assert 0 < sum(moved) <= 10_000

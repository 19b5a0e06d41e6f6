"""A history against lists: what was read stays, prefixes part, and common prefixes are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.errors import PromptError
from kvcellar.history import History, common_prefix

TOKENS = st.lists(st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1), max_size=40)


def naive(a: Any, b: Any) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class HistoriesAgainstLists(RuleBasedStateMachine):
    """The oracle: one list per history; every view that was taken, beside what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[History] = []
        self.want: list[list[int]] = []
        self.seen: list[tuple[Any, list[int]]] = []

    @initialize(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        self._add(History(tokens), list(tokens))

    def _add(self, history: History, tokens: list[int]) -> None:
        self.histories.append(history)
        self.want.append(tokens)

    @rule(data=st.data(), token=st.integers(0, 3))
    def append(self, data: st.DataObject, token: int) -> None:
        at = self._which(data)
        self.histories[at].append(token)
        self.want[at].append(token)

    @rule(data=st.data(), tokens=TOKENS, kind=st.sampled_from([list, tuple, np.array, History]))
    def extend(self, data: st.DataObject, tokens: list[int], kind: Callable[..., Any]) -> None:
        at = self._which(data)
        self.histories[at].extend(kind(tokens) if tokens else [])
        self.want[at].extend(tokens)

    @rule(data=st.data())
    def extend_by_another(self, data: st.DataObject) -> None:
        at, other = self._which(data), self._which(data)
        if len(self.want[other]) < 200:
            self.histories[at].extend(self.histories[other])
            self.want[at].extend(list(self.want[other]))

    @rule(data=st.data())
    def prefix(self, data: st.DataObject) -> None:
        at = self._which(data)
        n = data.draw(st.integers(0, len(self.want[at])))
        self._add(self.histories[at].prefix(n), self.want[at][:n])

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        at = self._which(data)
        start, stop = sorted(data.draw(st.tuples(st.integers(0, 50), st.integers(0, 50))))
        view = self.histories[at][start:stop]
        assert not view.flags.writeable
        self.seen.append((view, self.want[at][start:stop]))

    @rule(data=st.data())
    def compare(self, data: st.DataObject) -> None:
        at, other = self._which(data), self._which(data)
        start = data.draw(st.integers(0, len(self.want[at])))
        n = naive(self.want[at][start:], self.want[other])
        assert self.histories[at].common_prefix(self.histories[other], start) == n
        assert self.histories[at].common_prefix(np.asarray(self.histories[other]), start) == n
        assert (self.histories[at] == self.histories[other]) == (self.want[at] == self.want[other])

    @rule(data=st.data(), size=st.integers(1, 7))
    def spans(self, data: st.DataObject, size: int) -> None:
        at = self._which(data)
        want = self.want[at]
        found = [
            (start, stop, view.tolist()) for start, stop, view in self.histories[at].spans(size)
        ]
        whole = range(0, len(want) - size + 1, size)
        assert found == [(start, start + size, want[start : start + size]) for start in whole]

    def _which(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.want) - 1))

    @invariant()
    def agrees(self) -> None:
        for history, want in zip(self.histories, self.want, strict=True):
            assert len(history) == len(want)
            assert list(history) == want
            assert history == want
            assert history.tokens.dtype == np.int64
        for view, then in self.seen:
            assert view.tolist() == then


TestHistoriesAgainstLists = HistoriesAgainstLists.TestCase


@given(
    n=st.integers(0, 3000),
    at=st.none() | st.integers(0, 3000),
    more=st.integers(0, 5),
)
def test_common_prefix_is_the_naive_loop_s_also_across_its_chunks(
    n: int, at: int | None, more: int
) -> None:
    a = np.arange(n, dtype=np.int64)
    b = np.arange(n + more, dtype=np.int64)
    if at is not None and at < n:
        b[at] = -1
    assert common_prefix(a, b) == common_prefix(b, a) == naive(a.tolist(), b.tolist())
    assert History(a).common_prefix(b) == naive(a.tolist(), b.tolist())


@pytest.mark.parametrize(
    "wrong", [1.5, True, None, "a", 2**63, -(2**63) - 1], ids=lambda value: repr(value)
)
def test_what_is_no_token_is_refused_and_nothing_is_added(wrong: Any) -> None:
    with pytest.raises(PromptError):
        History([1, wrong])
    history = History([1, 2])
    with pytest.raises(PromptError):
        history.append(wrong)
    with pytest.raises(PromptError):
        history.extend([3, wrong])
    assert history == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        None,
        "12",
        {1: 2},
        np.zeros((2, 2), np.int64),
        np.zeros(2),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=lambda value: repr(value),
)
def test_what_is_no_row_of_whole_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(PromptError):
        History(wrong)


def test_the_callers_array_is_copied_and_a_history_is_shared() -> None:
    array = np.arange(5, dtype=np.int64)
    history = History(array)
    array[0] = 99
    assert history == [0, 1, 2, 3, 4]
    same = History(history)
    assert np.shares_memory(same.tokens, history.tokens)
    same.append(5)
    history.append(6)
    assert (same[5], history[5]) == (5, 6)


def test_a_prefix_shares_memory_until_it_is_appended_to() -> None:
    whole = History(range(1000))
    part = whole.prefix(500)
    assert np.shares_memory(part.tokens, whole.tokens)
    part.append(-7)
    assert not np.shares_memory(part.tokens, whole.tokens)
    assert (whole[500], part[500]) == (500, -7)


def test_appending_copies_a_history_now_and_then_alone() -> None:
    history = History()
    moves, last = 0, None
    for token in range(10_000):
        history.append(token)
        at = history.tokens.__array_interface__["data"][0]
        moves += at != last
        last = at
    assert history == list(range(10_000))
    assert moves < 25


def test_places_outside_of_a_history_are_refused() -> None:
    history = History([3, 4])
    assert (history[-1], history[0]) == (4, 3)
    for at in (2, -3):
        with pytest.raises(IndexError):
            history[at]
    for n in (-1, 3):
        with pytest.raises(IndexError):
            history.prefix(n)
    assert repr(History(range(9))) == "History(9 tokens: 0, 1, 2, 3, 4, 5, 6, 7, ...)"
    with pytest.raises(TypeError):
        hash(history)

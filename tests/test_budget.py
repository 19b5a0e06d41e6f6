"""Sizes as people write them, and a budget against a plain account of who holds what."""

from __future__ import annotations

import mmap
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcellar.budget import MemoryBudget, format_size, parse_size, resident_bytes
from kvcellar.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("512 mib", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.1KB", 100),
        ("2TB", 2 * 10**12),
        ("3KiB", 3072),
        ("1000", 1000),
        ("1000B", 1000),
        (" 7 ", 7),
    ],
)
def test_a_size_is_a_number_with_a_unit_or_plain_bytes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "24XB", "-1GB", "1e9", "24 GB of it", "24G", "0x10", "nan", "24,5GB"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="is not a size; write bytes, or a number with KB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.4B", "0.0001KB"])
def test_less_than_a_byte_is_no_memory(text):
    with pytest.raises(ConfigError, match="no memory at all"):
        parse_size(text)


@given(st.integers(1, 10**15))
def test_a_size_that_is_shown_is_close_to_what_it_was(n_bytes):
    assert parse_size(format_size(n_bytes)) == pytest.approx(n_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (24 * 10**9, "24.00 GB"),
        (999_999, "1.00 MB"),
        (123_456_789, "123.5 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_have_about_four_digits(n_bytes, text):
    assert format_size(n_bytes) == text


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is all there is")
def test_resident_memory_grows_with_what_is_touched_and_shrinks_again():
    before = resident_bytes()
    block = mmap.mmap(-1, 50_000_000)  # the allocator might keep what it is given back
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    held = resident_bytes()
    assert held - before > 45_000_000
    block.close()
    assert held - resident_bytes() > 45_000_000


@pytest.mark.parametrize(("base", "reserve"), [(100, 0), (0, 100), (60, 40), (200, 3)])
def test_a_budget_that_leaves_nothing_says_all_its_numbers(base, reserve):
    with pytest.raises(
        ConfigError, match=rf"budget of 100 B .* {base} B are held already"
    ) as caught:
        MemoryBudget(100, base_bytes=base, reserve_bytes=reserve)
    assert f"{reserve} B are set aside" in str(caught.value)
    assert f"give more than {base + reserve} B" in str(caught.value)


@pytest.mark.parametrize("values", [(-1, 0, 0), (10, -1, 0), (10, 0, -1)])
def test_negative_bytes_are_refused(values):
    limit, base, reserve = values
    with pytest.raises(ConfigError, match="counts bytes from 0 on"):
        MemoryBudget(limit, base_bytes=base, reserve_bytes=reserve)


class BudgetAgainstAList(RuleBasedStateMachine):
    """The oracle: a list of every grant that was not given back."""

    def __init__(self):
        super().__init__()
        self.budget = MemoryBudget(1000, base_bytes=250, reserve_bytes=50)
        self.grants: list[int] = []

    @rule(n=st.integers(0, 900))
    def ask(self, n):
        fits = sum(self.grants) + n <= 700
        assert self.budget.can_ask(n) == fits
        assert self.budget.ask(n) == fits
        if fits:
            self.grants.append(n)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def give_back(self, data):
        at = data.draw(st.integers(0, len(self.grants) - 1))
        part = data.draw(st.integers(0, self.grants[at]))
        self.budget.give_back(part)
        self.grants[at] -= part

    @rule(more=st.integers(1, 100))
    def nobody_gives_back_what_nobody_has(self, more):
        with pytest.raises(AssertionError, match="no more is given back"):
            self.budget.give_back(sum(self.grants) + more)

    @invariant()
    def agrees(self):
        assert self.budget.held_bytes == sum(self.grants)
        assert self.budget.available_bytes == 700 - sum(self.grants)
        assert self.budget.kv_bytes == 700
        assert self.budget.base_bytes + self.budget.reserve_bytes + self.budget.held_bytes <= 1000


TestBudgetAgainstAList = BudgetAgainstAList.TestCase


def test_threads_that_ask_at_once_never_get_more_than_there_is():
    budget = MemoryBudget(1000)
    granted: list[int] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        n = 0
        for _ in range(500):
            if budget.ask(7):
                n += 7
            if n and _ % 3 == 0:
                budget.give_back(7)
                n -= 7
        granted.append(n)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.held_bytes == sum(granted) <= 1000

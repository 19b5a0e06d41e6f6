"""Caches with a memory budget: cells are handed out once their bytes are granted, never before."""

from __future__ import annotations

import gc
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.bookkeeping.cells.growth import ARRAY_BYTES, INDEX_BYTES, Growth, grown_size
from kvcellar.bookkeeping.cells.pool import MAX_GAP, MIN_RUN, BlockPool
from kvcellar.bookkeeping.layouts.layout import Demand
from kvcellar.bookkeeping.layouts.rows import Rows
from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import make_config
from kvcellar.errors import CacheFullError, ConfigError, KVCellarError
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.engine.fakes import KINDS, STATES

FULL = ModelCacheParams(4, 2, 8)  # 4 layers * 2 heads * (8 + 8) * 4 bytes = 512 bytes a cell
MIXED = ModelCacheParams(
    6, 2, 8, groups=(LayerGroup((0, 1), 2, 8, 8), LayerGroup((2, 3, 4, 5), 2, 8, 8, window=6))
)
"""256 bytes a cell with full history, 512 behind a window."""

CELL = 512


def config(budget: MemoryBudget | None, params: ModelCacheParams = FULL, **more: Any) -> Any:
    return make_config(
        params, **({"capacity": 4096, "min_chunk": 16, "window_slack": 2} | more), budget=budget
    )


def write(cache: Any) -> None:
    """What a forward does: every layer asks for its plan and writes."""
    for layer in range(cache.steps.n_layers):
        plan = cache.steps.plan(layer, cache.steps._open.n_tokens, None)
        assert plan.n_cells == cache.steps.growth.sizes[cache.steps.group_of(layer)]
        assert all(write.run.stop <= plan.n_cells for write in plan.writes)
        cache.steps.wrote(layer)
    state = cache.config.params.state
    for layer in range(0 if state is None else len(state.layers)):
        states = cache.steps.plan_states(layer, cache.steps._open.n_tokens, None)
        assert states.n_slots == cache.steps.growth.sizes[-1]
        cache.steps.wrote_states(layer)
    cache.end_step()


def feed(cache: Any, seq_id: int, n: int) -> None:
    for start in range(0, n, 32):
        cache.begin_step([(seq_id, min(32, n - start))])
        write(cache)


def sizes(cache: Any) -> list[int]:
    return list(cache.steps.growth.sizes)


def granted_bytes(cache: Any) -> int:
    costs = [group.cell_bytes(cache.config.kv) + INDEX_BYTES for group in cache.steps.groups]
    arrays = ARRAY_BYTES * sum(cache.steps.growth.limits)
    return arrays + sum(n * cost for n, cost in zip(sizes(cache), costs, strict=True))


# Growing ------------------------------------------------------------------------------------------


def test_with_ample_memory_a_pool_doubles_as_it_would_without_a_budget():
    cache = KINDS["seq"](config(MemoryBudget(10**8)))
    allocated = 0
    for _ in range(40):
        feed(cache, 0, 25)
        allocated = grown_size(cache.layouts[0].pool.n_cells, allocated, 16, 4096)
        assert sizes(cache) == [allocated]


def test_near_its_end_a_pool_grows_by_less_than_double_and_uses_nearly_all_there_is():
    budget = MemoryBudget(400_000)
    cache = KINDS["seq"](config(budget))
    steps = []
    while cache.can_extend(1):
        feed(cache, 0, 1)
        if not steps or sizes(cache) != steps[-1]:
            steps.append(sizes(cache))
    doubled = [b[0] == 2 * a[0] for a, b in pairwise(steps)]
    assert doubled[0] and not doubled[-1]
    assert cache.seq_len(0) >= cache.capacity
    assert budget.available_bytes < steps[-1][0] * CELL // 4 + CELL + INDEX_BYTES
    assert cache.usage().groups[0].capacity == cache.steps.growth.limits[0] < 4096
    with pytest.raises(CacheFullError, match=r"step needs 1 cells, 0 free .* give more memory"):
        cache.begin_step([(0, 1)])


def test_a_growing_layers_old_copy_is_asked_for_until_all_layers_have_written():
    budget = MemoryBudget(10**7)
    cache = KINDS["seq"](config(budget))
    feed(cache, 0, 16)
    settled = budget.held_bytes
    assert settled == granted_bytes(cache)
    cache.begin_step([(0, 1)])
    assert sizes(cache) == [32]
    assert budget.held_bytes == granted_bytes(cache) + 16 * CELL // 4  # one layer of four
    write(cache)
    assert budget.held_bytes == granted_bytes(cache)


def test_the_old_copy_counts_against_the_budget():
    probe = KINDS["seq"](config(MemoryBudget(10**7)))
    feed(probe, 0, 16)
    held = granted_bytes(probe)
    cell = CELL + INDEX_BYTES
    for slack, grows in ((16 * CELL // 4 - 1, False), (16 * CELL // 4, True)):
        budget = MemoryBudget(10**7)
        cache = KINDS["seq"](config(budget))
        feed(cache, 0, 16)
        assert budget.ask(budget.available_bytes - cell - slack)
        assert budget.held_bytes == 10**7 - cell - slack
        assert cache.can_extend(1) == grows
    assert held


def test_a_cancelled_step_keeps_the_grant_and_its_copy_until_the_pools_have_grown():
    budget = MemoryBudget(10**7)
    cache = KINDS["seq"](config(budget))
    feed(cache, 0, 16)
    cache.begin_step([(0, 1)])
    held = budget.held_bytes
    cache.cancel_step()
    assert budget.held_bytes == held
    feed(cache, 0, 1)
    assert budget.held_bytes == granted_bytes(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_growth_leaves_cache_and_budget_as_they_were(kind):
    budget = MemoryBudget(2_000_000)
    cache = KINDS[kind](config(budget, MIXED))
    if kind == "contiguous":
        cache.steps.plan(0, 20, None)
        for layer in range(cache.steps.n_layers):
            if layer:
                cache.steps.plan(layer, 20, None)
            cache.steps.wrote(layer)
        cache.end_step()
    else:
        feed(cache, 3, 20)
    rest = budget.available_bytes
    assert budget.ask(rest)
    before = (sizes(cache), budget.held_bytes, cache.usage())
    n = 60
    assert not cache.can_extend(n)
    with pytest.raises(CacheFullError, match=r"KV may take 2\.00 MB of 2\.00 MB, 0 B are left"):
        if kind == "contiguous":
            cache.steps.plan(0, n, None)
        else:
            assert not cache.can_begin_step([(3, n)])
            cache.begin_step([(3, n)])
    assert (sizes(cache), budget.held_bytes, cache.usage()) == before
    budget.give_back(rest)
    assert cache.can_extend(n)


def test_a_group_that_needs_nothing_is_granted_nothing():
    growth = Growth(config(MemoryBudget(10**6), MIXED), MemoryBudget(10**6))
    assert growth.add([5, 0]) and growth.sizes == [16, 0]
    assert growth.add([0, 3]) and growth.sizes == [16, 16]
    assert growth.add([-4, -2]) and growth.sizes == [16, 16]


def test_windows_grow_without_what_full_groups_would_have_to_leave_them():
    budget = MemoryBudget(10**6)
    growth = Growth(config(budget, MIXED), budget)
    assert growth.add([16, 16])
    growth.settle()
    (_, _), (size, copied) = bytes_of(MIXED, config(budget, MIXED).kv)
    assert budget.ask(budget.available_bytes - 7 * size - 16 * copied)
    assert growth.can_add([0, 7]) and not growth.can_add([0, 8]) and not growth.can_add([1, 0])
    assert growth.add([0, 7]) and growth.sizes == [16, 23]


def test_both_groups_are_granted_or_none():
    budget = MemoryBudget(3_000_000)
    cache = KINDS["seq"](config(budget, MIXED, window_slack=0))
    feed(cache, 0, 16)
    before = sizes(cache)
    n = 8
    full, window = (group.cell_bytes(cache.config.kv) for group in cache.steps.groups)
    # room for the new cells of the full group alone: not for the window group's beside them
    left = n * (full + INDEX_BYTES) + before[0] * full
    assert budget.ask(budget.available_bytes - left)
    assert not cache.can_begin_step([(1, before[1] - cache.layouts[1].pool.n_taken + n)])
    with pytest.raises(CacheFullError):
        cache.begin_step([(1, before[1] - cache.layouts[1].pool.n_taken + n)])
    assert sizes(cache) == before
    assert window > full


@pytest.mark.parametrize("seen", [{"window": 6}, {"chunk": 6}], ids=["window", "chunk"])
def test_full_groups_leave_the_windows_of_one_sequence_their_room(seen):
    narrow = LayerGroup((2, 3, 4, 5), 2, 8, 8, **seen)
    mixed = ModelCacheParams(6, groups=(LayerGroup((0, 1), 2, 8, 8), narrow))
    cache = KINDS["seq"](config(MemoryBudget(700_000), mixed))
    tokens = 0
    while cache.can_begin_step([(0, 1)]) and tokens < 10_000:
        feed(cache, 0, 1)
        tokens += 1
    assert tokens >= cache.capacity
    cache.seq_rm(0)
    assert cache.can_begin_step([(1, 400)])


def test_a_short_request_after_a_long_one_finds_its_cells_again():
    cache = KINDS["seq"](config(MemoryBudget(700_000), MIXED))
    for _ in range(3):
        feed(cache, 0, cache.capacity)
        assert cache.seq_len(0) == cache.capacity
        cache.seq_rm(0)
        cache.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seen", [{"window": 6}, {"chunk": 6}], ids=["window", "chunk"])
def test_what_fits_is_counted_in_steps_between_which_windows_let_go(kind, seen):
    narrow = LayerGroup(tuple(range(1, 9)), 2, 8, 8, **seen)
    params = ModelCacheParams(9, groups=(LayerGroup((0,), 2, 8, 8), narrow))
    cache = KINDS[kind](config(MemoryBudget(1_500_000), params, block_size=4))
    # All at once the window group alone would take capacity * 8 layers * 128 bytes.
    assert cache.capacity * 8 * 128 > 1.5 * 1_500_000
    assert cache.can_extend(cache.capacity - 3)
    if kind != "contiguous":
        assert cache.n_free >= cache.capacity - 3
        feed(cache, 0, cache.capacity)
        assert cache.seq_len(0) == cache.capacity
    assert not cache.can_extend(cache.config.capacity + 1)


@pytest.mark.parametrize(
    "n_cells, allocated, min_chunk, capacity, size",
    [
        *((5, 0, 16, 100, 16), (16, 0, 16, 100, 16), (17, 0, 16, 100, 32), (17, 16, 16, 100, 32)),
        *((90, 16, 16, 100, 100), (5, 0, 16, 10, 10), (5, 40, 16, 100, 40), (60, 40, 16, 100, 80)),
        *((100, 100, 16, 100, 100), (5, 0, 0, 100, 5), (5, 9, 0, 100, 9)),
    ],
)
def test_a_pool_doubles_from_its_first_chunk_up_to_its_capacity(
    n_cells, allocated, min_chunk, capacity, size
):
    assert grown_size(n_cells, allocated, min_chunk, capacity) == size


WINDOWS = ModelCacheParams(
    3,
    groups=(LayerGroup((0,), 2, 8, 8, window=6), LayerGroup((1, 2), 1, 4, 8, chunk=40)),
)
RECURRENT = ModelCacheParams(3, groups=(LayerGroup((0, 1, 2), 2, 8, 8),), state=STATES)


def bytes_of(
    params: ModelCacheParams, kv: Any, has_whole_blocks: bool = False
) -> list[tuple[int, int]]:
    """Per group, and for slots: what a cell takes, and what of it is copied when a pool grows."""
    sizes = [
        (g.cell_bytes(kv), g.cell_bytes(kv) // (1 if has_whole_blocks else len(g.layers)))
        for g in params.groups
    ]
    if params.state is not None:
        sizes.append((params.state.slot_bytes, params.state.most_bytes))
    return [(size + INDEX_BYTES, copied) for size, copied in sizes]


@given(
    params=st.sampled_from([FULL, MIXED, WINDOWS, RECURRENT]),
    n_bytes=st.integers(4_000, 900_000),
    capacity=st.sampled_from([60, 700, 2000]),
    block_size=st.sampled_from([1, 4, 16]),
    slack=st.sampled_from([0, 64]),
    has_one_run=st.booleans(),
    layout=st.sampled_from(["layer_first", "block_first"]),
    n_slots=st.sampled_from([8, 400]),
)
@example(MIXED, 700_000, 2000, 1, 0, False, "layer_first", 8)
@example(MIXED, 700_000, 2000, 16, 0, True, "block_first", 8)
@example(RECURRENT, 30_000, 700, 4, 0, False, "layer_first", 400)
@example(WINDOWS, 30_000, 700, 4, 0, False, "layer_first", 8)
def test_limits_and_the_longest_sequence_are_what_the_budget_holds_by_the_definition(
    params, n_bytes, capacity, block_size, slack, has_one_run, layout, n_slots
):
    budget, n_groups = MemoryBudget(n_bytes), len(params.groups)
    more = {"capacity": capacity, "window_slack": slack, "n_slots": n_slots, "layout": layout}
    made = config(budget, params, **more)
    sizes = bytes_of(params, made.kv, block_size > 1 and layout == "block_first")
    limits = [
        min(capacity, n_bytes // size) // block_size * block_size for size, _ in sizes[:n_groups]
    ]
    if params.state is not None:
        limits.append(min(n_slots, n_bytes // sizes[-1][0], max(2, n_bytes // 2 // sizes[-1][0])))
    left = n_bytes - ARRAY_BYTES * sum(limits)

    def kept(group: LayerGroup, n: int) -> int:
        keep = group.sight.most_before + slack
        most = 512 + (max(2 * keep, 16) if has_one_run else keep + MIN_RUN)
        return n if group.is_full else min(n, -(-most // block_size) * block_size)

    full = [n for n, group in zip(limits, params.groups, strict=False) if group.is_full]
    longest = 0
    for n in range(0, min(full or [max(limits[:n_groups])]) + 1, block_size):
        cells = [kept(group, n) for group in params.groups] + limits[n_groups:]
        needed = sum(c * size for c, (size, _) in zip(cells, sizes, strict=True))
        copied = max(c * copied for c, (_, copied) in zip(cells, sizes, strict=True))
        longest = n if needed + copied <= left else longest
    if not longest:
        with pytest.raises(ConfigError, match="give more memory"):
            Growth(made, budget, block_size=block_size, has_one_run=has_one_run)
        return
    growth = Growth(made, budget, block_size=block_size, has_one_run=has_one_run)
    assert (growth.limits, growth.n_fitting) == (limits, longest)
    assert growth.sizes == [0] * len(limits) and budget.held_bytes == n_bytes - left
    for n in (0, 1, longest, longest + 1):
        cells = [kept(group, n) for group in params.groups]
        if n > longest and any(group.is_full for group in params.groups):
            cells = [n] * n_groups
        assert growth.cells_for(n) == cells + [min(n, 1)] * (len(limits) - n_groups)
    for free in ([0] * len(limits), [7] * len(limits)):
        most = growth.most_tokens(free)
        fits = [
            growth.can_add([c - f for c, f in zip(growth.cells_for(n), free, strict=True)])
            for n in (most, most + 1)
        ]
        assert fits[0] or not most
        assert not fits[1] or most == max(n + f for n, f in zip(limits, free, strict=True))


@given(
    params=st.sampled_from([FULL, MIXED, WINDOWS, RECURRENT]),
    n_bytes=st.integers(20_000, 400_000),
    taken=st.integers(0, 200_000),
    steps=st.lists(st.integers(1, 200), max_size=8),
    points=st.booleans(),
)
@example(FULL, 200_000, 0, [100, 200, 200], False)
@example(WINDOWS, 20_000, 0, [54], False)  # less than the windows of one step take
def test_one_history_grows_by_what_it_is_said_to_and_by_no_more(
    params, n_bytes, taken, steps, points
):
    budget = MemoryBudget(n_bytes)
    try:
        cache = KINDS["contiguous"](config(budget, params, capacity=500, n_slots=5))
    except ConfigError:
        return
    budget.ask(min(taken, budget.available_bytes))
    for n in steps:
        could, before = cache.can_extend(n), (sizes(cache), budget.held_bytes, cache.length)
        try:
            plans = cache.steps.plan_all(n, None)
        except CacheFullError as full:
            assert not could
            free = max(0, cache.capacity - cache.length)
            assert f"needs {n} cells, {free} free of {cache.capacity}" in str(full)
            assert (sizes(cache), budget.held_bytes, cache.length) == before
        else:
            assert could
            assert [plan.n_cells for plan in plans] == sizes(cache)[: len(plans)]
            cache.steps.wrote_all()
            cache.end_step()
            assert cache.length == before[-1] + n
            if points:
                cache.keep_point(cache.length)
        cache.steps.growth.check()


@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
@pytest.mark.parametrize("n_bytes", [20_000, 40_000, 90_000, 400_000])
def test_of_windows_alone_no_more_is_free_than_a_sequence_can_have(kind, n_bytes):
    cache = KINDS[kind](config(MemoryBudget(n_bytes), WINDOWS, capacity=2000, block_size=4))
    n = cache.n_free
    assert cache.can_extend(n) and n >= cache.capacity - 3
    feed(cache, 0, n)
    assert cache.seq_len(0) == n


def test_a_budget_that_holds_a_sequence_to_the_byte_holds_it():
    n_bytes = 20 * (CELL + INDEX_BYTES + CELL // 4 + ARRAY_BYTES)
    for more, fits in ((0, 20), (-1, 19)):
        budget = MemoryBudget(n_bytes + more)
        assert Growth(config(budget, capacity=20), budget).n_fitting == fits


def test_room_is_wished_for_so_that_half_of_what_is_taken_stays_free_behind_a_demand():
    pool = BlockPool(20_000, n_granted=1000)
    rows = Rows(pool, {})
    pool.claim(0, 0, 601)
    wishes = [rows.n_to_place(Demand(n, 399)) for n in (10, 99, 100, 200, 399, 500)]
    assert wishes == [0, 0, 1, 101, 300, 300], "what is missing is asked for anyway"
    rows.grant(20_000)
    pool.claim(0, 601, 7399)
    assert rows.n_to_place(Demand(11_000, 12_000)) == 11_000 + MAX_GAP - 12_000


# Sharing ------------------------------------------------------------------------------------------


def test_two_caches_share_one_budget_and_a_dead_one_gives_its_bytes_back():
    budget = MemoryBudget(400_000)
    first, second = (
        KINDS["seq"](config(budget, capacity=512)),
        KINDS["seq"](config(budget, capacity=512)),
    )
    empty = ARRAY_BYTES * 512
    feed(first, 0, 400)
    assert second.capacity == 512 and not second.can_extend(400)
    said = rf"800 cells, {second.n_free} free or to be had of {second.capacity}; .* are left"
    with pytest.raises(CacheFullError, match=said):
        second.begin_step([(0, 800)])
    assert first.usage().groups[0].live == 400
    del first
    gc.collect()
    assert budget.held_bytes == empty
    feed(second, 0, 400)


def test_a_budget_that_holds_no_token_is_refused_with_what_a_token_takes():
    with pytest.raises(ConfigError, match=r"leaves 500 bytes for KV and 1 token take 544"):
        KINDS["seq"](config(MemoryBudget(500)))
    with pytest.raises(ConfigError, match=r"16 tokens take 8704"):
        KINDS["paged"](config(MemoryBudget(500), block_size=16))


def test_a_cache_whose_own_arrays_find_no_room_beside_another_is_refused_with_figures():
    budget = MemoryBudget(400_000)
    cache = KINDS["seq"](config(budget, capacity=512))
    left = ARRAY_BYTES * 512 - 1
    assert budget.ask(budget.available_bytes - left)
    with pytest.raises(ConfigError, match=rf"has {left} of 400000 .* cache needs {left + 1} for"):
        KINDS["seq"](config(budget, capacity=512))
    budget.give_back(1)
    assert KINDS["seq"](config(budget, capacity=512)).capacity == cache.capacity == 512


def test_capacity_is_the_longest_sequence_that_the_budget_holds():
    for n_bytes in (10_000, 50_000, 400_000):
        cache = KINDS["seq"](config(MemoryBudget(n_bytes)))
        feed(cache, 0, cache.capacity)
        assert cache.capacity > 0.8 * n_bytes / (CELL * 1.25 + INDEX_BYTES + ARRAY_BYTES)
        assert not cache.can_extend(n_bytes // CELL - cache.capacity)
    assert KINDS["seq"](config(MemoryBudget(10**9))).capacity == 4096


@pytest.mark.parametrize("kind", ["seq", "tree", "paged"])
def test_what_can_be_added_can_come_in_one_step_of_an_empty_cache(kind):
    for n_bytes in range(36_000, 44_000, 1000):
        for n in range(30, 60):
            budget = MemoryBudget(n_bytes)
            cache, _other = (KINDS[kind](config(budget, MIXED, capacity=200)) for _ in range(2))
            if cache.can_extend(n):
                cache.begin_step([(0, n)])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20), st.booleans())
def test_what_can_be_added_is_added_and_nothing_else(wanted, has_window):
    budget = MemoryBudget(90_000)
    growth = Growth(config(budget, MIXED if has_window else FULL, capacity=96), budget)
    for a, b in wanted:
        deficits = [a, b][: len(growth.sizes)]
        before, could = list(growth.sizes), growth.can_add(deficits)
        held = budget.held_bytes
        assert growth.add(deficits, [30] * len(deficits)) == could
        if could:
            for new, old, deficit in zip(growth.sizes, before, deficits, strict=True):
                assert new >= old + deficit
        else:
            assert (growth.sizes, budget.held_bytes) == (before, held)
        growth.check()
        if a % 2:  # else pools have not grown yet
            growth.settle()
        growth.check()


# Any verbs, in any order --------------------------------------------------------------------------


class BudgetedCaches(RuleBasedStateMachine):
    """Two caches, one budget: what ``can_`` promises holds, and the account is right."""

    @initialize(
        kind=st.sampled_from(["seq", "tree", "paged"]),
        params=st.sampled_from([FULL, MIXED, WINDOWS, RECURRENT]),
        n_bytes=st.integers(40_000, 400_000),
        block_size=st.sampled_from([1, 4]),
    )
    def start(self, kind, params, n_bytes, block_size):
        self.budget = MemoryBudget(n_bytes)
        settings = config(self.budget, params, capacity=200, block_size=block_size, n_slots=6)
        self.caches = [KINDS[kind](settings)]
        with suppress(ConfigError):
            self.caches.append(KINDS[kind](settings))
        self.taken = 0

    @rule(
        data=st.data(),
        which=st.integers(0, 1),
        counts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=3),
        ends=st.sampled_from(["written", "cancelled", "written"]),
    )
    def step(self, data, which, counts, ends):
        cache = self.caches[which % len(self.caches)]
        before = (sizes(cache), self.budget.held_bytes)
        could = cache.can_begin_step(counts)
        assert (sizes(cache), self.budget.held_bytes) == before, "can_ never changes state"
        try:
            cache.begin_step(counts)
        except CacheFullError:
            assert not could
            assert (sizes(cache), self.budget.held_bytes) == before
            return
        assert could
        if ends == "cancelled":
            cache.cancel_step()
        else:
            write(cache)

    @rule(which=st.integers(0, 1), src=st.integers(0, 3), dst=st.integers(0, 3))
    def fork(self, which, src, dst):
        cache = self.caches[which % len(self.caches)]
        with suppress(KVCellarError):
            cache.seq_cp(src, dst)

    @rule(which=st.integers(0, 1), seq_id=st.integers(0, 3))
    def remove(self, which, seq_id):
        cache = self.caches[which % len(self.caches)]
        if cache.has_seq(seq_id):
            cache.seq_rm(seq_id)

    @rule(which=st.integers(0, 1), n=st.integers(1, 40))
    def extend(self, which, n):
        cache = self.caches[which % len(self.caches)]
        if cache.can_extend(n):
            seq_id = next(i for i in range(10) if not cache.has_seq(i))
            cache.begin_step([(seq_id, n)])
            write(cache)
            cache.seq_rm(seq_id)

    @rule(n=st.integers(0, 40_000))
    def somebody_else_takes_bytes(self, n):
        if self.budget.ask(n):
            self.taken += n

    @rule()
    def somebody_else_gives_them_back(self):
        self.budget.give_back(self.taken)
        self.taken = 0

    @invariant()
    def the_account_is_right(self):
        for cache in self.caches:
            cache.check()
        held = sum(cache.steps.growth._held.n_bytes for cache in self.caches)
        assert self.budget.held_bytes == held + self.taken <= self.budget.kv_bytes

    @invariant()
    def what_is_said_to_be_free_can_be_had(self):
        for cache in self.caches:
            assert cache.n_free <= 0 or cache.can_extend(cache.n_free)


TestBudgetedCaches = BudgetedCaches.TestCase

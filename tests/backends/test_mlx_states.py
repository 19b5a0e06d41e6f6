"""Slots of states on MLX: read and written without a copy of the pool, in the plan's order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from kvcellar import ModelCacheParams, make_config
from kvcellar.errors import ShapeError
from kvcellar.states import NO_SLOT, Advance, StateGroup, StatePlan, StateShape

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")

from kvcellar.backends.mlx.bind.mixing import batches_of  # noqa: E402
from kvcellar.backends.mlx.cache.state_pools import StatePools  # noqa: E402
from tests.backends.test_mlx_memory import growth_of  # noqa: E402

SHAPE = (16, 64, 64)
GROUP = StateGroup(((StateShape("convolution", (8, 4)), StateShape("recurrent", SHAPE)),) * 2)
N_SLOTS = 64


def make_pools(n_slots: int) -> StatePools:
    params = ModelCacheParams(1, 1, 8, state=GROUP)
    return StatePools(GROUP, make_config(params, 16, n_slots=n_slots))


def step(pools: StatePools, src: int, dst: int) -> None:
    """Move states as a forward does: read those of all layers, evaluate them, write them."""
    for layer in range(len(GROUP.layers)):
        states = pools.read(layer, mx.array([src]))
        pools.write(layer, np.array([dst]), [state + 1 for state in states])
    mx.eval(pools.arrays)
    pools.settle()


def test_a_step_reads_one_slot_and_writes_another_and_copies_no_pool() -> None:
    pools = make_pools(N_SLOTS)
    pools.ensure(N_SLOTS)
    step(pools, 0, 1)
    step(pools, 1, 2)
    pool_bytes = pools.size_bytes // len(GROUP.layers)
    assert growth_of(lambda: step(pools, 2, 63)) < pool_bytes / 8
    kept = pools._layers[0][1][3:4]
    mx.eval(kept)
    assert growth_of(lambda: step(pools, 2, 5)) > pool_bytes / 2, "the ruler sees a copy"
    (states, _) = pools.read_states(np.array([0, 1, 2, 63]))
    for state in states:
        np.testing.assert_array_equal(state.reshape(4, -1).max(axis=1), [0, 1, 2, 3])


def test_pools_grow_by_doubling_up_to_the_most_and_keep_what_they_hold() -> None:
    pools = make_pools(5)
    pools.ensure(1)
    assert pools.n_slots == 2 and pools.size_bytes == 2 * GROUP.slot_bytes
    step(pools, 0, 1)
    sizes = []
    for n in (2, 3, 5):
        pools.ensure(n)
        sizes.append(pools.n_slots)
    assert sizes == [2, 4, 5]
    assert pools.read_states(np.array([1]))[1][1].min() == 1


def test_states_come_back_as_they_were_put_in() -> None:
    rng, pools = np.random.default_rng(0), make_pools(N_SLOTS)
    given = [
        [rng.standard_normal((3, *state.shape)).astype(np.float32) for state in states]
        for states in GROUP.layers
    ]
    pools.write_states(np.array([4, 0, 7]), given)
    got = pools.read_states(np.array([7, 4, 0]))
    for mine, want in zip(chain(*got), chain(*given), strict=True):
        np.testing.assert_array_equal(mine, want[[2, 0, 1]])
    with pytest.raises(ShapeError, match="2 slots take states"):
        pools.write_states(np.array([1, 2]), given)


def test_what_a_failed_forward_was_going_to_write_is_forgotten() -> None:
    pools = make_pools(N_SLOTS)
    pools.ensure(2)
    pools.write(0, np.array([1]), [state + 1 for state in pools.read(0, mx.array([0]))])
    pools.forget()
    pools.settle()
    assert pools.read_states(np.array([1]))[0][1].max() == 0


def described(plan: StatePlan) -> list[Any]:
    """Tokens, length, what is read and what is written, of each batch."""
    return [
        (
            list(range(plan.n_tokens)) if batch.tokens is None else batch.tokens.tolist(),
            batch.length,
            list(batch.made) or (None if batch.src is None else batch.src.tolist()),
            batch.dst.tolist(),
        )
        for batch in batches_of(plan).of
    ]


def test_sequences_that_bring_as_many_tokens_are_one_batch() -> None:
    advances = (
        Advance(0, 1, 3, 5), Advance(1, 4, NO_SLOT, 6), Advance(5, 1, 4, 7), Advance(6, 4, 2, 8),
    )  # fmt: skip
    plan = StatePlan(10, advances, 9)
    assert described(plan) == [
        ([0, 5], 1, [3, 4], [5, 7]),
        ([6, 7, 8, 9], 4, [2], [8]),
        ([1, 2, 3, 4], 4, None, [6]),
    ]
    order = batches_of(plan).order
    assert order is not None and order.tolist() == [0, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    (alone,) = batches_of(StatePlan(4, (Advance(0, 4, 1, 2),), 3)).of
    assert alone.tokens is None, "nothing is moved about"


def test_who_goes_on_from_what_the_forward_writes_comes_after_it() -> None:
    tree = (Advance(0, 1, 0, 1), Advance(1, 1, 0, 2), Advance(2, 1, 1, 3), Advance(3, 1, 2, 4))
    assert described(StatePlan(4, tree, 5)) == [
        ([0, 1], 1, [0, 0], [1, 2]),
        ([2, 3], 1, [(0, 0), (0, 1)], [3, 4]),
    ]
    twice = (Advance(0, 2, 0, 1), Advance(2, 1, 1, 1), Advance(3, 2, 1, 1))
    assert [made for _, _, made, _ in described(StatePlan(5, twice, 2))] == [
        [0], [(0, 0)], [(1, 0)],
    ]  # fmt: skip

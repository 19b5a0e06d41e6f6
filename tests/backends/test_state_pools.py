"""States by slot in torch: they grow, leave and return; and a plan's advances in groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcellar.backends.torch.cache.state_pools import StatePools, stretches_of
from kvcellar.cache_config import make_config
from kvcellar.errors import ShapeError
from kvcellar.states import NO_SLOT, Advance, StateGroup, StatePlan, StateShape
from kvcellar.types import ModelCacheParams

CPU = torch.device("cpu")
GROUP = StateGroup(
    (
        (StateShape("convolution", (6, 4)), StateShape("recurrent", (2, 3, 5))),
        (StateShape("convolution", (6, 4)),),
    )
)


def pools(n_slots: int = 8) -> StatePools:
    params = ModelCacheParams(1, 1, 8, state=GROUP)
    return StatePools(GROUP, make_config(params, 64, n_slots=n_slots))


def filled(n: int, seed: int = 0) -> list[list[np.ndarray]]:
    make = np.random.default_rng(seed)
    return [
        [make.standard_normal((n, *state.shape)).astype(np.float32) for state in states]
        for states in GROUP.layers
    ]


def test_states_return_as_they_left_wherever_they_were_put():
    there, given = pools(), filled(3)
    there.write([4, 0, 2], given)
    for got, want in zip(there.read([2, 4]), given, strict=True):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other[[2, 0]])


def test_growth_doubles_up_to_the_most_slots_and_keeps_what_was_written():
    there, given = pools(n_slots=7), filled(2)
    there.write([0, 1], given)
    sizes = [there.ensure(0, n, CPU)[0].shape[0] for n in (2, 3, 5, 7)]
    assert sizes == [2, 4, 7, 7]
    assert [len(states[0]) for states in there.of_layer] == [7, 2]
    np.testing.assert_array_equal(there.read([0, 1])[0][1], given[0][1])
    assert there.size_bytes == sum(x.nbytes for states in there.of_layer for x in states)


def test_states_of_another_model_are_refused_and_nothing_is_written():
    there, given = pools(), filled(2)
    there.write([0, 1], given)
    with pytest.raises(ShapeError, match="states of 2 slots"):
        there.write([0, 1], [given[0], given[0]])
    with pytest.raises(ShapeError, match="states of 1 slots"):
        there.write([0], filled(2, seed=1))
    np.testing.assert_array_equal(there.read([0, 1])[1][0], given[1][0])


def grouped(*advances: Advance) -> list[tuple[list[int], int, list[int] | None, list[int]]]:
    """Tokens, tokens of each, slots read and slots written of every group."""
    n_tokens = sum(advance.n_tokens for advance in advances)
    found = []
    for one in stretches_of(StatePlan(n_tokens, advances, 99), CPU):
        at = one.tokens
        tokens = list(range(at.start, at.stop)) if isinstance(at, slice) else at.tolist()
        src = None if one.src is None else one.src.tolist()
        found.append((tokens, one.n_tokens, src, one.dst.tolist()))
    return found


def test_one_token_of_each_of_many_sequences_is_one_call():
    advances = [Advance(i, 1, 10 + i, 20 + i) for i in range(3)]
    assert grouped(*advances) == [([0, 1, 2], 1, [10, 11, 12], [20, 21, 22])]


def test_what_has_no_past_and_what_is_of_another_length_goes_apart():
    found = grouped(
        Advance(0, 1, 5, 6), Advance(1, 3, 7, 8), Advance(4, 1, NO_SLOT, 9), Advance(5, 1, 1, 2)
    )
    assert found == [
        ([4], 1, None, [9]),
        ([0, 5], 1, [5, 1], [6, 2]),
        ([1, 2, 3], 3, [7], [8]),
    ]


def test_an_advance_comes_after_the_one_whose_slot_it_reads():
    tree = [Advance(0, 1, 4, 10), Advance(1, 1, 10, 11), Advance(2, 1, 10, 12)]
    leaf, other = Advance(3, 1, 12, 13), Advance(4, 1, 7, 14)
    assert grouped(*tree, leaf, other) == [
        ([0, 4], 1, [4, 7], [10, 14]),
        ([1, 2], 1, [10, 10], [11, 12]),
        ([3], 1, [12], [13]),
    ]


def test_stretches_are_run_token_by_token_from_what_was_written_before():
    advances = Advance(0, 3, 5, 6), Advance(4, 3, 7, 8)
    (whole,) = stretches_of(StatePlan(7, advances, 9), CPU)
    steps = [
        (one.tokens.tolist(), one.n, one.n_tokens, one.src.tolist(), one.dst.tolist())
        for one in whole.by_token()
    ]
    assert steps == [
        ([0, 4], 2, 1, [5, 7], [6, 8]),
        ([1, 5], 2, 1, [6, 8], [6, 8]),
        ([2, 6], 2, 1, [6, 8], [6, 8]),
    ]

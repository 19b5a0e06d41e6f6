"""Plans made of the last one: the same integers as those that are packed anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcellar import LayerGroup, ModelCacheParams, make_config, make_seq_session
from kvcellar.backends.torch.gpu.attend import launch, lists
from kvcellar.backends.torch.gpu.attend.following import Following
from kvcellar.backends.torch.gpu.attend.plans import SECTIONS, PackedPlan, Tiling, rounded_up
from kvcellar.types import StepPlan
from tests.stretches import stretches

TILING = Tiling(2, 2, 16, 16, 16, 2, 64)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cells are worth a list of their own."""
    monkeypatch.setattr(lists, "LEAST_SHARED", 8)


@contextmanager
def following(window: int | None = None) -> Iterator[Steps]:
    group = LayerGroup((0,), 2, 16, 16, window=window)
    config = make_config(ModelCacheParams(1, groups=(group,)), capacity=4096)
    with make_seq_session("torch", config) as session:
        yield Steps(session.cache, group)


class Steps:
    """Steps of a cache of one layer, each packed as what follows and by itself."""

    def __init__(self, cache: Any, group: LayerGroup) -> None:
        self.cache, self.group, self.following = cache, group, Following()
        self.n = self.n_anew = 0

    def step(self, seq_ids: list[int], *, is_kept: bool = True) -> None:
        positions = self.cache.begin_step(stretches(seq_ids))
        (plan,) = self.cache.steps.plan_all(len(seq_ids), positions)
        n_tokens = rounded_up(len(seq_ids))
        before = self.following._last
        got = self.following.packed(plan, self.group.sight, TILING, n_tokens)
        want = launch.compiled(plan, self.group.sight, TILING, n_tokens)
        assert got.form == want.form
        np.testing.assert_array_equal(in_order(got), in_order(want))
        self.n += 1
        self.n_anew += before is None or got.form is not before.packed.form
        if is_kept:
            self.cache.steps.wrote_all()
        else:
            self.cache.cancel_step()


def in_order(packed: PackedPlan) -> np.ndarray:
    """The integers of a plan, tiles in the order of their lists: any order computes the same."""
    parts = np.split(packed.numbers, np.cumsum(packed.form.sections)[:-1])
    at = SECTIONS.index("few")
    tiles = parts[at][: len(parts[at]) // 3 * 3].reshape(-1, 3)
    parts[at] = tiles[np.lexsort(tiles.T)].reshape(-1)
    return np.concatenate(parts)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_is_packed_the_same_whatever_came_before(window: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with following(window) as steps:
        steps.step([0] * int(rng.integers(1, 60)))
        n = 1
        for _ in range(120):
            what, some = rng.random(), int(rng.integers(n))
            if what < 0.05 and n < 6:
                steps.cache.seq_cp(some, n)
                n += 1
            elif what < 0.1:
                steps.step([some] * int(rng.integers(1, 5)))
            elif what < 0.15:
                steps.step(list(range(n)), is_kept=False)
            elif what < 0.18:
                steps.step([some, *(seq for seq in range(n) if seq != some), some])
            elif what < 0.21:
                steps.cache.seq_rm(some, max(1, steps.cache.seq_len(some) - 1))
            else:
                steps.step(list(range(n)))
        assert steps.n_anew < steps.n


def test_decoding_is_packed_anew_only_where_lists_are_split_otherwise() -> None:
    with following() as steps:
        steps.step([0] * 100)
        for seq in (1, 2, 3):
            steps.cache.seq_cp(0, seq)
        for _ in range(3):
            steps.step([0, 1, 2, 3])
        steps.n_anew = 0
        for _ in range(400):
            steps.step([0, 1, 2, 3])
        assert 1 <= steps.n_anew <= 24


def test_a_window_that_moves_is_not_packed_anew() -> None:
    with following(window=24) as steps:
        steps.step([0] * 40)
        steps.step([0])
        steps.n_anew = 0
        for _ in range(50):
            steps.step([0])
        assert steps.n_anew <= 2


def test_layers_that_write_nothing_follow_too() -> None:
    with following() as steps:
        own, cache = Following(), steps.cache
        seen: list[PackedPlan] = []
        for _ in range(4):
            (plan,) = cache.steps.plan_all(1, cache.begin_step([(0, 1)]))
            seen.append(own.packed(plan, steps.group.sight, TILING, stores=False))
            want = launch.compiled(plan, steps.group.sight, TILING, stores=False)
            np.testing.assert_array_equal(seen[-1].numbers, want.numbers)
            cache.steps.wrote_all()
        assert seen[-1].form is seen[0].form


def test_another_plan_of_one_shape_is_packed_anew() -> None:
    with following() as steps:
        plan: StepPlan
        (plan,) = steps.cache.steps.plan_all(1, steps.cache.begin_step([(0, 1)]))
        found = Following()
        first = found.packed(plan, steps.group.sight, TILING)
        other = TILING._replace(cells=32)
        assert found.packed(plan, steps.group.sight, other).form is not first.form
        assert found.packed(plan, steps.group.sight, other, 4).form.n_slots == 0

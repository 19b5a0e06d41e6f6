"""Hybrid models of mlx-lm on our caches: states in slots, beside mlx-lm with its own caches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import kvcellar as kv

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")

from kvcellar.backends.mlx.bind.state_layers import StateLayer  # noqa: E402
from kvcellar.backends.mlx.cache.state_pools import StatePools  # noqa: E402
from kvcellar.backends.mlx.checking import check_network  # noqa: E402
from kvcellar.backends.mlx.learn.learning import learn  # noqa: E402
from kvcellar.backends.mlx.runner import MlxRunner  # noqa: E402
from tests.models.mlx_families import make_model  # noqa: E402
from tests.models.mlx_hybrids import HYBRIDS  # noqa: E402
from tests.models.test_mlx_families import (  # noqa: E402
    assert_close,
    mlx_lm_says,
    quantise_whole_groups,
    text,
)
from tests.stretches import stretches  # noqa: E402

every_hybrid = pytest.mark.parametrize("family", HYBRIDS)


@functools.cache
def model_of(family: str) -> tuple[Any, Any]:
    """A model that is bound, and what was learnt of it."""
    model = make_model(family, **HYBRIDS[family])
    return model, learn(model, family)


@every_hybrid
def test_chunks_decoding_forks_and_flat_batches_say_what_mlx_lm_says(family: str) -> None:
    model, learnt = model_of(family)
    trunk, left, right, other = text(30), text(9, 1), text(9, 2), text(20, 3)
    want_left = mlx_lm_says(model, trunk, *([token] for token in left))
    want_right = mlx_lm_says(model, trunk, right)[30:]
    want_other = mlx_lm_says(model, other)
    with kv.make_tree_session("mlx", kv.make_config(learnt.params, 160)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)

        def feed(seqs: list[int], tokens: list[int]) -> np.ndarray:
            return runner.forward(tokens, cache.begin_step(stretches(seqs)), range(len(tokens)))

        got = [feed([0] * 7, trunk[:7]), feed([0] * 23, trunk[7:])]
        cache.seq_cp(0, 1)
        got += [feed([0], [token]) for token in left[:4]]
        assert_close(np.concatenate(got), want_left[:34])
        mixed = feed([1] * 5 + [2] * 20 + [0], right[:5] + other + left[4:5])
        assert_close(mixed, np.concatenate([want_right[:5], want_other, want_left[34:35]]))
        cache.keep_point(1, 35)
        assert_close(feed([0, 1], [left[5], right[5]]), np.stack([want_left[35], want_right[5]]))
        cache.seq_rm(1, 35)
        assert_close(feed([1] * 4, right[5:]), want_right[5:])
    again = mlx_lm_says(model, other)
    np.testing.assert_array_equal(again, want_other, "mlx-lm's own way is as it was")


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "kimi_linear"])
def test_nodes_of_a_tree_go_on_from_their_parents(family: str) -> None:
    model, learnt = model_of(family)
    trunk, tokens, parents = text(12), text(6, 4), [-1, -1, 0, 0, 2, 1]
    with kv.make_tree_session("mlx", kv.make_config(learnt.params, 160)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)
        runner.forward(trunk, cache.begin_step([(0, 12)]))
        cache.propose(parents)
        seqs = [0] * 6 + [1] * 3
        got = runner.forward(tokens + trunk[:3], cache.begin_step(stretches(seqs)), range(9))
        paths = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
        for node, path in enumerate(paths):
            want = mlx_lm_says(model, trunk, [tokens[i] for i in path])[-1:]
            assert_close(got[node : node + 1], want)
        cache.commit([0, 2])
        after = [tokens[0], tokens[2], 7, 8, 9]
        got = runner.forward([7, 8, 9], cache.begin_step([(0, 3)]), range(3))
        assert_close(got, mlx_lm_says(model, trunk, after)[-3:])
        assert_close(
            runner.forward(trunk[3:], cache.begin_step([(1, 9)])), mlx_lm_says(model, trunk)[-1:]
        )


QUICK = ["falcon_h1", "lfm2"]
"""Families that are checked in every run: both kinds in one layer, and convolutions alone."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in HYBRIDS]
)
def test_a_hybrid_model_is_checked_beside_mlx_lm(family: str) -> None:
    model, learnt = model_of(family)
    verdict = check_network(model, learnt, family)
    assert verdict.reason is None and verdict.is_exact, verdict
    assert f"{len(learnt.states)} recurrent" in verdict.layers


def test_a_state_that_is_read_from_the_wrong_slot_is_found(monkeypatch: Any) -> None:
    read = StatePools.read

    def elsewhere(self: Any, layer: int, slots: Any) -> Any:
        return read(self, layer, mx.maximum(slots - layer, 0))

    monkeypatch.setattr(StatePools, "read", elsewhere)
    verdict = check_network(*model_of("lfm2"), "lfm2")
    assert verdict.reason is None and not verdict.is_exact


def test_a_forward_that_fails_leaves_the_states_of_before(monkeypatch: Any) -> None:
    model, learnt = model_of("falcon_h1")
    tokens, store, n_stored = text(20), StateLayer.store, 0

    def fail(self: Any, arrays: Any) -> Any:
        nonlocal n_stored
        n_stored += 1
        if n_stored == 3:
            raise MemoryError("in the third layer")
        return store(self, arrays)

    with kv.make_seq_session("mlx", kv.make_config(learnt.params, 64)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)
        runner.forward(tokens[:12], cache.begin_step([(0, 12)]))
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(StateLayer, "store", fail)
            runner.forward(tokens[12:], cache.begin_step([(0, 8)]))
        got = runner.forward(tokens[12:], cache.begin_step([(0, 8)]), range(8))
        assert_close(got, mlx_lm_says(model, tokens)[12:])


@pytest.mark.slow
def test_weights_in_four_bits_are_served_as_mlx_lm_serves_them() -> None:
    model = make_model("qwen3_next", **HYBRIDS["qwen3_next"])
    quantise_whole_groups(model)
    learnt = learn(model, "qwen3_next")
    assert learnt.params == model_of("qwen3_next")[1].params
    assert check_network(model, learnt, "qwen3_next").is_exact

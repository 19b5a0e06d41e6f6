"""Models of mlx-lm's own classes on our caches: what each says beside mlx-lm with its caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.errors import ModelError

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")
mlx_nn = pytest.importorskip("mlx.nn")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from kvcellar.backends.mlx.learn.learning import learn  # noqa: E402
from kvcellar.backends.mlx.runner import MlxRunner  # noqa: E402
from tests.models.mlx_families import (  # noqa: E402
    BAICHUAN,
    FAMILIES,
    LATENT,
    MAMBA2,
    NGRAM,
    SHARED,
    VOCAB_SIZE,
    WINDOW,
    make_model,
)
from tests.stretches import stretches  # noqa: E402

every_family = pytest.mark.parametrize("family", [*FAMILIES, *SHARED, *LATENT])
TOLERANCE = 2e-5
"""Of logits, beside the largest one: MLX sums in another order for other shapes."""


@functools.cache
def model_of(family: str) -> tuple[Any, Any]:
    """A model that is bound, and what was learnt of it."""
    model = make_model(family)
    return model, learn(model, family)


def text(n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, n_tokens).tolist()


def mlx_lm_says(model: Any, *parts: Sequence[int]) -> np.ndarray:
    """Logits after every token of a history, whose parts are forwards of mlx-lm alone."""
    cache = make_prompt_cache(model)
    rows = [model(mx.array([list(part)]), cache=cache)[0] for part in parts]
    return np.concatenate([np.array(row.astype(mx.float32)) for row in rows])


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=TOLERANCE * np.abs(want).max(), rtol=0)


@every_family
def test_chunks_decoding_forks_and_flat_batches_say_what_mlx_lm_says(family: str) -> None:
    model, learnt = model_of(family)
    trunk, left, right, other = text(30), text(9, 1), text(9, 2), text(20, 3)
    want_left = mlx_lm_says(model, trunk, *([token] for token in left))
    want_right = mlx_lm_says(model, trunk, right)[30:]
    want_other = mlx_lm_says(model, other)
    with kv.make_tree_session("mlx", kv.make_config(learnt.params, 160)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)

        def feed(seqs: list[int], tokens: list[int], rows: Any = None) -> np.ndarray:
            rows = range(len(tokens)) if rows is None else rows
            return runner.forward(tokens, cache.begin_step(stretches(seqs)), rows)

        got = [feed([0] * 7, trunk[:7]), feed([0] * 23, trunk[7:])]
        cache.seq_cp(0, 1)
        got += [feed([0], [token]) for token in left[:4]]
        assert_close(np.concatenate(got), want_left[:34])
        mixed = feed([1] * 5 + [2] * 20 + [0], right[:5] + other + left[4:5], [4, 5, 24, 25])
        wants = want_right[4], want_other[0], want_other[19], want_left[34]
        assert_close(mixed, np.stack(wants))
        assert_close(feed([0, 1], [left[5], right[5]]), np.stack([want_left[35], want_right[5]]))
        cache.seq_rm(1, 32)
        assert_close(feed([1] * 7, right[2:]), want_right[2:])
    again = mlx_lm_says(model, other)
    np.testing.assert_array_equal(again, want_other, "mlx-lm's own way is as it was")


def test_layers_may_differ_in_heads_sizes_and_windows() -> None:
    params = model_of("mimo_v2_flash")[1].params
    assert params.groups == (
        kv.LayerGroup((0, 2), 4, 24, 16, WINDOW), kv.LayerGroup((1, 3), 2, 24, 16))  # fmt: skip
    assert model_of("gemma2")[1].params.groups[0].softcap == 5.0
    chunked, full = model_of("llama4")[1].params.groups
    assert (chunked.layers, chunked.chunk, full.layers, full.is_full) == ((0, 1, 2), 8, (3,), True)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4_text"])
def test_layers_that_share_rows_store_them_once(family: str) -> None:
    params = model_of(family)[1].params
    assert params.shared == ((2, 0), (3, 1)) and params.n_layers == 4
    assert [group.layers for group in params.groups] == [(0,), (1,)]


def test_latent_rows_are_stored_as_mlx_lm_stores_them() -> None:
    for family in LATENT:
        (group,) = model_of(family)[1].params.groups
        assert group.is_latent and (group.n_kv_heads, group.head_dim, group.v_head_dim) == (
            1,
            8,
            32,
        )


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("mamba2", MAMBA2, "has no layer that attends"),
        ("baichuan_m1", BAICHUAN, "states that Attention.*told from the rows that it keeps"),
        ("longcat_flash_ngram", NGRAM, r"NgramEmbedding.*keeps \(2, 1\) and \(1, 1\)"),
        (
            "internlm3",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "position for each",
        ),
        ("gemma3_text", {"sliding_window_pattern": 1}, "sees from position 0"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(family: str, more: Any, said: str) -> None:
    found = rf"(?s)^(?=.*mlx-lm's {family}).*{said}.*run it with mlx-lm alone"
    with pytest.raises(ModelError, match=found):
        learn(make_model(family, **more), family, [WINDOW, None] * 2 if "gemma" in family else ())


def test_a_window_that_mlx_lm_does_not_know_is_the_caches() -> None:
    learnt = learn(make_model("qwen2"), "qwen2", [WINDOW, None, None, None], adds_windows=True)
    assert [(g.layers, g.window) for g in learnt.params.groups] == [((0,), 8), ((1, 2, 3), None)]


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "glm4_moe_lite"])
def test_a_model_is_checked_beside_mlx_lm(family: str, monkeypatch: Any) -> None:
    from kvcellar.backends.mlx import checking
    from kvcellar.backends.mlx.bind.binding import Forward

    model, learnt = model_of(family)
    verdict = checking.check_network(model, learnt, family)
    assert verdict.is_exact and verdict.reason is None and 0 <= verdict.worst < verdict.tolerance
    assert set(verdict.differences) == {"contiguous", "seq", "tree"}
    begin = Forward.begin

    def late(self: Any, positions: Any, rows: Any) -> None:
        begin(self, positions, rows)
        self.offsets = self.offsets + (self.offsets > 40)

    monkeypatch.setattr(Forward, "begin", late)
    wrong = checking.check_network(model, learnt, family)
    assert not wrong.is_exact and "is not exact" in wrong.refusal(family)


def test_what_mlx_lms_own_code_does_not_keep_to_is_no_rounding(monkeypatch: Any) -> None:
    from kvcellar.backends.mlx import checking

    model, learnt = model_of("qwen3")
    monkeypatch.setattr(checking, "_ROUNDING", -1.0)
    verdict = checking.check_network(model, learnt, "qwen3")
    assert not verdict.is_exact and "own logits of a text in pieces" in str(verdict.reason)


def quantise_whole_groups(model: Any) -> None:
    """Store in four bits whatever has whole groups of 32 numbers."""

    def can_quantise(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    mlx_nn.quantize(model, group_size=32, bits=4, class_predicate=can_quantise)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_quantised_weights_of_any_family_are_served_as_mlx_lm_serves_them(family: str) -> None:
    from kvcellar.backends.mlx.checking import check_network

    model = make_model(family)
    quantise_whole_groups(model)
    verdict = check_network(model, learn(model, family), family)
    assert verdict.is_exact and verdict.worst < 1e-3

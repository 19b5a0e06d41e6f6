"""Runs, plans and configs: what they say, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cache import grown_size
from kvcellar.cache_config import CacheConfig, GroupUsage, make_config
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    LayerGroup,
    ModelCacheParams,
    Run,
    StepPlan,
    Write,
    cells_of,
    join_runs,
    runs_of,
)

PARAMS = ModelCacheParams(n_layers=4, n_kv_heads=2, head_dim=8)


def group(layers=(0,), n_kv_heads=2, head_dim=8, v_head_dim=8, **more):
    return LayerGroup(layers, n_kv_heads, head_dim, v_head_dim, **more)


# Runs ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), max_size=20))
def test_runs_give_their_cells_in_order_and_are_the_fewest(cells):
    runs = runs_of(cells)
    assert cells_of(runs).tolist() == cells
    assert all(run.length >= 1 for run in runs)
    breaks = sum(b != a + 1 for a, b in pairwise(cells))
    assert len(runs) == (breaks + 1 if cells else 0)
    assert all(type(n) is int for run in runs for n in run)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=8))
def test_joining_runs_keeps_the_cells_and_their_order(pairs):
    runs = [Run(start, length) for start, length in pairs]
    joined = join_runs(runs)
    assert cells_of(joined).tolist() == cells_of(runs).tolist()
    assert all(a.stop != b.start for a, b in pairwise(joined))


def test_runs_are_made_of_arrays_too():
    assert runs_of(np.array([4, 5, 6, 2])) == [Run(4, 3), Run(2, 1)]
    assert runs_of(np.array([], dtype=np.int64)) == []


def test_a_run_is_half_open():
    assert Run(3, 4).stop == 7
    assert cells_of([Run(3, 4)]).tolist() == [3, 4, 5, 6]


def test_a_plan_and_a_read_count_their_cells():
    read = AttendSpec(0, 3, (Run(0, 5), Run(9, 2)), AttendKind.CAUSAL)
    plan = StepPlan(3, (Write(0, Run(4, 1)), Write(1, Run(9, 2))), (read,), 11)
    assert read.read_len == 7
    assert plan.write_cells.tolist() == [4, 9, 10]


# What a model is, what a caller wants -------------------------------------------------------------


def test_without_groups_all_layers_keep_all_of_the_history():
    (full,) = PARAMS.groups
    assert (full.layers, full.window, full.softcap) == ((0, 1, 2, 3), None, None)
    assert (full.n_kv_heads, full.head_dim, full.v_head_dim) == (2, 8, 8)


def test_v_rows_are_as_long_as_k_rows_unless_they_are_not():
    assert PARAMS.v_head_dim == 8
    assert ModelCacheParams(1, 2, 8, v_head_dim=16).groups[0].v_head_dim == 16
    assert ModelCacheParams(1, 2, 8, v_head_dim=0).groups[0].v_head_dim == 8


def test_the_shapes_of_a_model_follow_from_its_groups_and_are_none_where_layers_differ():
    mixed = ModelCacheParams(2, 9, 8, groups=(group(), group((1,), 1, v_head_dim=16)))
    assert (mixed.n_kv_heads, mixed.head_dim, mixed.v_head_dim) == (None, 8, None)
    assert mixed == ModelCacheParams(2, groups=mixed.groups)
    alike = ModelCacheParams(2, groups=(group((0,), window=3), group((1,))))
    assert (alike.n_kv_heads, alike.head_dim, alike.v_head_dim) == (2, 8, 8)


@pytest.mark.parametrize("pos", [0, 1, 3, 4, 5, 7, 8, 100])
def test_a_group_says_what_a_query_sees_first(pos):
    assert group().first_seen(pos) == 0
    assert group(window=3).first_seen(pos) == min(p for p in range(pos + 1) if p > pos - 3)
    assert group(chunk=4).first_seen(pos) == min(p for p in range(pos + 1) if p // 4 == pos // 4)
    assert [group().is_full, group(window=3).is_full, group(chunk=4).is_full] == [
        True,
        False,
        False,
    ]


def test_layers_that_share_rows_name_an_earlier_layer_that_stores_some():
    own = (group((0, 2)), group((1,), window=4))
    params = ModelCacheParams(5, groups=own, shared=((4, 2), (3, 1)))
    assert params.shared == ((3, 1), (4, 2))
    assert params.sources == (0, 1, 2, 1, 2)
    assert params.group_of == (0, 1, 0, 1, 0)
    assert ModelCacheParams(2, 2, 8, shared=((1, 0),)).groups[0].layers == (0,)
    assert str(params) == (
        "5 layers (2 of 2 KV heads, K rows of 8, V rows of 8; 1 of 2 KV heads, K rows of 8, V rows "
        "of 8, window 4; 2 share those of others)"
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ModelCacheParams(0, 2, 8), "at least one layer, got n_layers=0"),
        (lambda: ModelCacheParams(4, 0, 8), "n_kv_heads >= 1, got 0"),
        (lambda: ModelCacheParams(1, 0, 8, groups=(group(),)), "n_kv_heads >= 1, got 0"),
        (lambda: ModelCacheParams(1, 2, 0, groups=(group(),)), "head_dim >= 1, got 0"),
        (lambda: ModelCacheParams(1, 2, 8, -1, groups=(group(),)), "v_head_dim >= 1, got -1"),
        (lambda: ModelCacheParams(2, 2, 8, groups=(group(),)), r"each of the 2 layers once.*\[0\]"),
        (lambda: ModelCacheParams(1, 2, 8, groups=(group(), group())), r"once, got \[0, 0\]"),
        (lambda: ModelCacheParams(2, 2, 8, shared=((0, 1),)), "layer 0 cannot share .* layer 1"),
        (lambda: ModelCacheParams(3, 2, 8, shared=((1, 0), (2, 1))), "layer 2 .* of layer 1: it"),
        (lambda: ModelCacheParams(2, 2, 8, shared=((1, 0), (1, 0))), r"once, got \[0, 1, 1\]"),
        (lambda: ModelCacheParams(2, groups=(group(),), shared=((0, 0),)), "layer 0 cannot share"),
        (lambda: ModelCacheParams(2, 2, 8, shared=5), "tuple of .layer, source., got 5"),
        (lambda: ModelCacheParams(2, 2, 8, shared=((1, 0, 0),)), "tuple of .layer, source."),
        (lambda: ModelCacheParams(2, 2, 8, shared=((1, "a"),)), "must be a whole number, got 'a'"),
        (lambda: ModelCacheParams(2), "n_kv_heads of a model must be a whole number, got None"),
        (lambda: group(chunk=0), "at least its own token, got chunk=0"),
        (lambda: group(chunk=4, window=4), "a window or a chunk, got window=4 and chunk=4"),
        (lambda: group(is_latent=1), "is_latent must be True or False, got 1"),
        (lambda: group(is_latent=True), "latent rows are one KV head, got n_kv_heads=2"),
        (lambda: group(window=0), "at least its own token, got window=0"),
        (lambda: group(window=-3), "got window=-3"),
        (lambda: group(softcap=0.0), "above 0, or None for no cap; got 0.0"),
        (lambda: group(layers=()), r"ascend without repeats, got \(\)"),
        (lambda: group(layers=(1, 0)), r"ascend without repeats, got \(1, 0\)"),
        (lambda: group(layers=(1, 1)), r"ascend without repeats, got \(1, 1\)"),
        (lambda: group(head_dim=0), "head_dim >= 1, got 0"),
        (lambda: make_config(PARAMS, 0), "capacity .* at least 1, got 0"),
        (lambda: make_config(PARAMS, -5), "at least 1, got -5"),
        (lambda: make_config(PARAMS, 8, "int3"), "'int3' is not known; choose one of float32, bf"),
        (lambda: make_config(PARAMS, 8, min_chunk=0), "min_chunk must be at least 1 cell, got 0"),
        (
            lambda: make_config(PARAMS, 8, window_slack=-1),
            "window_slack cannot be negative",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named(make, message):
    with pytest.raises(ConfigError, match=message) as info:
        make()
    assert isinstance(info.value, KVCellarError) and isinstance(info.value, ValueError)


def test_a_config_is_the_models_facts_and_the_callers_policy():
    config = make_config(PARAMS, 128, "bfloat16", 16, window_slack=3)
    assert config == CacheConfig(PARAMS, 128, "bfloat16", 16, 3)


def test_k_and_v_are_stored_in_the_model_s_own_type_where_nothing_else_is_asked_for():
    in_half = replace(PARAMS, kv_dtype="bfloat16")
    assert make_config(in_half, 128).kv_dtype == "bfloat16"
    assert make_config(in_half, 128, "int8").kv_dtype == "int8"
    assert make_config(PARAMS, 128).kv_dtype == "float32"
    assert in_half == PARAMS, "a cache of another type is one of the same model"
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16, got kv_dtype='int8'"):
        replace(PARAMS, kv_dtype="int8")


def test_usage_says_what_is_free():
    assert GroupUsage(window=None, capacity=10, live=7, shared=2, n_cells=9).free == 3


# Growth -------------------------------------------------------------------------------------------


@given(
    n_cells=st.integers(1, 500),
    allocated=st.integers(0, 500),
    min_chunk=st.integers(1, 80),
    capacity=st.integers(1, 500),
)
def test_a_pool_doubles_up_to_its_capacity_and_never_shrinks(
    n_cells, allocated, min_chunk, capacity
):
    n_cells, allocated = min(n_cells, capacity), min(allocated, capacity)
    size = grown_size(n_cells, allocated, min_chunk, capacity)
    assert max(n_cells, allocated) <= size <= capacity
    if size > max(allocated, min_chunk):
        assert size < 2 * n_cells, "no more than one doubling too far"
    if n_cells <= allocated and allocated >= min_chunk:
        assert size == allocated


@pytest.mark.parametrize(
    "n_cells, allocated, min_chunk, capacity, size",
    [
        (1, 0, 512, 4096, 512),
        (513, 512, 512, 4096, 1024),
        (1500, 512, 512, 4096, 2048),
        (2500, 2048, 512, 3000, 3000),
        (3, 0, 512, 100, 100),
        (10, 64, 512, 4096, 512),
    ],
)
def test_growth_doubles_from_the_first_chunk_on(n_cells, allocated, min_chunk, capacity, size):
    assert grown_size(n_cells, allocated, min_chunk, capacity) == size

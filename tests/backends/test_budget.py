"""Pools with a memory budget: they allocate what was granted, to the byte, and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar import (
    LayerGroup,
    ModelCacheParams,
    make_config,
    make_decode_session,
    make_paged_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.budget import MemoryBudget
from kvcellar.errors import CacheFullError
from tests.backends.adapters import needs_mlx
from tests.stretches import stretches

torch = pytest.importorskip("torch")

HEADS, DIM = 2, 16
PARAMS = ModelCacheParams(
    5,
    HEADS,
    DIM,
    groups=(LayerGroup((0, 3), HEADS, DIM, DIM), LayerGroup((1, 2, 4), HEADS, DIM, DIM, window=20)),
)
MAKERS = {
    "decode": make_decode_session,
    "seq": make_seq_session,
    "tree": make_tree_session,
    "layer_first": make_paged_session,
    "block_first": make_paged_session,
}


def config(kind: str, budget: MemoryBudget, kv_dtype: str = "float32") -> Any:
    layout = kind if kind in ("layer_first", "block_first") else "layer_first"
    return make_config(
        PARAMS, 2000, kv_dtype, 32, window_slack=4, block_size=8, layout=layout, budget=budget
    )


def forward(backend: str, cache: Any, seq_ids: list[int], kind: str) -> None:
    n = len(seq_ids)
    if kind == "decode":
        positions = list(range(cache.length, cache.length + n))
    else:
        positions = cache.begin_step(stretches(seq_ids))
    for layer in range(PARAMS.n_layers):
        if backend == "torch":
            k = torch.full((1, HEADS, n, DIM), float(layer))
            cache.update_and_fetch(layer, torch.tensor(positions), k, k)
        elif backend == "mlx":
            import mlx.core as mx

            k = mx.full((1, HEADS, n, DIM), float(layer))
            cache.update_and_fetch(layer, positions, k, k)
        else:
            k = np.full((1, HEADS, n, DIM), float(layer), dtype=np.float32)
            cache.update_and_fetch(layer, np.asarray(positions), k, k)
    cache.end_step()


def arrays(rows: Any) -> list[Any]:
    """All arrays of what ``read_rows`` gives, in order."""
    return [array for group in rows for side in group for array in side]


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("backend", ["torch", "reference", pytest.param("mlx", marks=needs_mlx)])
def test_pools_allocate_what_was_granted_and_stop_where_the_budget_ends(backend, kind, kv_dtype, n):
    if backend == "mlx" and kind == "block_first":
        pytest.skip("the MLX backend has no such layout")
    budget = MemoryBudget(900_000 if n > 1 else 450_000)
    with MAKERS[kind](backend, config(kind, budget, kv_dtype)) as session:
        cache = session.cache
        n_tokens = 0
        sizes = []
        while cache.can_extend(n) if kind == "decode" else cache.can_begin_step([(0, n)]):
            forward(backend, cache, [0] * n, kind)
            n_tokens += n
            granted = [
                group.cell_bytes(cache.config.kv) * n_cells
                for group, n_cells in zip(cache.steps.groups, cache.steps.growth.sizes, strict=True)
            ]
            n_bytes = cache.usage().size_bytes
            if backend != "reference" or kv_dtype == "float32":  # NumPy stores bfloat16 in 4 bytes
                assert n_bytes == sum(granted) < budget.held_bytes <= budget.kv_bytes
            sizes.append(n_bytes)
        assert n_tokens > cache.capacity - n
        assert sizes == sorted(sizes)
        for more in (500, n):
            with pytest.raises(CacheFullError):
                forward(backend, cache, [0] * more, kind)
        assert cache.usage().size_bytes == sizes[-1]


@pytest.mark.parametrize("kind", ["seq", "layer_first", "block_first"])
def test_a_fork_and_what_follows_stay_inside(kind):
    budget = MemoryBudget(400_000)
    with MAKERS[kind]("torch", config(kind, budget)) as session:
        cache = session.cache
        forward("torch", cache, [0] * 37, kind)
        for seq_id in range(1, 6):
            cache.seq_cp(0, seq_id)
        for _ in range(30):
            if cache.can_begin_step([(seq_id, 1) for seq_id in range(6)]):
                forward("torch", cache, list(range(6)), kind)
                granted = [
                    group.cell_bytes(cache.config.kv) * n
                    for group, n in zip(cache.steps.groups, cache.steps.growth.sizes, strict=True)
                ]
                assert cache.usage().size_bytes == sum(granted) < budget.held_bytes


@pytest.mark.parametrize("kind", ["seq", "layer_first", "block_first"])
def test_rows_that_were_taken_out_come_back_inside_the_budget(kind):
    budget = MemoryBudget(400_000)
    with MAKERS[kind]("torch", config(kind, budget)) as session:
        cache = session.cache
        forward("torch", cache, [0] * 30, kind)
        tables = cache.seq_table(0)
        rows = cache.read_rows(tables)
        cache.seq_rm(0)
        forward("torch", cache, [1] * 40, kind)
        new = cache.seq_claim(2, tables)
        cache.write_rows(new, rows)
        for before, after in zip(arrays(rows), arrays(cache.read_rows(new)), strict=True):
            np.testing.assert_array_equal(before, after)
        forward("torch", cache, [2], kind)
        granted = [
            group.cell_bytes(cache.config.kv) * n
            for group, n in zip(cache.steps.groups, cache.steps.growth.sizes, strict=True)
        ]
        assert cache.usage().size_bytes == sum(granted) < budget.held_bytes

"""Triton's kernels on random plans against dense attention in NumPy, through the interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar import CacheConfig, LayerGroup, ModelCacheParams, make_config  # noqa: E402
from kvcellar.backends.torch.cache.pools import BlockFirstPool, GroupBlocks, Pool  # noqa: E402
from kvcellar.backends.torch.gpu.attend import launch, lists, plans  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402
from tests.backends.gpu.plans import attended, random_plan  # noqa: E402

N_CELLS = 160

GROUPS = {
    "mha": LayerGroup((0,), 2, 8, 8),
    "gqa-of-three": LayerGroup((0,), 2, 16, 16),
    "short-v": LayerGroup((0,), 1, 12, 6),
    "long-v-capped": LayerGroup((0,), 2, 8, 20, softcap=2.0),
    "window": LayerGroup((0,), 2, 16, 16, window=7),
    "wide-rows": LayerGroup((0,), 1, 64, 96),
    "latent": LayerGroup((0,), 1, 6, 16, is_latent=True),
    "rows-of-a-group": LayerGroup((0,), 2, 64, 64),
    "latent-rows-of-a-group": LayerGroup((0,), 1, 32, 64, is_latent=True),
    "window-of-a-group": LayerGroup((0,), 2, 32, 32, window=7, softcap=2.0),
}
HEADS = {
    "mha": 2,
    "wide-rows": 2,
    "gqa-of-three": 6,
    "short-v": 5,
    "long-v-capped": 4,
    "window": 4,
    "latent": 3,
    "rows-of-a-group": 4,
    "latent-rows-of-a-group": 2,
    "window-of-a-group": 4,
}
STORAGES = ("bfloat16", "float16", "fp8", "int8", "int4", "k8v4")
CASES = (
    *((name, "float32", "layer_first") for name in GROUPS if "of-a-group" not in name),
    *(("gqa-of-three", kv_dtype, "layer_first") for kv_dtype in STORAGES),
    ("short-v", "k8v4", "layer_first"),
    ("wide-rows", "int4:g32", "layer_first"),
    ("latent", "int8", "layer_first"),
    ("rows-of-a-group", "int8", "layer_first"),
    ("rows-of-a-group", "int4:g64", "block_first"),
    ("latent-rows-of-a-group", "int8", "layer_first"),
    ("window-of-a-group", "int8", "layer_first"),
    ("window", "int4", "block_first"),
    ("mha", "bfloat16", "block_first"),
)
BATCHES = {
    "one-token": ((1,), 0),
    "branches": ((1, 1, 1), 40),
    "a-prompt": ((21,), 0),
    "prompts-and-tokens": ((1, 9, 1, 3), 0),
    "forks-of-a-trunk": ((4, 1, 5), 30),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 16 cells, splits of 32, and short runs of few: plans of 160 cells meet them all."""
    hasten()
    monkeypatch.setattr(lists, "LEAST_SHARED", 16)
    monkeypatch.setattr(plans, "SHORT_RUN", 4)
    monkeypatch.setattr(plans, "FEW_ROWS", 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away, and NaN
        yield


def config_of(group: LayerGroup, kv_dtype: str, layout: str) -> CacheConfig:
    params = ModelCacheParams(1, groups=(group,))
    return make_config(
        params, capacity=N_CELLS, min_chunk=N_CELLS, kv_dtype=kv_dtype, block_size=16, layout=layout
    )


def made_pool(group: LayerGroup, kv_dtype: str, layout: str) -> Pool | BlockFirstPool:
    config = config_of(group, kv_dtype, layout)
    pool: Pool | BlockFirstPool
    if layout == "block_first":
        pool = BlockFirstPool(GroupBlocks(group, config), 0)
    else:
        pool = Pool(group, config)
    pool.ensure(N_CELLS, torch.device("cpu"))
    return pool


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "kv_dtype", "layout"), CASES)
def test_attention_over_a_random_plan_is_dense_attention(
    name: str, kv_dtype: str, layout: str, batch: str
) -> None:
    group, n_heads = GROUPS[name], HEADS.get(name, 2)
    rng = np.random.default_rng([*name.encode(), *kv_dtype.encode(), *batch.encode(), len(layout)])
    lengths, trunk = BATCHES[batch]
    plan = random_plan(rng, N_CELLS, lengths, group.sight, trunk)
    pool = made_pool(group, kv_dtype, layout)
    shape = (1, group.n_kv_heads, N_CELLS)
    k, v = (torch.from_numpy(rng.standard_normal((*shape, dim), np.float32))
            for dim in (group.head_dim, group.v_head_dim))  # fmt: skip
    pool.write_run(0, k, v)
    k, v = (side.to(torch.float32)[0].numpy() for side in pool.read(0, N_CELLS))
    q = torch.from_numpy(rng.standard_normal((1, n_heads, plan.n_tokens, group.q_dim), np.float32))
    sinks = torch.from_numpy(rng.standard_normal(n_heads, np.float32)) if trunk else None

    arguments = launch.pool_arguments(pool.placed())
    tiling = plans.Tiling(n_heads // group.n_kv_heads, group.n_kv_heads, 16, 16, 16, 2, 8)
    on_device = launch.DevicePlan(q.device)
    on_device.update(launch.compiled(plan, group.sight, tiling))
    got = launch.attend(on_device, arguments, tiling, q, 0.4, torch.float32, group.softcap, sinks)

    if group.is_latent:
        k = np.concatenate([v, k], axis=2)
    want = attended(
        plan, q[0].numpy(), k, v, 0.4, group.softcap, None if sinks is None else sinks.numpy()
    )
    np.testing.assert_allclose(got[0].numpy(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
@pytest.mark.parametrize(("kv_dtype", "dims", "n_heads"), [
    ("float32", (8, 6), 3), ("float16", (16, 16), 2), ("bfloat16", (12, 16), 1),
    ("int8", (64, 96), 2), ("int4", (64, 96), 3), ("k8v4", (9, 7), 2), ("k4v8", (7, 128), 1),
    ("int8:g32", (96, 32), 2), ("int4:g64", (64, 128), 2), ("fp8", (12, 16), 2),
])  # fmt: skip
def test_written_rows_have_the_bytes_that_the_codec_gives(
    kv_dtype: str, dims: tuple[int, int], n_heads: int, layout: str
) -> None:
    group = LayerGroup((0,), n_heads, *dims)
    rng = np.random.default_rng([*kv_dtype.encode(), *dims])
    plan = random_plan(rng, N_CELLS, (3, 1, 4), group.sight)
    rows = [rng.standard_normal((1, n_heads, 8, dim), np.float32) * 3 for dim in dims]
    rows[0][0, 0, 1] = 0.25  # a row of one number
    rows[1][0, 0, 2, 3] = np.nan
    k, v = (torch.from_numpy(side) for side in rows)
    there, here = (made_pool(group, kv_dtype, layout) for _ in range(2))
    cells = torch.from_numpy(plan.write_cells)
    there.scatter_rows(cells, k, v)

    tiling = plans.Tiling(1, n_heads, 16, 16, 16, 2, 8)
    on_device = launch.DevicePlan(k.device)
    on_device.update(launch.compiled(plan, group.sight, tiling))
    launch.write(on_device, launch.pool_arguments(here.placed()), k, v)

    for got, want in zip(here.take(cells), there.take(cells), strict=True):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.float().numpy(), other.float().numpy())


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
@pytest.mark.parametrize(("kv_dtype", "dims"), [
    ("float32", (8, 6)), ("bfloat16", (12, 16)), ("int8", (64, 96)), ("k4v8", (7, 9)),
    ("int4:g32", (64, 32)), ("fp8", (8, 6)),
])  # fmt: skip
def test_moved_cells_hold_what_the_others_held(
    kv_dtype: str, dims: tuple[int, int], layout: str
) -> None:
    group = LayerGroup((0,), 3, *dims)
    rng = np.random.default_rng([*kv_dtype.encode(), *dims])
    pool = made_pool(group, kv_dtype, layout)
    k, v = (torch.from_numpy(rng.standard_normal((1, 3, N_CELLS, dim), np.float32)) for dim in dims)
    pool.write_run(0, k, v)
    every = torch.arange(N_CELLS)
    cells = torch.tensor([90, 3, 150, 4, 5])
    wanted = every.clone()
    wanted[30:35] = cells
    want = pool.take(wanted)
    launch.move(launch.pool_arguments(pool.placed()), 30, cells)
    for got, side in zip(pool.take(every), want, strict=True):
        for one, other in zip(got, side, strict=True):
            assert torch.equal(one, other)

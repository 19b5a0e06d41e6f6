"""Cells beside a pool's own, exact and frozen, in Triton's kernels: what torch's path gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar import LayerGroup, ModelCacheParams  # noqa: E402
from kvcellar.backends.torch.cache import kernel  # noqa: E402
from kvcellar.backends.torch.cache.caches import (  # noqa: E402
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
)
from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.attend import launch, lists, plans  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402
from tests.stretches import stretches  # noqa: E402

HEADS = 4
PARAMS = ModelCacheParams(
    3,
    groups=(LayerGroup((0,), 2, 32, 32), LayerGroup((1,), 2, 32, 32, window=12)),
    shared=((2, 0),),
)
LATENT = ModelCacheParams(1, groups=(LayerGroup((0,), 1, 16, 32, is_latent=True),))
CACHES = {"decode": TorchContiguousCache, "seq": TorchSeqCache, "paged": TorchPagedCache}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that short histories fill some; on the CPU torch's own operations."""

    def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> plans.Tiling:
        n_kv_heads = pool.k.data.shape[1]
        return plans.Tiling(n_heads // n_kv_heads, n_kv_heads, 16, 16, 16, 2, 4)

    hasten()
    monkeypatch.setattr(kernel, "takes", lambda *_: False)
    monkeypatch.setattr(launch, "tiling_of", tiling)
    monkeypatch.setattr(lists, "LEAST_SHARED", 8)
    monkeypatch.setattr(plans, "SHORT_RUN", 4)
    monkeypatch.setattr(choice, "ON_CPU", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away, and NaN
        yield


class Both:
    """Two caches that are given the same: one attends by Triton, the other one by torch."""

    def __init__(self, kind: str, config: kv.CacheConfig) -> None:
        self.caches = [CACHES[kind](config) for _ in range(2)]
        self.params, self.seed = config.params, 0

    def step(self, begin: Any, n_tokens: int) -> None:
        """Write and attend random rows in all layers; what came out has to be alike."""
        positions = [begin(cache) for cache in self.caches]
        assert list(positions[0]) == list(positions[1])
        for layer in range(self.params.n_layers):
            group = next(g for g in self.params.groups if self.params.sources[layer] in g.layers)
            self.seed += 1
            rows = self.rows(n_tokens, group)
            found = []
            for cache, is_on_gpu in zip(self.caches, (True, False), strict=True):
                choice.ON_CPU = is_on_gpu
                at = torch.as_tensor(np.asarray(positions[0]))
                found.append(cache.update_and_attend(*rows, at, layer, 0.2, torch.float32))
            torch.testing.assert_close(*found, rtol=0, atol=2e-4)
        choice.ON_CPU = False

    def rows(self, n_tokens: int, group: LayerGroup) -> tuple[Any, Any, Any]:
        random = torch.Generator().manual_seed(self.seed)
        dims = (HEADS, group.q_dim), (group.n_kv_heads, group.head_dim)
        shapes = [*dims, (group.n_kv_heads, group.v_head_dim)]
        q, k, v = (torch.randn(1, h, n_tokens, dim, generator=random) for h, dim in shapes)
        return q, k, v

    def feed(self, seq_ids: Sequence[int]) -> None:
        self.step(lambda cache: cache.begin_step(stretches(seq_ids)), len(seq_ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("seq", "int8:first4:last8"), ("paged", "int4:rot:first2:last20"), ("seq", "k16v4:last5")],
)
def test_exact_cells_are_written_and_read_beside_quantised_ones(kind: str, kv_dtype: str) -> None:
    config = kv.make_config(PARAMS, 192, kv_dtype, min_chunk=64, block_size=16)
    both = Both(kind, config)
    both.feed([0] * 30)
    both.feed([0])
    for cache in both.caches:
        cache.seq_cp(0, 1)
    both.feed([0, 1, 1, 1, 0, 0])
    for cache in both.caches:
        cache.seq_rm(0, 25)
    both.feed([0, 1, *[2] * 9])
    exact = both.caches[0].pools.exact
    assert any(one is not None and (one._cell_of >= 0).any() for one in exact)


def test_exact_latents_are_read_beside_quantised_ones() -> None:
    both = Both("seq", kv.make_config(LATENT, 96, "int8:first4:last8", min_chunk=96))
    both.feed([0] * 20)
    both.feed([0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "kv_dtype"), [("seq", "int8"), ("paged", "float32"), ("decode", "int8")]
)
def test_a_frozen_prefix_is_read_in_front_of_each_sequence(kind: str, kv_dtype: str) -> None:
    trunk = Both("seq", kv.make_config(PARAMS, 64, kv_dtype))
    trunk.feed([0] * 21)
    prefix = kv.freeze_prefix(trunk.caches[0])
    config = kv.make_config(PARAMS, 96, kv_dtype, min_chunk=32, block_size=16, prefix=prefix)
    both = Both(kind, config)
    if kind == "decode":
        for first, n in ((21, 17), (38, 1), (39, 1)):
            both.step(lambda cache, at=range(first, first + n): at, n)
        return
    both.feed([0] * 17)
    both.feed([0, *[1] * 9])
    both.feed([0, 1, 2])

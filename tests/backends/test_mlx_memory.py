"""What the MLX caches must not do: copy a pool. Measured by MLX's own count of its peak memory."""

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
from kvcellar.errors import ConfigError
from tests.stretches import stretches

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")

N_LAYERS, N_HEADS, N_KV_HEADS, DIM = 2, 4, 2, 32
LONG = 32_768
MAKERS = {
    "decode": make_decode_session,
    "seq": make_seq_session,
    "paged": make_paged_session,
    "tree": make_tree_session,
}
every_type = pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])


def open_cache(kind: str, kv_dtype: str, **more: Any) -> Any:
    group = LayerGroup(tuple(range(N_LAYERS)), N_KV_HEADS, DIM, DIM)
    params = ModelCacheParams(N_LAYERS, N_KV_HEADS, DIM, groups=(group,))
    return MAKERS[kind]("mlx", make_config(params, LONG, kv_dtype, LONG, **more))


def forward(cache: Any, seq_ids: list[int], *, is_attended: bool = True) -> None:
    """One forward; no numbers are looked at here."""
    n_tok = len(seq_ids)
    positions = None
    if hasattr(cache, "begin_step"):
        cache.begin_step(stretches(seq_ids))
    else:
        positions = range(cache.length, cache.length + n_tok)
    q, k = mx.ones((1, N_HEADS, n_tok, DIM)), mx.ones((1, N_KV_HEADS, n_tok, DIM))
    outs = []
    for layer in range(N_LAYERS):
        if is_attended:
            out = cache.update_and_attend(q, k, k, positions, layer, 0.25, mx.float32)
            outs.append(out)
            k = k + 0 * out[:, :N_KV_HEADS]  # as in a model, a layer waits for the one before
        else:
            cache.update_and_fetch(layer, positions, k, k)
    cache.settle(*outs)
    cache.end_step()


def growth_of(call: Any) -> int:
    """Bytes that a call takes at most beyond what was held before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    mx.synchronize()
    return max(0, mx.get_peak_memory() - before)


def part_bytes(cache: Any) -> int:
    """The smallest array that a copied pool would take again."""
    return min(max(a.nbytes for a in side.parts) for p in cache.pools.of_layer
               for side in (p.k, p.v))  # fmt: skip


@every_type
@pytest.mark.parametrize("kind", MAKERS)
def test_a_token_written_into_a_large_pool_does_not_copy_it(kind: str, kv_dtype: str) -> None:
    with open_cache(kind, kv_dtype) as session:
        cache = session.cache
        forward(cache, [0] * 5)
        forward(cache, [0])
        for _ in range(3):
            assert growth_of(lambda: forward(cache, [0])) < part_bytes(cache) / 10


def test_the_ruler_sees_the_copy_that_a_kept_view_makes() -> None:
    with open_cache("seq", "float32") as session:
        cache = session.cache
        forward(cache, [0] * 5)
        kept = cache.pools.of_layer[0].read(0, 3)
        mx.eval(kept)
        assert growth_of(lambda: forward(cache, [0])) >= part_bytes(cache)
        del kept
        assert growth_of(lambda: forward(cache, [0])) < part_bytes(cache) / 10


def test_a_layout_that_could_not_be_written_in_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_first"):
        open_cache("paged", "float32", layout="block_first")


@every_type
def test_a_batch_of_many_sequences_is_written_in_place(kv_dtype: str) -> None:
    with open_cache("seq", kv_dtype) as session:
        cache = session.cache
        for n in (3, 12):  # as slices, and by index
            forward(cache, list(range(n)))
            assert growth_of(lambda n=n: forward(cache, list(range(n)))) < part_bytes(cache) / 10


def test_a_fork_and_its_first_token_leave_the_trunk_where_it_lies() -> None:
    with open_cache("seq", "float32") as session:
        cache = session.cache
        for _ in range(4):
            forward(cache, [0] * 4096, is_attended=False)
        assert growth_of(lambda: [cache.seq_cp(0, seq) for seq in (1, 2, 3)]) == 0
        trunk_bytes = 16_384 * DIM * 4 * N_KV_HEADS
        logits_bytes = 3 * N_HEADS * 16_384 * 4
        assert growth_of(lambda: forward(cache, [1, 2, 3])) < trunk_bytes / 4 + 4 * logits_bytes


def test_a_commit_moves_the_accepted_rows_alone() -> None:
    with open_cache("tree", "float32") as session:
        cache = session.cache
        forward(cache, [0] * 5)
        cache.propose([-1, -1, 1, 2])
        forward_tree(cache, 4)
        assert growth_of(lambda: cache.commit([1, 2, 3])) < part_bytes(cache) / 10


def forward_tree(cache: Any, n: int) -> None:
    q, k = mx.ones((1, N_HEADS, n, DIM)), mx.ones((1, N_KV_HEADS, n, DIM))
    cache.begin_step([(0, n)])
    outs = [cache.update_and_attend(q, k, k, None, i, 0.25, mx.float32) for i in range(N_LAYERS)]
    cache.settle(*outs)


def test_rows_out_and_in_are_the_bytes_of_the_torch_backend() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((1, N_KV_HEADS, 40, DIM)).astype(np.float32) for _ in range(4)]
    for kv_dtype in ("float32", "bfloat16", "float16", "int8", "int4", "int4:rot", "k16v8"):
        group = LayerGroup((0, 1), N_KV_HEADS, DIM, DIM)
        params = ModelCacheParams(2, N_KV_HEADS, DIM, groups=(group,))
        config = make_config(params, 64, kv_dtype)
        tables = [np.array([3, 9, 4, 39, 0], dtype=np.int64)]
        with (
            make_seq_session("mlx", config) as ours,
            make_seq_session("torch", config) as theirs,
            make_seq_session("mlx", config) as third,
        ):
            for session, wrap in ((ours, mx.array), (theirs, torch.from_numpy)):
                session.cache.begin_step([(0, 40)])
                for layer in range(2):
                    k, v = (wrap(r) for r in rows[2 * layer : 2 * layer + 2])
                    session.cache.update_and_fetch(layer, None, k, v)
            mine, other = ours.cache.read_rows(tables), theirs.cache.read_rows(tables)
            _assert_same(mine, other)
            for cells in ([5, 6, 7, 8, 9], [9, 2, 30, 7, 1]):
                third.cache.write_rows([np.array(cells)], other)
                _assert_same(third.cache.read_rows([np.array(cells)]), other)


def _assert_same(a: Any, b: Any) -> None:
    for sides_a, sides_b in zip(a, b, strict=True):
        for arrays_a, arrays_b in zip(sides_a, sides_b, strict=True):
            for x, y in zip(arrays_a, arrays_b, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)

"""What the torch caches must not do: copy a pool, allocate what is not held, move bytes to fork.

Measured with torch's own allocation records (every block that its CPU allocator hands out), with
addresses and with version counters: the same on every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar import (
    LayerGroup,
    ModelCacheParams,
    make_config,
    make_decode_session,
    make_seq_session,
    make_tree_session,
)
from tests.stretches import stretches

torch = pytest.importorskip("torch")

N_LAYERS, N_HEADS, N_KV_HEADS, DIM = 2, 4, 2, 16
LONG = 32_768
KV_DTYPES = ["float32", "bfloat16"]
MAKERS = {"decode": make_decode_session, "seq": make_seq_session, "tree": make_tree_session}
BYTES_PER_CELL = {"float32": 2 * N_KV_HEADS * DIM * 4, "bfloat16": 2 * N_KV_HEADS * DIM * 2}
"""Of one layer, K and V together."""

pytestmark = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def config(kv_dtype: str, capacity: int, window: int | None = None, **more: Any) -> Any:
    layers = tuple(range(N_LAYERS))
    group = LayerGroup(layers, N_KV_HEADS, DIM, DIM, window)
    params = ModelCacheParams(N_LAYERS, N_KV_HEADS, DIM, groups=(group,))
    return make_config(params, capacity, kv_dtype, **more)


def forward(cache: Any, kv_dtype: str, seq_ids: list[int], kind: str = "seq") -> None:
    """One forward of the model's own type; no numbers are looked at here."""
    n_tok = len(seq_ids)
    if kind == "decode":
        positions = list(range(cache.length, cache.length + n_tok))
    else:
        positions = cache.begin_step(stretches(seq_ids))
    dtype = getattr(torch, kv_dtype)
    q = torch.ones(1, N_HEADS, n_tok, DIM, dtype=dtype)
    k = torch.ones(1, N_KV_HEADS, n_tok, DIM, dtype=dtype)
    with torch.no_grad():
        for layer in range(N_LAYERS):
            cache.update_and_attend(q, k, k, torch.tensor(positions), layer, 0.25, dtype)
    cache.end_step()


def fill(cache: Any, kv_dtype: str, n_tok: int, kind: str, seq_id: int = 0) -> None:
    """A history in chunks, so that no prefill is quadratic; its attention is not computed."""
    dtype = getattr(torch, kv_dtype)
    for start in range(0, n_tok, 4096):
        n = min(4096, n_tok - start)
        if kind != "decode":
            cache.begin_step([(seq_id, n)])
        k = torch.ones(1, N_KV_HEADS, n, DIM, dtype=dtype)
        for layer in range(N_LAYERS):
            cache.update_and_fetch(layer, torch.arange(start, start + n), k, k)
    cache.end_step()


def tensors(cache: Any) -> list[Any]:
    """K and V of every layer."""
    sides = [rows for pool in cache.pools.of_layer for rows in (pool.k, pool.v)]
    return [part for rows in sides for part in rows.parts]


def places(cache: Any) -> list[tuple[int, int]]:
    """(address, version) of every pool tensor: a copy changes the first, a write the second."""
    return [(t.data_ptr(), t._version) for t in tensors(cache)]


def addresses(cache: Any) -> list[int]:
    return [address for address, _ in places(cache)]


def allocations(work: Callable[[], Any], tmp_path: Path) -> list[int]:
    """The size in bytes of every block that torch's CPU allocator hands out during ``work``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sizes = [int(e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    return [size for size in sizes if size > 0]


def test_the_ruler_sees_a_copy_of_a_pool(kv_dtype: str, tmp_path: Path) -> None:
    pool = torch.ones(N_KV_HEADS, LONG, DIM, dtype=getattr(torch, kv_dtype))
    assert max(allocations(pool.clone, tmp_path)) >= pool.nbytes


@pytest.mark.parametrize("kind", ["decode", "seq", "tree"])
def test_writing_one_token_allocates_nothing_of_the_pools_size(
    kind: str, kv_dtype: str, tmp_path: Path
) -> None:
    with MAKERS[kind]("torch", config(kv_dtype, LONG, min_chunk=LONG)) as session:
        cache = session.cache
        fill(cache, kv_dtype, LONG - 64, kind)
        forward(cache, kv_dtype, [0], kind)
        before = addresses(cache)
        pool_bytes = tensors(cache)[0].nbytes
        assert pool_bytes == LONG * BYTES_PER_CELL[kv_dtype] // 2
        dtype = getattr(torch, kv_dtype)
        k = torch.ones(1, N_KV_HEADS, 1, DIM, dtype=dtype)

        def write() -> None:
            position = cache.length if kind == "decode" else cache.begin_step([(0, 1)])[0]
            for layer in range(N_LAYERS):
                cache.update_and_fetch(layer, torch.tensor([position]), k, k)

        sizes = allocations(write, tmp_path)
        assert sum(sizes) < 4096
        # with attention: the logits of 32k cells in float32 and no copy of them in K's width
        logits_bytes = LONG * N_HEADS * 4
        sizes = allocations(lambda: forward(cache, kv_dtype, [0], kind), tmp_path)
        assert max(sizes) <= logits_bytes + 4096 < pool_bytes
        assert addresses(cache) == before


@pytest.mark.parametrize(
    ("v_dim", "softcap", "has_sinks"),
    [(DIM, None, False), (DIM, None, True), (DIM, 5.0, False), (8, None, False), (8, 5.0, True)],
)
@pytest.mark.parametrize("n_tok", [1, 2])
def test_reading_a_long_history_copies_none_of_it(
    v_dim: int, softcap: float | None, has_sinks: bool, n_tok: int, kv_dtype: str, tmp_path: Path
) -> None:
    group = LayerGroup((0,), N_KV_HEADS, DIM, v_dim, softcap=softcap)
    params = ModelCacheParams(1, N_KV_HEADS, DIM, v_dim, (group,))
    dtype = getattr(torch, kv_dtype)
    k = torch.ones(1, N_KV_HEADS, LONG - 64, DIM, dtype=dtype)
    with make_decode_session("torch", make_config(params, LONG, kv_dtype, LONG)) as session:
        cache = session.cache
        cache.update_and_fetch(0, torch.arange(LONG - 64), k, k[..., :v_dim])
        q = torch.ones(1, N_HEADS, n_tok, DIM, dtype=dtype)
        sinks = torch.ones(N_HEADS, dtype=dtype) if has_sinks else None

        def attend() -> None:
            position = torch.arange(cache.length, cache.length + n_tok)
            new = k[:, :, :n_tok]
            with torch.no_grad():
                cache.update_and_attend(q, new, new[..., :v_dim], position, 0, 0.25, dtype, sinks)

        attend()
        logits_bytes = n_tok * LONG * N_HEADS * 4
        assert max(allocations(attend, tmp_path)) <= logits_bytes + 4096 < tensors(cache)[0].nbytes


def test_a_batch_of_many_sequences_writes_in_place(kv_dtype: str, tmp_path: Path) -> None:
    with make_seq_session("torch", config(kv_dtype, LONG, min_chunk=LONG)) as session:
        cache = session.cache
        forward(cache, kv_dtype, [s for s in range(40) for _ in range(3)])
        before = addresses(cache)
        k = torch.ones(1, N_KV_HEADS, 40, DIM, dtype=getattr(torch, kv_dtype))

        def write() -> None:
            positions = torch.tensor(cache.begin_step([(seq_id, 1) for seq_id in range(40)]))
            for layer in range(N_LAYERS):
                cache.update_and_fetch(layer, positions, k, k)

        assert max(allocations(write, tmp_path)) < tensors(cache)[0].nbytes // 16
        assert addresses(cache) == before


def test_a_short_session_in_a_large_cache_holds_what_it_grew_to(
    kv_dtype: str, tmp_path: Path
) -> None:
    for kind, maker in MAKERS.items():
        with maker("torch", config(kv_dtype, 131_072)) as session:
            cache = session.cache
            assert cache.usage().size_bytes == 0
            sizes = allocations(
                lambda c=cache, k=kind: forward(c, kv_dtype, [0] * 100, k), tmp_path
            )
            assert max(sizes) <= 512 * BYTES_PER_CELL[kv_dtype]
            assert cache.usage().size_bytes == N_LAYERS * 512 * BYTES_PER_CELL[kv_dtype]
            for _ in range(5):
                forward(cache, kv_dtype, [0] * 100, kind)
            assert cache.usage().size_bytes == N_LAYERS * 1024 * BYTES_PER_CELL[kv_dtype]
            assert cache.usage().size_bytes == sum(t.nbytes for t in tensors(cache))


def test_a_long_session_behind_a_window_stays_small(kv_dtype: str) -> None:
    for kind, maker in MAKERS.items():
        settings = config(kv_dtype, 131_072, window=100, window_slack=28, min_chunk=64)
        with maker("torch", settings) as session:
            for _ in range(25):
                forward(session.cache, kv_dtype, [0] * 60, kind)
            n_cells = session.cache.usage().size_bytes // (N_LAYERS * BYTES_PER_CELL[kv_dtype])
            assert n_cells <= 512


def test_a_fork_of_32k_tokens_moves_no_bytes(kv_dtype: str, tmp_path: Path) -> None:
    for kind in ("seq", "tree"):
        with MAKERS[kind]("torch", config(kv_dtype, LONG + 64, min_chunk=LONG + 64)) as session:
            cache = session.cache
            fill(cache, kv_dtype, LONG, kind)
            size_bytes = cache.usage().size_bytes
            before = places(cache)

            def fork(cache: Any = cache) -> None:
                for dst in range(1, 9):
                    cache.seq_cp(0, dst)
                cache.seq_cp(0, 9, 0, LONG // 2)

            assert allocations(fork, tmp_path) == []
            assert places(cache) == before
            assert cache.usage().size_bytes == size_bytes
            assert cache.usage().groups[0].live == LONG
            # and dropping them moves none either
            for dst in range(1, 10):
                cache.seq_rm(dst)
            cache.seq_rm(0, LONG // 2)
            assert places(cache) == before


def test_a_forks_first_token_reads_the_trunk_where_it_lies(kv_dtype: str, tmp_path: Path) -> None:
    with make_seq_session("torch", config(kv_dtype, LONG + 64, min_chunk=LONG + 64)) as session:
        cache = session.cache
        fill(cache, kv_dtype, LONG, "seq")
        cache.seq_cp(0, 1)
        forward(cache, kv_dtype, [0])
        sizes = allocations(lambda: forward(cache, kv_dtype, [1]), tmp_path)
        assert max(sizes) <= LONG * N_HEADS * 4 + 4096 < tensors(cache)[0].nbytes


def test_a_commit_moves_only_the_accepted_rows(kv_dtype: str, tmp_path: Path) -> None:
    with make_tree_session("torch", config(kv_dtype, LONG + 64, min_chunk=LONG + 64)) as session:
        cache = session.cache
        fill(cache, kv_dtype, LONG, "tree")
        cache.propose([-1, -1, 0, 1, 3])
        forward(cache, kv_dtype, [0] * 5)
        before = addresses(cache)
        sizes = allocations(lambda: cache.commit([1, 3, 4]), tmp_path)
        assert sum(sizes) <= N_LAYERS * 3 * BYTES_PER_CELL[kv_dtype] + 1024
        assert addresses(cache) == before


def test_a_commit_of_rows_that_lie_right_moves_none(kv_dtype: str) -> None:
    with make_tree_session("torch", config(kv_dtype, 64)) as session:
        cache = session.cache
        forward(cache, kv_dtype, [0] * 5)
        cache.propose([-1, 0, 1, 0])
        forward(cache, kv_dtype, [0] * 4)
        before = places(cache)
        cache.commit([0, 1, 2])
        assert places(cache) == before


def test_pools_are_bytes_of_the_type_that_was_asked(kv_dtype: str) -> None:
    with make_decode_session("torch", config(kv_dtype, 64)) as session:
        forward(session.cache, "float32", [0] * 3, "decode")
        assert {t.dtype for t in tensors(session.cache)} == {getattr(torch, kv_dtype)}
        assert np.isfinite(session.cache.usage().size_bytes)


def test_queries_of_fewer_heads_with_the_same_strides_get_a_result_of_their_own_size(
    kv_dtype: str,
) -> None:
    """Slices of one projection differ in nothing but their number of heads."""
    dtype = getattr(torch, kv_dtype)
    fused = torch.randn(1, 1, 16 * DIM, dtype=dtype, generator=torch.Generator().manual_seed(3))

    def heads(n: int) -> Any:
        return fused.view(1, 1, 16, DIM)[:, :, :n].transpose(1, 2)

    assert heads(8).stride() == heads(2).stride()
    outs = []
    with make_decode_session("torch", config(kv_dtype, 64)) as session, torch.no_grad():
        for position, n in enumerate((8, 2, 4, 2)):
            for layer in range(N_LAYERS):
                out = session.cache.update_and_attend(
                    heads(n), heads(2), heads(2), torch.tensor([position]), layer, 0.25, dtype
                )
            outs.append(out)
    for n, out in zip((8, 2, 4, 2), outs, strict=True):  # all tokens have the same K and V
        want = heads(2).repeat_interleave(n // 2, dim=1)
        torch.testing.assert_close(out, want)

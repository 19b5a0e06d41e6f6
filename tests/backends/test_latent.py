"""Latent rows: what they give is what expanded heads give, in a fraction of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar import (
    CacheConfig,
    LayerGroup,
    ModelCacheParams,
    make_config,
    make_decode_session,
    make_seq_session,
)
from kvcellar.errors import ShapeError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.store import RowLayout
from kvcellar.testing.dense import stored
from tests.backends.test_memory import allocations

torch = pytest.importorskip("torch")

N_HEADS, PLAIN, ROTARY, V_DIM, LATENT = 4, 6, 8, 5, 32


def params_of(*groups: LayerGroup) -> ModelCacheParams:
    return ModelCacheParams(sum(len(group.layers) for group in groups), groups=groups)


def config_of(kv_dtype: str = "float32", capacity: int = 256, **more: Any) -> CacheConfig:
    group = LayerGroup((0,), 1, ROTARY, LATENT, is_latent=True)
    return make_config(params_of(group), capacity, kv_dtype, **more)


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def feed(backend: str, config: CacheConfig, q: Any, k: Any, v: Any, sizes: list[int]) -> Any:
    """Attend tokens in forwards of these sizes: ``[1, n_heads, T, v_head_dim]``."""
    outs, at = [], 0
    with make_decode_session(backend, config) as session, torch.no_grad():
        for size in sizes:
            rows = [x[:, :, at : at + size] for x in (q, k, v)]
            positions = torch.arange(at, at + size)
            if backend == "reference":
                rows, positions = [x.numpy() for x in rows], positions.numpy()
            dtype: Any = torch.float32 if backend == "torch" else "float32"
            out = session.cache.update_and_attend(*rows, positions, 0, 0.3, dtype)
            outs.append(torch.as_tensor(out))
            at += size
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("window", [None, 7])
def test_latent_rows_give_what_the_expanded_heads_give(backend: str, window: int | None) -> None:
    n, sizes = 40, [21, 1, 1, 9, 1, 7]
    latent, rotary = normal(1, 1, n, LATENT, seed=1), normal(1, 1, n, ROTARY, seed=2)
    q = normal(1, N_HEADS, n, PLAIN + ROTARY, seed=3)
    up_k = normal(N_HEADS, PLAIN, LATENT, seed=4) / LATENT**0.5
    up_v = normal(N_HEADS, V_DIM, LATENT, seed=5) / LATENT**0.5
    heads = LayerGroup((0,), N_HEADS, PLAIN + ROTARY, V_DIM, window)
    k = torch.cat((latent @ up_k.mT, rotary.expand(-1, N_HEADS, -1, -1)), dim=-1)
    want = feed(backend, make_config(params_of(heads), 256), q, k, latent @ up_v.mT, sizes)
    latents = LayerGroup((0,), 1, ROTARY, LATENT, window, is_latent=True)
    q = torch.cat((q[..., :PLAIN] @ up_k, q[..., PLAIN:]), dim=-1)
    out = feed(backend, make_config(params_of(latents), 256), q, rotary, latent, sizes)
    torch.testing.assert_close(out @ up_v.mT, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_exact_ends_of_a_history_of_latents_are_exact(backend: str) -> None:
    n, first, last = 60, 3, 20
    v, k = normal(1, 1, n, LATENT, seed=1), normal(1, 1, n, ROTARY, seed=2)
    q = normal(1, N_HEADS, n, LATENT + ROTARY, seed=3)
    name = f"int4:rot:first{first}:last{last}"
    got = feed(backend, config_of(name), q, k, v, [n - 1, 1])[0, :, -1]
    rows = [stored(side[0, 0].numpy(), name, letter) for side, letter in ((k, "k"), (v, "v"))]
    exact = np.r_[:first, n - last : n]
    for row, side in zip(rows, (k, v), strict=True):
        row[exact] = side[0, 0].numpy()[exact]
    joined = np.concatenate([rows[1], rows[0]], axis=1)
    logits = q[0, :, -1].numpy() @ joined.T * 0.3
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    want = weights @ rows[1] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_long_history_of_latents_is_read_where_it_lies(
    kv_dtype: str, has_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcellar.backends.torch.cache import kernel

    if not has_kernel:
        monkeypatch.setattr(kernel, "takes", lambda *_: False)
    n, dtype = 32_768, getattr(torch, kv_dtype)
    with make_decode_session("torch", config_of(kv_dtype, n, min_chunk=n)) as session:
        cache = session.cache
        k, v = torch.ones(1, 1, n - 64, ROTARY), torch.ones(1, 1, n - 64, LATENT)
        cache.update_and_fetch(0, torch.arange(n - 64), k.to(dtype), v.to(dtype))
        q = torch.ones(1, N_HEADS, 1, LATENT + ROTARY, dtype=dtype)

        def attend() -> None:
            at = torch.tensor([cache.length])
            rows = [x[:, :, :1].to(dtype) for x in (k, v)]
            with torch.no_grad():
                cache.update_and_attend(q, *rows, at, 0, 0.25, dtype)

        attend()
        logits_bytes = n * N_HEADS * 4
        assert max(allocations(attend, tmp_path)) <= logits_bytes + 4096
        (pool,) = cache.pools.of_layer
        assert logits_bytes + 4096 < pool.v.size_bytes


def test_a_long_prefill_holds_no_more_logits_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcellar.backends.torch.cache import attention

    monkeypatch.setattr(attention, "PLAIN_LOGITS", 1 << 16)
    n = 1500
    rows = normal(1, N_HEADS, n, LATENT + ROTARY), normal(1, 1, n, ROTARY), normal(1, 1, n, LATENT)
    want = feed("torch", config_of(capacity=n), *rows, [100] * 15)
    got: list[Any] = []

    def prefill() -> None:
        got.append(feed("torch", config_of(capacity=n, min_chunk=n), *rows, [n]))

    own_bytes = 4 * n * N_HEADS * (LATENT + ROTARY)
    assert max(allocations(prefill, tmp_path)) <= max(4 * (1 << 16), own_bytes) + 4096
    torch.testing.assert_close(got[0], want, rtol=0, atol=2e-5)


def test_rows_of_latents_leave_a_cache_and_return() -> None:
    n, config = 30, config_of("int8:rot")
    rows = normal(1, N_HEADS, n, LATENT + ROTARY), normal(1, 1, n, ROTARY), normal(1, 1, n, LATENT)
    with make_seq_session("torch", config) as session, torch.no_grad():
        cache: Any = session.cache

        def feed_tokens(seq_id: int, start: int, stop: int) -> Any:
            positions = torch.tensor(cache.begin_step([(seq_id, stop - start)]))
            part = [x[:, :, start:stop] for x in rows]
            return cache.update_and_attend(*part, positions, 0, 0.3, torch.float32)

        feed_tokens(0, 0, n - 1)
        cache.end_step()
        saved = cache.read_rows(cache.seq_table(0))
        want = feed_tokens(0, n - 1, n)
        feed_tokens(1, 1, n)
        cache.seq_rm(1, n - 1)
        cache.write_rows(cache.seq_table(1), saved)
        assert torch.equal(feed_tokens(1, n - 1, n), want)
    (group,) = saved
    assert [parts[0].shape for parts in group] == [(1, 1, n - 1, ROTARY), (1, 1, n - 1, LATENT)]
    assert RowLayout.from_config(config).rows_bytes(n) == n * config.params.groups[0].cell_bytes(
        config.kv
    )


def test_the_shape_of_deepseek_v3_takes_a_tenth_of_its_expanded_bytes() -> None:
    latents = LayerGroup((0,), 1, 64, 512, is_latent=True)
    heads = LayerGroup((0,), 128, 192, 128)
    for kv_dtype in ("float32", "bfloat16", "int8"):
        kv = parse_kv_dtype(kv_dtype)
        assert 10 * latents.cell_bytes(kv) <= heads.cell_bytes(kv)
    sizes = []
    for group in (latents, heads):
        config = make_config(params_of(group), 64, "bfloat16", 64)
        with make_decode_session("torch", config) as session, torch.no_grad():
            q, k, v = (
                torch.ones(1, n, 2, dim, dtype=torch.bfloat16)
                for n, dim in (
                    (128, group.q_dim),
                    (group.n_kv_heads, group.head_dim),
                    (group.n_kv_heads, group.v_head_dim),
                )
            )
            session.cache.update_and_attend(q, k, v, [0, 1], 0, 0.1, torch.bfloat16)
            sizes.append(session.cache.usage().size_bytes)
    assert sizes[0] == 64 * 2 * (512 + 64)
    assert sizes[1] == 64 * 2 * 128 * (192 + 128) == sizes[0] * 640 // 9


@pytest.mark.parametrize(
    ("kv_dtype", "rotary", "latent", "is_joined"),
    [
        ("float32", 8, 32, True),
        ("bfloat16", 64, 512, True),
        ("int8", 64, 512, True),
        ("int8", 32, 256, False),  # groups of 32 numbers in one and of 64 in the other
        ("int8:g32", 32, 256, True),
        ("int4", 32, 256, True),
        ("int4:rot", 32, 256, False),
        ("k8v4", 64, 512, False),
    ],
)
def test_rows_of_one_type_lie_joined_for_the_kernel(
    kv_dtype: str, rotary: int, latent: int, is_joined: bool
) -> None:
    group = LayerGroup((0,), 1, rotary, latent, is_latent=True)
    config = make_config(params_of(group), 64, kv_dtype)
    rows = normal(1, 2, 3, group.q_dim), normal(1, 1, 3, rotary), normal(1, 1, 3, latent)
    with make_decode_session("torch", config) as session, torch.no_grad():
        session.cache.update_and_attend(*rows, [0, 1, 2], 0, 0.1, torch.float32)
        (pool,) = session.cache.pools.of_layer
        assert pool.is_joined is is_joined
        k, v = (side.parts[0].untyped_storage().data_ptr() for side in (pool.k, pool.v))
        assert (k == v) is is_joined
        assert pool.size_bytes == 64 * group.cell_bytes(config.kv)


def test_queries_without_a_latent_part_are_refused() -> None:
    k, v = torch.ones(1, 1, 2, ROTARY), torch.ones(1, 1, 2, LATENT)
    q = torch.ones(1, N_HEADS, 2, ROTARY)
    with (
        make_decode_session("torch", config_of()) as session,
        pytest.raises(ShapeError, match=rf"latent rows of head_dim .* {LATENT + ROTARY}\]"),
    ):
        session.cache.update_and_attend(q, k, v, [0, 1], 0, 0.1, torch.float32)


def test_the_kernels_own_forwards_leave_latent_rows_to_torch() -> None:
    from kvcellar.backends.torch.cache.forward import can_plan, can_run

    plain = make_config(ModelCacheParams(1, 1, 8), 64)
    for config, is_taken in ((config_of(), False), (plain, True)):
        with make_decode_session("torch", config) as session:
            assert can_run(session.cache, 1, torch.float32) is is_taken
            assert can_plan(session.cache) is is_taken

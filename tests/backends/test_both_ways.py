"""Tokens that see each other both ways, as rows of a picture do, against dense attention."""

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

torch = pytest.importorskip("torch")

N_HEADS, N_KV_HEADS, DIM = 4, 2, 16


def normal(n: int, heads: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, heads, n, DIM), generator=generator)


def seen(n: int, window: int | None, whole: list[tuple[int, int]]) -> Any:
    """Return which tokens each token of a history sees: ``[n, n]``, true where it does."""
    at = np.arange(n)
    far = at[:, None] - at[None] if window is None else (at[:, None] - at[None]) < window
    own = np.zeros((n, n), bool)
    for first, stop in whole:
        own[first:stop, first:stop] = True
    back = np.ones((n, n), bool) if window is None else far
    return back & ((at[:, None] >= at[None]) | own)


def dense(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = (one.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1) for one in (k, v))
    logits = (q @ k.transpose(2, 3)) * DIM**-0.5
    logits = logits.masked_fill(~torch.from_numpy(mask), float("-inf"))
    return torch.softmax(logits, dim=-1) @ v


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, 7, 40, 200])
def test_tokens_of_a_picture_see_those_behind_them(window, kv_dtype, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr("kvcellar.backends.torch.cache.kernel.takes", lambda *given: False)
    group = LayerGroup((0,), N_KV_HEADS, DIM, DIM, window=window)
    config = make_config(ModelCacheParams(1, groups=(group,)), 1024, kv_dtype)
    n = 180
    first = [(3, 20), (50, 130), (140, 141)]  # the second one is longer than a tile of a window
    second = [(0, 9), (100, 120)]
    parts = [(0, [40, n - 40], first), (1, [n], second)]  # in two forwards, and in one
    rows = {seq: [normal(n, h, 3 * seq + i) for i, h in enumerate((4, 2, 2))] for seq in (0, 1)}
    outs: dict[int, list[Any]] = {0: [], 1: []}
    with make_seq_session("torch", config) as session, torch.no_grad():
        cache, at = session.cache, {0: 0, 1: 0}
        for step in ([(0, 40)], [(0, n - 40), (1, n)]):
            positions = cache.begin_step(step)
            given = [
                torch.cat([rows[seq][i][:, :, at[seq] : at[seq] + m] for seq, m in step], dim=2)
                for i in range(3)
            ]
            begin, ranges = 0, []
            for seq, m in step:
                ranges += [
                    (begin + a - at[seq], begin + b - at[seq])
                    for a, b in {s: w for s, _, w in parts}[seq]
                    if at[seq] <= a and b <= at[seq] + m
                ]
                begin += m
            cache.both_ways = tuple(ranges)
            out = cache.update_and_attend(*given, positions, 0, DIM**-0.5, torch.float32)
            cache.both_ways = ()
            for (seq, m), part in zip(step, out.split([m for _, m in step], dim=2), strict=True):
                outs[seq].append(part)
                at[seq] += m
    for seq, _, whole in parts:
        want = dense(*rows[seq], seen(n, window, whole))
        got = torch.cat(outs[seq], dim=2)
        assert (got - want).abs().max() < (1e-5 if kv_dtype == "float32" else 0.05)


def test_others_are_not_touched_where_only_windows_are_meant():
    groups = tuple(
        LayerGroup((i,), N_KV_HEADS, DIM, DIM, window=w) for i, w in enumerate((None, 5))
    )
    config = make_config(ModelCacheParams(2, groups=groups), 64, "float32")
    q, k, v = (normal(20, heads, i) for i, heads in enumerate((4, 2, 2)))
    with make_seq_session("torch", config) as session, torch.no_grad():
        session.cache.both_ways, session.cache.both_ways_in_windows = ((2, 14),), True
        positions = session.cache.begin_step([(0, 20)])
        for layer, window in enumerate((None, 5)):
            got = session.cache.update_and_attend(
                q, k, v, positions, layer, DIM**-0.5, torch.float32
            )
            want = dense(q, k, v, seen(20, window, [(2, 14)] if window else []))
            assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("make", [make_decode_session, make_tree_session, make_paged_session])
def test_every_kind_of_cache_reads_both_ways(make, window):
    group = LayerGroup((0,), N_KV_HEADS, DIM, DIM, window=window)
    config = make_config(ModelCacheParams(1, groups=(group,)), 128, "float32")
    q, k, v = (normal(40, heads, i) for i, heads in enumerate((4, 2, 2)))
    with make("torch", config) as session, torch.no_grad():
        cache, outs = session.cache, []
        for first, stop, whole in ((0, 7, ()), (7, 40, ((2, 22),))):
            positions = torch.arange(first, stop)
            if make is not make_decode_session:
                cache.begin_step([(0, stop - first)])
            cache.both_ways = whole
            given = (one[:, :, first:stop] for one in (q, k, v))
            outs.append(cache.update_and_attend(*given, positions, 0, DIM**-0.5, torch.float32))
        want = dense(q, k, v, seen(40, window, [(9, 29)]))
        assert (torch.cat(outs, dim=2) - want).abs().max() < 1e-5

"""The executable specification, checked by hand and against torch's casts."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar import AttendKind, ModelCacheParams, make_config, make_seq_session
from kvcellar.backends.reference import Pool, attend, visible
from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits


def test_bfloat16_bits_are_those_of_a_cast_in_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    ties = (np.arange(2000, dtype=np.uint32) << 16) + 0x3F80_8000  # halfway, even and odd
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40], dtype=np.float32)
    values = np.concatenate([bits.view(np.float32), ties.view(np.float32), edges])
    want = torch.from_numpy(values).to(torch.bfloat16)
    got = from_bfloat16_bits(to_bfloat16_bits(values))
    np.testing.assert_array_equal(got, want.float().numpy())
    numbers = ~np.isnan(got)
    signs = np.signbit(want.float().numpy())
    np.testing.assert_array_equal(np.signbit(got)[numbers], signs[numbers])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_a_pool_keeps_its_bytes_when_it_grows_and_never_grows_past_capacity(kv_dtype: str) -> None:
    pool = Pool(2, 3, 5, capacity=22, kv_dtype=kv_dtype, min_chunk=4)
    assert pool.size_bytes == 0
    rng = np.random.default_rng(1)
    k, v = rng.integers(-8, 8, (2, 3, 3)) / 4, rng.integers(-8, 8, (2, 3, 5)) / 4
    pool.ensure(3)
    pool.write_run(1, k, v)
    sizes = []
    for n_cells in (4, 5, 9, 17, 22, 3):
        pool.ensure(n_cells)
        sizes.append(pool.n_cells)
        for got, want in zip(pool.read(1, 3), (k, v), strict=True):
            np.testing.assert_array_equal(got, want)
    assert sizes == [4, 8, 16, 22, 22, 22]
    assert pool.size_bytes == 22 * 2 * (3 + 5) * (4 if kv_dtype == "float32" else 2)


def test_rows_are_scattered_and_moved_cell_by_cell() -> None:
    pool = Pool(1, 1, 2, capacity=8, min_chunk=8)
    pool.ensure(8)
    k = np.arange(4.0).reshape(1, 4, 1)
    pool.scatter_rows(np.array([6, 1, 3, 2]), k, np.concatenate([k, -k], axis=2))
    assert pool.read(0, 8)[0].ravel().tolist() == [0, 1, 3, 2, 0, 0, 0, 0]
    pool.gather_into(2, np.array([1, 3, 2]))  # sources inside of the target
    assert pool.read(0, 8)[0].ravel().tolist() == [0, 1, 1, 2, 3, 0, 0, 0]
    assert pool.read(2, 3)[1].tolist() == [[[1, -1], [2, -2], [3, -3]]]


def test_the_three_kinds_of_reads_see_what_they_say() -> None:
    assert visible(AttendKind.NONE, None, 1, 3).tolist() == [[True] * 3]
    causal = visible(AttendKind.CAUSAL, None, 2, 4)
    assert causal.tolist() == [[True, True, True, False], [True] * 4]
    mask = np.array([[True, False], [False, True]])
    explicit = visible(AttendKind.EXPLICIT, mask, 2, 3)
    assert explicit.tolist() == [[True, True, False], [True, False, True]]


def test_attention_by_hand() -> None:
    q = np.array([[[2.0]], [[-1.0]]])  # two query heads of one KV head
    k, v = np.array([[[0.0], [1.0], [9.0]]]), np.array([[[1.0], [3.0], [99.0]]])
    seen = np.array([[True, True, False]])
    a, b = np.exp(1.0), np.exp(-0.5)  # scale 0.5
    plain = attend(q, k, v, seen, 0.5)
    np.testing.assert_allclose(plain.ravel(), [(1 + 3 * a) / (1 + a), (1 + 3 * b) / (1 + b)])
    sinks = np.array([0.0, np.log(2.0)])
    sunk = attend(q, k, v, seen, 0.5, sinks=sinks)
    np.testing.assert_allclose(sunk.ravel(), [(1 + 3 * a) / (2 + a), (1 + 3 * b) / (3 + b)])
    capped = attend(q, k, v, seen, 0.5, softcap=2.0)
    a, b = np.exp(2 * np.tanh(0.5)), np.exp(2 * np.tanh(-0.25))
    np.testing.assert_allclose(capped.ravel(), [(1 + 3 * a) / (1 + a), (1 + 3 * b) / (1 + b)])


def test_segments_carry_the_stored_values_and_no_more() -> None:
    config = make_config(ModelCacheParams(1, 1, 2), 16, "bfloat16")
    with make_seq_session("reference", config) as session:
        cache = session.cache
        k = np.full((1, 1, 3, 2), 1.0 + 2.0**-9, dtype=np.float32)  # no bfloat16: rounds to 1
        cache.begin_step([(0, 2), (7, 1)])
        first, second = cache.update_and_fetch(0, [0, 1, 0], k, k)
        assert (first.q_start, first.q_len, first.kind) == (0, 2, AttendKind.CAUSAL)
        assert (second.q_start, second.q_len, second.kind) == (2, 1, AttendKind.NONE)
        assert first.k.shape == (1, 2, 2) and second.v.shape == (1, 1, 2)
        assert np.all(first.k == 1.0) and np.all(second.v == 1.0)

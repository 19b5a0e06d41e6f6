"""Quantisation: its error bounds, its bytes on every backend, and what it costs in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcellar.backends.reference.quantise import dequantise, quantise, rotate
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.testing.dense import stored, turned, walsh

torch = pytest.importorskip("torch")
codecs = pytest.importorskip("kvcellar.backends.torch.cache.codecs")

NUMBERS = st.floats(-3e4, 3e4, width=32) | st.floats(-2, 2, width=32) | st.just(0.0)
SIZES = st.sampled_from([(32, 32), (64, 32), (64, 64), (128, 128), (7, 7), (10, 5), (1, 1)])


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    dim, group_size = draw(SIZES)
    return draw(arrays(np.float32, (draw(st.integers(1, 3)), dim), elements=NUMBERS)), group_size


@given(given_rows=rows(), bits=st.sampled_from([4, 8]))
def test_the_error_is_at_most_half_a_scale(given_rows: tuple[np.ndarray, int], bits: int) -> None:
    values, group_size = given_rows
    stored_rows = quantise(values, bits, group_size)
    back = dequantise(stored_rows, bits, values.shape[1]).astype(np.float64)
    scales = np.repeat(stored_rows.scales.astype(np.float64), group_size, axis=1)
    span = np.ptp(values.astype(np.float64).reshape(len(values), -1, group_size), axis=2)
    tiny = 2.0**-24 * 2**bits + np.abs(values) * 2.0**-22  # of float16, and of float32 sums
    assert (np.abs(back - values) <= scales / 2 + tiny).all()
    # and a scale is no wider than the group's own range and the rounding of its start ask for
    most = (span + np.abs(values).reshape(span.shape[0], -1, group_size).max(axis=2) / 400) * 1.003
    assert (stored_rows.scales <= most / (2**bits - 1) + 2.0**-23).all()


@given(given_rows=rows(), bits=st.sampled_from([4, 8]))
def test_every_backend_stores_the_same_bytes(given_rows: tuple[np.ndarray, int], bits: int) -> None:
    values, group_size = given_rows
    want = quantise(values, bits, group_size)
    packed, affine = codecs.quantise(torch.from_numpy(values), bits, group_size)
    np.testing.assert_array_equal(packed.numpy(), want.packed)
    pairs = affine.numpy().reshape(len(values), -1, 2)
    np.testing.assert_array_equal(pairs[..., 0], want.scales)
    np.testing.assert_array_equal(pairs[..., 1], want.biases)
    back = codecs.dequantise(packed, affine, bits, values.shape[1], torch.float32)
    np.testing.assert_array_equal(back.numpy(), dequantise(want, bits, values.shape[1]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_oracle_of_the_conformance_suite_has_the_same_numbers(bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((50, 96)).astype(np.float32)
    want = stored(values, f"int{bits}:g32", "k")
    np.testing.assert_array_equal(dequantise(quantise(values, bits, 32), bits, 96), want)


@pytest.mark.parametrize("dim", [1, 5, 6, 32, 64, 80, 96, 128])
def test_a_rotation_is_orthogonal_its_own_inverse_and_the_same_everywhere(dim: int) -> None:
    values = np.random.default_rng(dim).standard_normal((4, dim)).astype(np.float32)
    once = rotate(values)
    np.testing.assert_allclose(once, values @ walsh(dim), atol=1e-5)
    np.testing.assert_allclose(rotate(once), values, atol=1e-5)
    np.testing.assert_array_equal(once, turned(values))
    np.testing.assert_array_equal(codecs.rotate(torch.from_numpy(values)).numpy(), once)


def test_a_rotation_spreads_an_outlier_and_int4_loses_less() -> None:
    values = np.random.default_rng(3).standard_normal((200, 128)).astype(np.float32)
    values[:, 17] *= 30
    plain = stored(values, "int4:g128", "k")
    rotated = stored(values, "int4:g128:rot", "k")
    assert np.abs(rotated - values).mean() < 0.6 * np.abs(plain - values).mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_nan_stays_nan_and_its_neighbours_do_not_mind(bits: int) -> None:
    values = np.ones((3, 64), np.float32)
    values[1, 5] = np.nan
    back = dequantise(quantise(values, bits, 32), bits, 64)
    assert np.isnan(back[1, :32]).all()
    np.testing.assert_allclose(np.delete(back, 1, axis=0), 1.0, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.5, 6.1e-5, 1024.0])
def test_equal_numbers_of_a_group_come_back(value: float) -> None:
    for bits in (4, 8):
        back = dequantise(quantise(np.full((1, 32), value, np.float32), bits, 32), bits, 32)
        np.testing.assert_allclose(back, value, rtol=1e-4, atol=2.0**-24 * 2**bits)


@pytest.mark.parametrize(
    ("kv_dtype", "most"), [("int8", 0.55), ("int4", 0.32), ("int8:g128", 0.52), ("int4:g64", 0.29)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_take_their_share_of_bfloat16(kv_dtype: str, most: float, dim: int) -> None:
    side = parse_kv_dtype(kv_dtype).k
    if side.group_size and dim % side.group_size:
        pytest.skip("no such group")
    parts: Any = codecs.make_codec(side, dim).encode(torch.randn(1, 2, 10, dim))
    assert sum(part.nbytes for part in parts) <= most * 2 * 10 * dim * 2


FILL = """
import sys
import torch
import kvcellar as kv

def resident():  # memory of its own: code that comes in from files at its leisure is not counted
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

torch.set_num_threads(1)
with kv.make_seq_session(
    "torch", kv.make_config(kv.ModelCacheParams(8, 8, 64), 32768, sys.argv[1], 32768)
) as session:
    cache, k = session.cache, torch.randn(1, 8, 256, 64, dtype=torch.bfloat16)
    with kv.make_seq_session(  # what a first step takes for itself
        "torch", kv.make_config(kv.ModelCacheParams(1, 8, 64), 4096, sys.argv[1])
    ) as small:
        for _ in range(16):
            small.cache.begin_step([(0, 256)])
            small.cache.update_and_fetch(0, None, k, k)
    def fill(n):
        for _ in range(0, n, 256):
            cache.begin_step([(0, 256)])
            for layer in range(8):
                cache.update_and_fetch(layer, None, k, k)
    before = resident()
    fill(32768)
    print(cache.usage().size_bytes, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read sizes from")
@pytest.mark.slow
def test_a_process_holds_half_and_a_third_of_bfloat16s_bytes_for_the_same_tokens() -> None:
    sizes = {}
    for kv_dtype in ("bfloat16", "int8", "int4"):
        command = [sys.executable, "-c", FILL, kv_dtype]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sizes[kv_dtype] = [int(size) for size in out.split()]
    print(sizes)
    for at, (what, room) in enumerate((("counted", 0), ("resident", 8 << 20))):
        # What the allocator keeps for itself differs from run to run by some megabytes.
        assert sizes["int8"][at] <= 0.55 * sizes["bfloat16"][at] + room, what
        assert sizes["int4"][at] <= 0.32 * sizes["bfloat16"][at] + room, what

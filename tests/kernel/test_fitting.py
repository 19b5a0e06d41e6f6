"""Weights made blocks of Q4_K: how near they are, and that they are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.kernel import levels

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from gguf import GGMLQuantizationType, quants

from kvcellar.kernel import blocks
from kvcellar.kernel.attend import Dtype

N_IN = 512


def fitted(rows: np.ndarray, dtype: Dtype = Dtype.float32) -> np.ndarray:
    """Return the bytes of rows ``[n_out, n_in]``."""
    n_out, n_in = rows.shape
    rows, made = np.ascontiguousarray(rows), np.empty((n_out, n_in // 256 * 144), np.uint8)
    blocks.fit_q4_k(rows.ctypes.data, dtype, n_in, n_out, made.ctypes.data)
    return made


def plain(made: np.ndarray) -> np.ndarray:
    return quants.dequantize(made, GGMLQuantizationType.Q4_K)


def error_of(rows: np.ndarray, made: np.ndarray) -> float:
    return float(np.linalg.norm(made - rows) / np.linalg.norm(rows))


def rounded(rows: np.ndarray) -> np.ndarray:
    """Return rows in 16 steps from each 32's lowest to its highest, with no search."""
    groups = rows.reshape(-1, 32)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    step = (high - low) / 15
    return (np.rint((groups - low) / step) * step + low).reshape(rows.shape)


@pytest.mark.parametrize("tails", [3, 30])
def test_a_search_is_nearer_than_rounding_between_the_ends(tails: int) -> None:
    """Although scales and minima have 6 bits here, and are exact there."""
    rows = np.random.default_rng(7).standard_t(tails, (64, N_IN)).astype(np.float32)
    assert error_of(rows, plain(fitted(rows))) < 0.95 * error_of(rows, rounded(rows))


def test_weights_of_few_values_come_out_as_they_were() -> None:
    rows = np.zeros((4, N_IN), np.float32)
    rows[1], rows[2], rows[3, ::2] = -0.5, 0.25, 1.5
    np.testing.assert_allclose(plain(fitted(rows)), rows, atol=2e-3)


def test_bytes_do_not_depend_on_threads_levels_or_how_numbers_are_stored() -> None:
    rows = np.random.default_rng(1).normal(size=(200, N_IN)).astype(np.float32)
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    rows = (bits.astype(np.uint32) << 16).view(np.float32)
    first = fitted(rows)
    assert np.array_equal(fitted(bits, Dtype.bfloat16), first)
    assert np.array_equal(np.concatenate([fitted(rows[i : i + 1]) for i in range(200)]), first)
    assert first.tobytes()[:16].hex() == SEEN


SEEN = "611daf29bcefebfffea5f3b70f59fbe4"
"""The first block's scales and minima, as one machine made them."""


def test_a_block_with_a_number_that_is_none_is_none_and_no_other() -> None:
    rows = np.ones((2, N_IN), np.float32)
    rows[1, 300] = np.inf
    found = plain(fitted(rows))
    assert np.isnan(found[1, 256:]).all()
    assert np.isfinite(found[0]).all() and np.isfinite(found[1, :256]).all()

"""Floats of 8 bits in NumPy, which has no such types: see :class:`kvcellar.kv_dtype.ByteFloat`.

A byte is a sign, an exponent and a fraction: 2 to the (exponent - bias) times (1 + fraction), or 2
to the (1 - bias) times the fraction where the exponent is 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.kv_dtype import ByteFloat

_NAN = 0x7F


@lru_cache
def _magnitudes(form: ByteFloat) -> NDArray[np.float32]:
    """Return the values of the bytes from 0 on, ascending: all numbers that are not negative."""
    byte = np.arange(_NAN)
    n_fractions = 1 << form.n_fraction
    exponent, fraction = byte // n_fractions, byte % n_fractions / n_fractions
    normal = np.ldexp(1 + fraction, exponent - form.bias)
    found = np.where(exponent == 0, np.ldexp(fraction, 1 - form.bias), normal)
    return found[found <= form.most].astype(np.float32)


@lru_cache
def _values(form: ByteFloat) -> NDArray[np.float32]:
    """Return the values of all bytes."""
    half = np.full(128, np.nan, np.float32)
    magnitudes = _magnitudes(form)
    half[: len(magnitudes)] = magnitudes
    return np.concatenate([half, -half])


def to_bytes(values: NDArray[Any], form: ByteFloat) -> NDArray[np.uint8]:
    """Round numbers to bytes, same shape. What is too large becomes the largest, NaN stays NaN."""
    numbers, magnitudes = np.asarray(values, np.float32), _magnitudes(form)
    size = np.abs(np.nan_to_num(numbers, nan=0.0))
    above = np.searchsorted(magnitudes, size).clip(1, len(magnitudes) - 1)
    middle = (magnitudes[above - 1] + magnitudes[above]) / 2  # exact: it has a bit more
    is_up = (size > middle) | ((size == middle) & (above % 2 == 0))
    found = np.where(is_up, above, above - 1)
    found = np.where(np.isnan(numbers), _NAN, found) | np.where(np.signbit(numbers), 0x80, 0)
    return found.astype(np.uint8)


def from_bytes(stored: NDArray[np.uint8], form: ByteFloat) -> NDArray[np.float32]:
    """Return the exact float32 values of bytes, same shape."""
    return _values(form)[stored]

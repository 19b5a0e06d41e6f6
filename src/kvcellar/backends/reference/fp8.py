"""Floats of 8 bits in NumPy, which has no such type: E4M3, see :mod:`kvcellar.kv_dtype`.

A byte is a sign, 4 bits of an exponent and 3 of a fraction: 2 to the (exponent - 7) times
(1 + fraction / 8), or fraction / 512 where the exponent is 0. All ones behind the sign are NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAN = 0x7F


def _magnitudes() -> NDArray[np.float32]:
    byte = np.arange(_NAN)
    exponent, fraction = byte >> 3, byte & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    return np.where(exponent == 0, fraction / 512, normal).astype(np.float32)


_MAGNITUDES = _magnitudes()
"""Values of the bytes 0 to 126, ascending: all numbers of fp8 that are not negative."""

_VALUES = np.concatenate([_MAGNITUDES, [np.nan], -_MAGNITUDES, [np.nan]]).astype(np.float32)


def to_fp8(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Round numbers to fp8: its bytes, same shape. What is too large becomes the largest."""
    numbers = np.asarray(values, np.float32)
    size = np.abs(np.nan_to_num(numbers, nan=0.0))
    above = np.searchsorted(_MAGNITUDES, size).clip(1, _NAN - 1)
    middle = (_MAGNITUDES[above - 1] + _MAGNITUDES[above]) / 2  # exact: 5 bits of a fraction
    is_up = (size > middle) | ((size == middle) & (above % 2 == 0))
    found = np.where(is_up, above, above - 1)
    found = np.where(np.isnan(numbers), _NAN, found) | np.where(np.signbit(numbers), 0x80, 0)
    return found.astype(np.uint8)


def from_fp8(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the exact float32 values of bytes of fp8, same shape."""
    return _VALUES[stored]

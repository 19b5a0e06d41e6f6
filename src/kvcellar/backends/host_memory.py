"""Main memory for what goes to a device and comes back: whoever loads models says from where.

A device copies straight from memory that the system has promised not to move (pinned memory),
several times as fast as from other memory. Only its runtime can have that, so the store, which
keeps rows in main memory, asks here, and a backend has said who gives.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class HostMemory(Protocol):
    """Protocol of whoever gives main memory."""

    def empty(self, n_bytes: int) -> Bytes:
        """Return so many bytes of any value; they are free when no array refers to them."""
        ...


class PlainMemory:
    """Memory as NumPy has it."""

    def empty(self, n_bytes: int) -> Bytes:
        """Return bytes; see :class:`HostMemory`."""
        return np.empty(n_bytes, np.uint8)


_given: HostMemory = PlainMemory()


def host_memory() -> HostMemory:
    """Return whoever gives memory now."""
    return _given


def use_host_memory(memory: HostMemory) -> None:
    """Have memory come from somewhere else from now on."""
    global _given
    _given = memory


def empty_bytes(n_bytes: int) -> Bytes:
    """Return so many bytes of any value, of memory that devices copy from where there is some."""
    return _given.empty(n_bytes)


def empty_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array of any values in such memory."""
    kind = np.dtype(dtype)
    n_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    found: NDArray[Any] = empty_bytes(n_bytes).view(kind).reshape(shape)
    return found

"""Main memory for what goes to a device and comes back: whoever loads models says from where.

A device copies straight from memory that the system has promised not to move (pinned memory),
several times as fast as from other memory. Only its runtime can have that, so the store, which
keeps rows in main memory, asks here, and a backend has said who gives. What a device copies there
comes later than the call that asks for it: an arrival says when.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.large_pages import private_map

Bytes = NDArray[np.uint8]
Array = NDArray[Any]

LEAST_MAPPED = 64 << 10
"""Bytes from which on a piece is the system's own: below, its last page would be much of it."""

HEADROOM = 32 << 10
"""Bytes before rows that come to main memory: a file's header goes there, and they stay in place.
"""


class HostMemory(Protocol):
    """Protocol of whoever gives main memory."""

    def empty(self, n_bytes: int) -> Bytes:
        """Return so many bytes of any value; they are free when no array refers to them."""
        ...


class Arrival(Protocol):
    """Protocol of bytes on their way to main memory; nobody reads or frees them before."""

    def wait(self) -> None:
        """Return when they are there. For any thread; may be called again."""
        ...

    @property
    def took_s(self) -> float | None:
        """Seconds that it took; 0.0: the call has waited for it. None: they are not there yet."""
        ...


class _There:
    """Bytes that are there already."""

    took_s = 0.0

    def wait(self) -> None:
        """Return at once."""


THERE: Arrival = _There()
"""Arrival of what was copied before the call that asked for it returned."""


class Landing(NamedTuple):
    """Time and place at which rows come to main memory.

    Attributes:
        arrival: of the rows.
        memory: the piece that ``empty_arrays`` has made for them; whoever has the rows may write
            to its headroom. None: they lie elsewhere.
    """

    arrival: Arrival = THERE
    memory: Bytes | None = None


class PlainMemory:
    """Memory as NumPy has it, and large pieces from the system.

    Pieces of the store live long and go in any order. C's allocator keeps what is freed between
    those that are left: after some minutes of a busy server, a fifth of what they take themselves.
    """

    def empty(self, n_bytes: int) -> Bytes:
        """Return bytes; see :class:`HostMemory`."""
        if n_bytes < LEAST_MAPPED:
            return np.empty(n_bytes, np.uint8)
        return np.frombuffer(private_map(n_bytes), np.uint8)


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


def empty_arrays(shapes: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[list[Array], Bytes]:
    """Return arrays of shapes and types in one piece of such memory, and the piece.

    Behind ``HEADROOM`` bytes they lie as a file of the store has them: larger types first.
    """
    kinds = [np.dtype(kind) for _, kind in shapes]
    sizes = [
        math.prod(shape) * kind.itemsize for (shape, _), kind in zip(shapes, kinds, strict=True)
    ]
    memory, at = empty_bytes(HEADROOM + sum(sizes)), HEADROOM
    found: list[Array] = [memory] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -kinds[i].itemsize):
        found[i] = memory[at : at + sizes[i]].view(kinds[i]).reshape(shapes[i][0])
        at += sizes[i]
    return found, memory


def give_back() -> None:
    """Have the system take the memory back that was freed between pieces that are still in use.

    C's allocator keeps it: a gigabyte, after a 1B model was packed into 1.3 of 8 bits; a hundred
    megabytes, after the vocabulary of a Gemma was made. Where it has no such call, nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)

"""Memory in large pages, where the system has them, for what is read whole in every step.

Pages of 4 KiB cost a look-up each, and the machine's own fetching ahead ends with each of them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np

LARGE_PAGE = 2 << 20
"""Bytes of a large page on x86; where they are larger or smaller this costs nothing."""

LINE = 64
"""Bytes of a cache line."""

CHUNK = 64 << 20
"""Bytes that are mapped at a time where many arrays lie one behind the other."""


def private_map(n_bytes: int) -> mmap.mmap:
    """Map memory of this process alone, which goes back to the system with the last reference."""
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def mapped(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Map memory in large pages, which the system gives when they are first written to.

    Returns:
        The memory, and the offset of its first large page: ``n_bytes`` lie from there on.
    """
    memory = private_map(n_bytes + LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8, count=1).ctypes.data
    return memory, -address % LARGE_PAGE

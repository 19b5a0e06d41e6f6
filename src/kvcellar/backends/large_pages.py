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


def mapped(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Map memory in large pages, which the system gives when they are first written to.

    Returns:
        The memory, and the offset of its first large page: ``n_bytes`` lie from there on.
    """
    if sys.platform == "win32":
        memory = mmap.mmap(-1, n_bytes + LARGE_PAGE)
    else:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, n_bytes + LARGE_PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8, count=1).ctypes.data
    return memory, -address % LARGE_PAGE

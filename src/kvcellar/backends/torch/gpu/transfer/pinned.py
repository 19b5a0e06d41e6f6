"""Pinned main memory in slabs, given out in pieces: CUDA copies from it without the processor.

To pin memory takes longer than to copy it, so slabs stay, and pieces of equal size take turns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from kvcellar.backends.host_memory import Bytes, host_memory, use_host_memory
from kvcellar.budget import machine_bytes

SLAB = 64 << 20
"""Bytes that are pinned together."""

LEAST = 64 << 10
"""Bytes below which memory is not worth pinning."""

SHARE = 4
"""Pinned memory takes one part in so many of the machine's at most: the system cannot move it."""

AHEAD = 4 * SLAB
"""Bytes that are pinned before the first rows come, in a quarter of a second at most."""

_ALIGNED = 4096


class PinnedMemory:
    """Pieces of pinned slabs; others where none is left. For any thread.

    Always holds: a piece is given to nobody while an array of it is alive.
    """

    def __init__(self, most_bytes: int, pin: Callable[[int], Bytes]) -> None:
        """Pin nothing yet.

        Args:
            most_bytes: that are pinned.
            pin: gives so many pinned bytes, for good.
        """
        self._most, self._pin = most_bytes, pin
        self._free: dict[int, list[Bytes]] = {}
        self._rest = np.empty(0, np.uint8)
        self._slabs: list[Bytes] = []
        self._lock = threading.RLock()  # arrays may be collected while it is held
        self.size_bytes = 0
        """Bytes that are pinned."""

    def empty(self, n_bytes: int) -> Bytes:
        """Return so many bytes, pinned where they are many and there is room."""
        piece = self._piece(_rounded(n_bytes)) if n_bytes >= LEAST else None
        if piece is None:
            return np.empty(n_bytes, np.uint8)
        given = np.frombuffer(piece.data, np.uint8)[:n_bytes]
        assert given.base is not None, "a view refers to what it is a view of"
        weakref.finalize(given.base, self._give_back, piece).atexit = False
        return given

    def _piece(self, size: int) -> Bytes | None:
        """Return a piece of a size; None: no more may be pinned."""
        with self._lock:
            pieces = self._free.get(size)
            if pieces:
                return pieces.pop()
            if size > len(self._rest):
                found = self._slabs.pop() if self._slabs and size <= SLAB else None
                found = self._slab(max(SLAB, size)) if found is None else found
                if found is None:
                    return None
                self._rest = found
            piece, self._rest = self._rest[:size], self._rest[size:]
            return piece

    def _slab(self, size: int) -> Bytes | None:
        """Pin a slab; None: no more may be pinned."""
        if self.size_bytes + size > self._most:
            return None
        try:
            found = self._pin(size)
        except RuntimeError:  # the system promises no more
            self._most = self.size_bytes
            return None
        self.size_bytes += size
        return found

    def pin_ahead(self, n_bytes: int) -> None:
        """Have so many bytes pinned in all, as far as they may be."""
        with self._lock:
            while self.size_bytes < n_bytes and (slab := self._slab(SLAB)) is not None:
                self._slabs.append(slab)

    def _give_back(self, piece: Bytes) -> None:
        with self._lock:
            self._free.setdefault(len(piece), []).append(piece)


def _rounded(n_bytes: int) -> int:
    """Round a size up by an eighth at most, so that few sizes come."""
    step = max(_ALIGNED, (1 << (n_bytes - 1).bit_length()) // 16)
    return -(-n_bytes // step) * step


def use_pinned_memory() -> None:
    """Have what goes to cards lie in memory that CUDA has pinned; once for a process."""
    if not isinstance(host_memory(), PinnedMemory):
        use_host_memory(PinnedMemory(machine_bytes() // SHARE, _pin))


def pin_ahead() -> None:
    """Pin memory for the first rows, where it is pinned at all: pinning takes long."""
    memory = host_memory()
    if isinstance(memory, PinnedMemory):
        memory.pin_ahead(AHEAD)


def _pin(n_bytes: int) -> Bytes:
    with torch.inference_mode(False):  # it outlives any inference_mode block
        slab: Bytes = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return slab

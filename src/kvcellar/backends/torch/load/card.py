"""Memory of a card that CUDA drives: what there is, what this process has of it, and a bound."""

from __future__ import annotations

from typing import Any

import torch

CONTEXT_BYTES = 600 << 20
"""About what CUDA, its libraries and compiled kernels take, which torch does not count."""


class CardMemory:
    """Memory of one card; a :class:`~kvcellar.models.loading.DeviceMemory`."""

    def __init__(self, device: torch.device, module: Any = torch.cuda) -> None:
        """Look at a card; ``module`` is ``torch.cuda``, or what has its functions."""
        self._module = module
        self._index = module.current_device() if device.index is None else device.index
        self.total_bytes = int(module.mem_get_info(self._index)[1])

    @property
    def held_bytes(self) -> int:
        """Bytes that this process holds now: torch's, and about those of CUDA."""
        return CONTEXT_BYTES + int(self._module.memory_reserved(self._index))

    def bound(self, limit_bytes: int) -> None:
        """Have allocations beyond a limit of this process fail, in torch's own way."""
        own = max(0, limit_bytes - CONTEXT_BYTES)
        self._module.set_per_process_memory_fraction(min(1.0, own / self.total_bytes), self._index)


def card_memory(device: Any) -> CardMemory | None:
    """Return the memory of a card; None where a device has none of its own, or is not there."""
    try:
        where = torch.device(device)
        return CardMemory(where) if where.type == "cuda" else None
    except (RuntimeError, AssertionError):
        return None

"""Devices that record work once and play it again, and CUDA's way to do that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_ONE = threading.Lock()
"""Held while a graph is recorded: CUDA records one at a time in a process."""


class Graph(Protocol):
    """Protocol of recorded work, over the addresses that it was recorded with."""

    def replay(self) -> None:
        """Do the work again, behind all that the current stream has been given."""
        ...


class GraphDevice(Protocol):
    """Protocol of a device that records work.

    Attributes:
        size_bytes: memory of all that was recorded since ``forget``.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes that the recorded work holds."""
        ...

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        """Do some work where it is going to be recorded: compilers and libraries get ready."""
        ...

    def capture(self, call: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record the work of a call, and return it with the tensor that each replay fills.

        Raises:
            Exception: something in it cannot be recorded.
        """
        ...

    def forget(self) -> None:
        """Let the memory of all graphs go, which nobody has any more."""
        ...


class CudaGraphs:
    """A CUDA or ROCm card that records graphs, all of them over one pool of memory.

    What a graph needs between its input and its result is gone when it has been played, so the
    graphs take turns in that memory; they are played one at a time, in one stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Take a side stream of a device; nothing is recorded yet."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def size_bytes(self) -> int:
        """Bytes that torch has reserved for the graphs; the driver's own are not told."""
        found = torch.cuda.memory_snapshot(self._pool)
        return sum(int(segment["total_size"]) for segment in found)

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        """Do work on the side stream, and have the current one wait; see :class:`GraphDevice`."""
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                call()
            here.wait_stream(self._stream)

    def capture(self, call: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record work of this thread on the side stream; see :class:`GraphDevice`."""
        graph = torch.cuda.CUDAGraph()
        with _ONE, torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    out = call()
            finally:
                torch.cuda.set_stream(here)  # torch stays on the side stream where it failed
        return graph, out

    def forget(self) -> None:
        """Begin another pool: torch frees one that no graph uses."""
        self._pool = torch.cuda.graph_pool_handle()

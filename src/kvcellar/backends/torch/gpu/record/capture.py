"""Devices that record work once and play it again, and CUDA's way to do that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvcellar.backends.torch.gpu.attend.plans import Ints, rounded_up

R = TypeVar("R")

MOST_DRIVER_BYTES = 64 << 20
"""Most bytes that one graph is counted with for the driver: beyond it another program took them."""

PRIORITY = -1
"""CUDA priority of recorded steps: above other streams, which have 0; lower numbers go first."""


class Graph(Protocol):
    """Protocol of recorded work, over the addresses that it was recorded with.

    Attributes:
        driver_bytes: memory that the device's driver holds for it.
    """

    @property
    def driver_bytes(self) -> int:
        """Bytes that the driver holds for the graph."""
        ...

    def replay(self) -> None:
        """Do the work again, behind all that the current stream has been given."""
        ...


class GraphDevice(Protocol):
    """Protocol of a device that records work.

    Attributes:
        size_bytes: memory of all that was recorded since ``forget``, without the driver's.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes that the recorded work holds."""
        ...

    def send(self, numbers: Ints, to: Tensor) -> None:
        """Copy integers ``[n]`` to the device, behind all work so far; they may change at once."""
        ...

    def warm_up(self, call: Callable[[], object]) -> None:
        """Do some work where it is going to be recorded: compilers and libraries get ready."""
        ...

    def capture(self, call: Callable[[], R]) -> tuple[Graph, R]:
        """Record the work of a call, and return it with the tensors that each replay fills.

        Raises:
            Exception: something in it cannot be recorded.
        """
        ...

    def forget(self) -> None:
        """Let the memory of all graphs go, which nobody has any more."""
        ...


class CudaGraph:
    """A graph of CUDA's, with the memory that its driver took for it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, driver_bytes: int) -> None:
        """Hold a graph that was recorded."""
        self._graph, self.driver_bytes = graph, driver_bytes

    def replay(self) -> None:
        """Do the work again; see :class:`Graph`."""
        self._graph.replay()


class CudaGraphs:
    """A CUDA or ROCm card that records graphs, all of them over one pool of memory.

    What a graph needs between its input and its result is gone when it has been played, so the
    graphs take turns in that memory; they are played one at a time, in one stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Take a side stream of a device; nothing is recorded yet."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=PRIORITY)
        self._pool = torch.cuda.graph_pool_handle()
        self._staging = torch.empty(0, dtype=torch.int32)
        self._is_sent: torch.cuda.Event | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that torch has reserved for the graphs."""
        found = torch.cuda.memory_snapshot(self._pool)
        return sum(int(segment["total_size"]) for segment in found)

    def send(self, numbers: Ints, to: Tensor) -> None:
        """Copy integers by way of pinned memory, which is written to once it was read."""
        if self._is_sent is not None:
            self._is_sent.synchronize()
        n = len(numbers)
        if n > len(self._staging):
            with torch.inference_mode(False):  # it outlives any inference_mode block
                self._staging = torch.empty(rounded_up(n), dtype=torch.int32, pin_memory=True)
        self._staging[:n].numpy()[:] = numbers
        to.copy_(self._staging[:n], non_blocking=True)
        self._is_sent = torch.cuda.Event()
        self._is_sent.record(torch.cuda.current_stream(self._device))

    def warm_up(self, call: Callable[[], object]) -> None:
        """Do work on the side stream, and have the current one wait; see :class:`GraphDevice`."""
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                call()
            here.wait_stream(self._stream)

    def capture(self, call: Callable[[], R]) -> tuple[CudaGraph, R]:
        """Record work of this thread on the side stream; see :class:`GraphDevice`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            here, before = torch.cuda.current_stream(), self._of_driver()
            try:
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    out = call()
            finally:
                torch.cuda.set_stream(here)  # torch stays on the side stream where it failed
            of_driver = max(0, self._of_driver() - before)
        return CudaGraph(graph, min(of_driver, MOST_DRIVER_BYTES)), out

    def forget(self) -> None:
        """Begin another pool: torch frees one that no graph uses."""
        self._pool = torch.cuda.graph_pool_handle()

    def _of_driver(self) -> int:
        """Return the bytes of the card that are taken and are not torch's."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

"""A stream beside the one that computes steps: for copies to and from main memory, for pictures.

It has the least priority that CUDA knows, 0, as torch's default stream has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from kvcellar.backends.torch.gpu.attend.launch import on_device

Held = deque[tuple[Any, tuple[Any, ...]]]

RECORDING = threading.Lock()
"""Held while a graph is recorded in this process, and while another thread works beside the steps.

While torch records a graph it gives no kept memory back to the card, for any thread: an allocation
that needed it ends, and so does a call that asks for it.
"""


class Landed:
    """Work of a side stream that ends; an :class:`~kvcellar.backends.host_memory.Arrival`."""

    def __init__(self, begun: Any, done: Any, seconds: float | None) -> None:
        """Take the events at both ends; ``seconds`` where it was over before it was asked for."""
        self._begun, self._done, self._seconds = begun, done, seconds

    def wait(self) -> None:
        """Return when the work is done."""
        self._done.synchronize()

    @property
    def took_s(self) -> float | None:
        """Seconds that it took; None: it is not done yet."""
        if self._seconds is None and self._done.query():
            self._seconds = self._begun.elapsed_time(self._done) / 1e3
        return self._seconds


class SideStream:
    """Work beside what a device computes: neither waits for the other where nobody says so.

    What the work needs is held until it is done.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Take a stream of a device; ``module`` is ``torch.cuda``, or what has its functions."""
        self._device = device
        self._is_cpu = device.type == "cpu" and module is None
        self._module = torch.get_device_module(device) if module is None else module
        self._stream = self._module.Stream(device)
        self._held: Held = deque()
        self._began = 0.0
        finalize(self, _drain, self._held).atexit = False  # nothing is freed that is used

    @contextmanager
    def work(self) -> Iterator[Any]:
        """Give work in a block to the side stream; enter with an event: what was computed so far.

        The stream waits for that when it is told so.
        """
        self.let_go()
        with on_device(self._device):
            before = self._module.Event()
            before.record(self._module.current_stream())
            with self._module.stream(self._stream):
                yield before

    def wait(self, event: Any) -> None:
        """Have the side stream wait for an event, in ``work``."""
        self._stream.wait_event(event)

    def begin(self) -> Any:
        """Return an event from which time is counted, in ``work``."""
        self._began = time.perf_counter()
        return self._marked(is_timed=True)

    def mark(self) -> Any:
        """Return an event at all that the side stream has been given by now, in ``work``."""
        return self._marked(is_timed=False)

    def end(self, begun: Any, *held: Any) -> Landed:
        """Return the end of work since ``begun``, in ``work``; things are held until then."""
        done = self._marked(is_timed=True)
        self._held.append((done, held))
        return Landed(begun, done, time.perf_counter() - self._began if self._is_cpu else None)

    def make_wait(self, event: Any) -> None:
        """Have what is computed from now on wait for an event of the side stream."""
        with on_device(self._device):
            self._module.current_stream().wait_event(event)

    def lend(self, done: Any, tensors: Sequence[Tensor]) -> None:
        """Have what is computed from now on wait for an event, and read tensors made before it.

        Their memory, the side stream's, goes to nobody else before that has been computed.
        """
        self.make_wait(done)
        if not self._is_cpu:
            with on_device(self._device):
                for tensor in tensors:
                    tensor.record_stream(self._module.current_stream())

    def sent(self, array: Any) -> Tensor:
        """Return a copy of a small array on the device, in ``work``; the array may change then."""
        host = torch.from_numpy(array.copy())
        host = host if self._device.type == "cpu" else host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def let_go(self) -> None:
        """Let go of what done work has needed."""
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def _marked(self, *, is_timed: bool) -> Any:
        has_time = is_timed and not self._is_cpu  # torch's events of a CPU have none
        event = self._module.Event(**({"enable_timing": True} if has_time else {}))
        event.record(self._stream)
        return event


def _drain(held: Held) -> None:
    """Wait for all work that is not done."""
    for done, _ in held:
        done.synchronize()

"""A stream for copies between a card and main memory, beside the stream that computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.backends.torch.gpu.launch import on_device
from kvcellar.backends.torch.gpu.pinned import LEAST

Arrays = Sequence[NDArray[Any]]

_SAME = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32),
         8: (np.int64, torch.int64)}  # fmt: skip
"""Types in which arrays of numbers of so many bytes are copied."""


class SideStream:
    """Copies to and from a device that computation waits for, and that wait for little of it.

    What is sent is on its way while the device computes; what was launched after ``sent`` finds it
    there. Arrays are held until they were read.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Take a stream of a device; ``module`` is ``torch.cuda``, or what has its functions."""
        self._device = device
        self._module = torch.get_device_module(device) if module is None else module
        self._stream = self._module.Stream(device)
        self._held: deque[tuple[Any, list[Any]]] = deque()

    def sent(self, arrays: Arrays) -> list[Tensor]:
        """Return copies of arrays on the device, in whole numbers of as many bytes.

        They are there for whatever the current stream is given from now on.
        """
        self._let_go()
        hosts = [self._host(array) for array in arrays]
        with on_device(self._device):
            here = self._module.current_stream()
            with self._module.stream(self._stream):
                copies = [host.to(self._device, non_blocking=True) for host in hosts]
                done = self._module.Event()
                done.record(self._stream)
            here.wait_event(done)
            for one in copies:
                _used_by(one, here)
        self._held.append((done, hosts))
        return copies

    def fetch(self, tensors: Sequence[Tensor], arrays: Arrays) -> None:
        """Fill arrays with tensors that the current stream computes, and wait for that."""
        with on_device(self._device):
            ready = self._module.Event()
            ready.record(self._module.current_stream())
            with self._module.stream(self._stream):
                self._stream.wait_event(ready)
                for tensor, array in zip(tensors, arrays, strict=True):
                    assert array.flags.c_contiguous, "else a copy of it would be filled"
                    _as_tensor(array).copy_(tensor, non_blocking=True)
                    _used_by(tensor, self._stream)
                done = self._module.Event()
                done.record(self._stream)
            done.synchronize()

    def _host(self, array: NDArray[Any]) -> Tensor:
        """Return an array that the device can read without waiting, where it is a small one."""
        host = _as_tensor(array)
        return host.pin_memory() if array.nbytes < LEAST and self._device.type != "cpu" else host

    def _let_go(self) -> None:
        """Let go of the arrays that were read."""
        while self._held and self._held[0][0].query():
            self._held.popleft()


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor over the same memory, in whole numbers."""
    kind, _ = _SAME[array.dtype.itemsize]
    plain = np.ascontiguousarray(array)
    return torch.from_numpy(plain.view(kind) if plain.flags.writeable else plain.copy().view(kind))


def _used_by(tensor: Tensor, stream: Any) -> None:
    """Have a tensor's memory go to nobody else before a stream is through with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)

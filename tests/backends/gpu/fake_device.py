"""A device that records Python calls: graphs, and what is sent there, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class FakeGraph:
    """A recorded call. It holds the tensors of its moment, as a graph holds addresses."""

    def __init__(self, device: FakeDevice, call: Callable[[], Any], out: Sequence[Any]) -> None:
        self.device, self.call, self.out = device, call, out
        self.driver_bytes = device.driver_bytes

    def replay(self) -> None:
        self.device.n_played += 1
        for to, value in zip(self.out, self.call(), strict=True):
            to.copy_(value)


class FakeDevice:
    """Records calls; a graph's results have no values before it was played."""

    def __init__(self) -> None:
        self.n_warm = self.n_captured = self.n_played = self.n_forgotten = self.n_sent = 0
        self.size_bytes, self.driver_bytes = 0, 10
        self.error: Exception | None = None

    def send(self, numbers: Any, to: Any) -> None:
        self.n_sent += 1
        to.copy_(torch.from_numpy(numbers))

    def warm_up(self, call: Callable[[], Any]) -> None:
        self.n_warm += 1
        self.seen = call()

    def capture(self, call: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        if self.error is not None:
            raise self.error
        self.n_captured += 1
        self.size_bytes += 1000
        out = type(self.seen)(*(torch.full_like(value, torch.nan) for value in self.seen))
        return FakeGraph(self, call, out), out

    def forget(self) -> None:
        self.n_forgotten += 1
        self.size_bytes = 0

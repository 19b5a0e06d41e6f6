"""Streams of a card that is not there, which say of all that torch runs whether it came in order.

Whatever a thread runs is given to the stream that is current there. Numbers may be read in a stream
only where that stream has them before it by its own order or by events: what a thread has waited
for by itself does not count, nor that a CPU has been done long ago.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.behind: Counter[str] = Counter()
        """Stream -> how much of it this one is behind; its own too."""

    def wait_event(self, event: Event) -> None:
        self.behind |= event.behind


class Event:
    def __init__(self, card: OrderedCard) -> None:
        self.card, self.behind = card, Counter[str]()

    def record(self, stream: Stream) -> None:
        self.behind = stream.behind.copy()

    def synchronize(self) -> None:
        self.card.waited.append(threading.current_thread())


class OrderedCard:
    """Stands for ``torch.cuda`` on a CPU.

    Attributes:
        faults: what was read out of order, or run while a graph was recorded.
        crossed: how often each stream has read what another one made.
        waited: threads that waited for an event, in order.
        is_recording: a graph is recorded, and no other thread may run anything.
    """

    def __init__(self) -> None:
        self.steps = Stream("steps")
        self.faults: list[str] = []
        self.crossed: Counter[tuple[str, str]] = Counter()
        self.waited: list[threading.Thread] = []
        self.is_recording = False
        self._made: dict[int, tuple[Any, Stream, int]] = {}
        self._kept_for: set[tuple[int, str]] = set()
        self._current = threading.local()
        self._lock = threading.Lock()

    def Stream(self, device: Any) -> Stream:  # noqa: N802
        return Stream("side")

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", self.steps)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Watch what a thread runs in a block, in a stream."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            with _Watch(self):
                yield
        finally:
            self._current.stream = before

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._kept_for.add((tensor.untyped_storage()._cdata, stream.name))

    def ran(self, func: Any, given: list[Any], written: set[int], out: list[Any]) -> None:
        """Take note of what ran, in the current stream."""
        with self._lock:
            here = self.current_stream()
            if self.is_recording and here is not self.steps:
                self.faults.append(f"{func} in {here.name} while a graph is recorded")
            here.behind[here.name] += 1
            known = {storage._cdata for storage in given}
            for storage in given:
                maker, at = self._made.get(storage._cdata, (None, here, 0))[1:]
                if here.behind[maker.name] < at:
                    self.faults.append(f"{func} in {here.name} reads what {maker.name} may not be")
                self.crossed[here.name, maker.name] += maker is not here
                is_kept = (storage._cdata, here.name) in self._kept_for
                if (here.name, maker.name) == ("steps", "side") and not is_kept:
                    self.faults.append(f"{func} in {here.name} reads memory that may be freed")
            for storage in (*given, *out):
                if storage._cdata in written or storage._cdata not in known:
                    self._made[storage._cdata] = storage, here, here.behind[here.name]


class _Watch(TorchDispatchMode):
    def __init__(self, card: OrderedCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        named = dict(zip([one.name for one in func._schema.arguments], args, strict=False))
        named |= kwargs or {}
        written = {
            storage._cdata
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for storage in _storages(named.get(argument.name))
        }
        self._card.ran(func, _storages((args, kwargs)), written, _storages(out))
        return out


def _storages(value: Any) -> list[Any]:
    return [one.untyped_storage() for one in tree_leaves(value) if isinstance(one, torch.Tensor)]

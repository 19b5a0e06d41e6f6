"""Two streams of a card that is not there: what they are given is done later, in any order.

Copies that need not be waited for, and launches of ``copy_planes``, queue in the stream that is
current. Nothing is done before the host waits for an event, or ``finish``; then as much as may be
of the stream that is preferred comes first, so that an order which nobody has asked for shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Event:
    def __init__(self, card: DeferredCard, *, enable_timing: bool = False) -> None:
        self.card, self.is_done, self.has_time, self.name = card, False, enable_timing, "nothing"

    def record(self, stream: Stream) -> None:
        self.name = f"what {stream.name} so far"
        stream.give(lambda: setattr(self, "is_done", True))

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.card.log.append(f"the host waits for {self.name}")
        self.card.run(lambda: self.is_done)

    def elapsed_time(self, other: Event) -> float:
        assert self.has_time and other.has_time and self.is_done and other.is_done
        return 2000.0


class Stream:
    def __init__(self, card: DeferredCard, name: str) -> None:
        self.card, self.name = card, name
        self.queue: deque[Callable[[], None] | Event] = deque()

    def give(self, work: Callable[[], None] | Event) -> None:
        self.queue.append(work)

    def wait_event(self, event: Event) -> None:
        self.card.log.append(f"{self.name} waits for {event.name}")
        self.give(event)

    def advance(self) -> bool:
        """Do the first thing; false where there is none, or it waits."""
        if not self.queue:
            return False
        work = self.queue[0]
        if isinstance(work, Event):
            if not work.is_done:
                return False
        else:
            work()
        self.queue.popleft()
        return True

    def __enter__(self) -> None:
        self.before, self.card.now = self.card.now, self

    def __exit__(self, *error: object) -> None:
        self.card.now = self.before


class DeferredCard(TorchFunctionMode):
    """Stands for ``torch.cuda``, and defers what is given to it."""

    def __init__(self, kernel: Any, prefers: str = "copies") -> None:
        super().__init__()
        self.kernel, self.log = kernel, []
        self.n_launches = self.n_copies = 0
        self.now = self.computes = Stream(self, "computes")
        self.streams = [self.computes]
        self.prefers = prefers

    def Stream(self, device: Any) -> Stream:  # noqa: N802
        self.streams.append(Stream(self, "copies"))
        return self.streams[-1]

    def Event(self, **options: Any) -> Event:  # noqa: N802
        return Event(self, **options)

    def current_stream(self) -> Stream:
        return self.now

    def stream(self, stream: Stream) -> Stream:
        return stream

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self.n_launches += 1
            self.now.give(lambda: self.kernel[grid](*args, **named))

        return launch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            to, source = args
            self.n_copies += 1
            self.now.give(lambda: to.copy_(source))
            return to
        return func(*args, **kwargs)

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Do work, what is preferred first, until it is enough."""
        order = sorted(self.streams, key=lambda stream: stream.name != self.prefers)
        with torch._C.DisableTorchFunction():
            while not is_enough():
                assert any(stream.advance() for stream in order), "each waits for another"

    def finish(self) -> None:
        """Do all that is left."""
        self.run(lambda: not any(stream.queue for stream in self.streams))

"""Prefixes that clients asked to keep in the cache for a while. A pin is a wish: it gives way.

A pinned prefix is locked in the prefix index, so nothing evicts it before its time. Pins together
hold at most half of a cache; the one that ends first goes where more are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.agents import ModelHost
from kvcellar.engine import Engine, HeldPrefix
from kvcellar.errors import EngineClosedError
from kvcellar.history import History

SHARE = 0.5
"""Of a cache, the most that pins may hold."""


@dataclass(slots=True, eq=False)
class _Pin:
    host: ModelHost
    tokens: History
    held: HeldPrefix
    ends_s: float


class Pins:
    """All pins of a server. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a keeper of pins that has none."""
        self._clock = clock
        self._pins: list[_Pin] = []
        self._lock = threading.Lock()

    async def pin(self, host: ModelHost, tokens: History, ttl_s: float) -> int:
        """Keep what the cache holds of a history for so many seconds; how many tokens that is.

        A shorter pin of the same history ends; one of the same tokens lasts longer.
        """
        await self.sweep()
        host = host.reading(len(tokens))
        ends_s = self._clock() + ttl_s

        def lock(engine: Engine) -> int:
            held = engine.hold(tokens.tokens, host.space)
            limit = int(engine.cache.capacity * SHARE)
            if not held.n_tokens or held.n_tokens > limit:
                held.release()
                return 0
            with self._lock:
                ours = [pin for pin in self._pins if pin.host.engine is host.engine]
                mine = [pin for pin in ours if pin.host.space == host.space]
                gone = [pin for pin in mine if tokens.common_prefix(pin.tokens) == len(pin.tokens)]
                left = sorted((p for p in ours if p not in gone), key=lambda pin: pin.ends_s)
                while left and sum(p.held.n_tokens for p in left) + held.n_tokens > limit:
                    gone.append(left.pop(0))
                until = max([ends_s, *(p.ends_s for p in gone if len(p.tokens) == len(tokens))])
                self._pins = [pin for pin in self._pins if pin not in gone]
                self._pins.append(_Pin(host, tokens.prefix(held.n_tokens), held, until))
            for pin in gone:
                pin.held.release()
            return held.n_tokens

        with contextlib.suppress(EngineClosedError):
            return await asyncio.wrap_future(host.service.run(lock))
        return 0

    async def sweep(self) -> None:
        """Let go of pins whose time is over."""
        now = self._clock()
        with self._lock:
            over = [pin for pin in self._pins if pin.ends_s <= now]
            self._pins = [pin for pin in self._pins if pin.ends_s > now]
        for pin in over:
            await self._release(pin)

    def make_room(self, host: ModelHost, n_cells: int) -> None:
        """Let go of pins, the one that ends first at first, until so many cells can be had.

        It happens before whatever the engine is told next.
        """
        with self._lock:
            if not any(pin.host.engine is host.engine for pin in self._pins):
                return

        def give(engine: Engine) -> None:
            while engine.n_available < n_cells:
                with self._lock:
                    ours = [pin for pin in self._pins if pin.host.engine is host.engine]
                    if not ours:
                        return
                    first = min(ours, key=lambda pin: pin.ends_s)
                    self._pins.remove(first)
                first.held.release()

        with contextlib.suppress(EngineClosedError):
            host.service.run(give)

    def leave(self, host: ModelHost) -> None:
        """Forget the pins of a model that goes."""
        with self._lock:
            self._pins = [pin for pin in self._pins if pin.host.engine is not host.engine]

    @property
    def n_tokens(self) -> int:
        """Tokens that are pinned, each pin by itself."""
        with self._lock:
            return sum(pin.held.n_tokens for pin in self._pins)

    def __len__(self) -> int:
        """Return how many pins there are."""
        return len(self._pins)

    async def _release(self, pin: _Pin) -> None:
        with contextlib.suppress(EngineClosedError):
            await asyncio.wrap_future(pin.host.service.run(lambda _: pin.held.release()))

"""Models in memory: loaded when an agent needs them, unloaded when idle or for want of room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcellar.budget import format_size
from kvcellar.errors import ConfigError
from kvcellar.hosting.fair_lock import Gate
from kvcellar.pictures.shelf import PictureShelf

if TYPE_CHECKING:
    from kvcellar.hosting.host import ModelHost

log = logging.getLogger("kvcellar.agents")


@dataclass(slots=True, eq=False)
class _HostEntry:
    host: ModelHost
    n_users: int = 0
    used_s: float = 0.0


class ModelRegistry:
    """Registry of the models that are in memory. For callers on any event loop and thread.

    A model is loaded when somebody uses it. Where a budget has no room for it, idle models go, the
    least recently used first; where none is idle, it waits for one. Before a model goes, whoever
    has something in its cache is told.
    """

    def __init__(
        self,
        load: Callable[[str], ModelHost] | None = None,
        *,
        budget_bytes: int | None = None,
        idle_ttl_s: float | None = None,
        size_of: Callable[[str], int] | None = None,
        split: Callable[[str], tuple[str, str]] = lambda name: (name, ""),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a registry that has nothing loaded.

        Args:
            load: from a name to a running host; called in a thread of its own. None: ``open_host``.
            budget_bytes: what all hosts together may hold; None: no limit.
            idle_ttl_s: seconds without use after which a model goes; None: never.
            size_of: bytes of a model before it is loaded; None: what it had when it was loaded
                last, or nothing.
            split: from a name to that of a model and of an adapter beside it; empty: of none. One
                host is loaded for a model and all of its adapters.
            clock: seconds.
        """
        if idle_ttl_s is not None and not idle_ttl_s > 0:
            raise ConfigError(f"idle_ttl_s must be above 0 seconds, got {idle_ttl_s}")
        self._load = load or _open_host
        self.shelf = PictureShelf()
        """Pictures that all of the models find by name."""
        self._budget_bytes = budget_bytes
        self._size_of = size_of
        self._split = split
        self._clock = clock
        self._loaded: dict[str, _HostEntry] = {}
        self._sizes: dict[str, int] = {}
        self._before_unload: list[Callable[[ModelHost], None]] = []
        self._after_unload: list[Callable[[], None]] = []
        self._gate = Gate()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sweeper: threading.Thread | None = None
        if idle_ttl_s is not None:
            self._sweeper = threading.Thread(
                target=self._sweep, args=(idle_ttl_s,), name="kvcellar-models", daemon=True
            )
            self._sweeper.start()

    def after_unload(self, call: Callable[[], None]) -> None:
        """Have a function called when a host is gone and nothing here refers to it any more."""
        self._after_unload.append(call)

    def before_unload(self, call: Callable[[ModelHost], None]) -> None:
        """Have a function called with each host that is about to go, while it still runs."""
        self._before_unload.append(call)

    @property
    def names(self) -> list[str]:
        """The models that are in memory, without their adapters."""
        with self._lock:
            return list(self._loaded)

    def host(self, name: str) -> ModelHost | None:
        """Return the host of a model that is in memory; None where it is not. Load nothing."""
        model, adapter = self._split(name)
        with self._lock:
            entry = self._loaded.get(model)
        if entry is None or not adapter:
            return None if entry is None else entry.host
        return entry.host.adapters.get(adapter)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ModelHost]:
        """Lend the host of a model, loaded if need be, for as long as the block lasts.

        Raises:
            ModelError, BackendError, ConfigError: from loading; nothing was loaded.
            ConfigError: the budget cannot hold it even alone; nothing was unloaded.
        """
        model, adapter = self._split(name)
        entry = await self._enter(model)
        try:
            yield entry.host.adapters[adapter] if adapter else entry.host
        finally:
            with self._lock:
                entry.n_users -= 1
                entry.used_s = self._clock()

    async def release(self, name: str) -> bool:
        """Let go of a model that nobody uses; false where it is in use, or not in memory."""
        async with self._gate:
            return await asyncio.to_thread(self._unload, self._split(name)[0])

    def close(self) -> None:
        """Let go of all models, used or not, and of the thread that looks for idle ones."""
        self._stop.set()
        if self._sweeper is not None:
            self._sweeper.join()
        for name in self.names:
            self._unload(name, is_forced=True)

    async def _enter(self, name: str) -> _HostEntry:
        with self._lock:
            entry = self._loaded.get(name)
            if entry is not None:
                entry.n_users += 1
                return entry
        async with self._gate:
            with self._lock:
                entry = self._loaded.get(name)
                if entry is not None:
                    entry.n_users += 1
                    return entry
            await self._make_room(name)
            host = await self._load_in_thread(name)
            host.take_shelf(self.shelf)
            entry = _HostEntry(host, 1, self._clock())
            with self._lock:
                self._loaded[name] = entry
                self._sizes[name] = host.size_bytes
            return entry

    async def _load_in_thread(self, name: str) -> ModelHost:
        """Load a model; whoever stops waiting leaves none behind that nobody lets go of."""
        is_left = threading.Event()

        def load() -> ModelHost:
            host = self._load(name)
            if is_left.is_set():
                host.close()
            return host

        try:
            return await asyncio.to_thread(load)
        except asyncio.CancelledError:
            is_left.set()
            raise

    async def _make_room(self, name: str) -> None:
        if self._budget_bytes is None:
            return
        size = self._sizes.get(name, 0)
        if self._size_of is not None:  # which reads the model's config
            size = await asyncio.to_thread(self._size_of, name)
        if size > self._budget_bytes:
            raise ConfigError(
                f"model {name!r} needs {format_size(size)} and all models together may hold "
                f"{format_size(self._budget_bytes)}; give more, or a smaller capacity"
            )
        while True:
            with self._lock:
                held = sum(entry.host.size_bytes for entry in self._loaded.values())
                idle = [(e.used_s, n) for n, e in self._loaded.items() if not e.n_users]
            if held + size <= self._budget_bytes:
                return
            if idle:
                await asyncio.to_thread(self._unload, min(idle)[1])
            else:
                await asyncio.sleep(0.02)

    def _unload(self, name: str, *, is_forced: bool = False, idle_since: float = 0.0) -> bool:
        with self._lock:
            entry = self._loaded.get(name)
            if entry is None or (entry.n_users and not is_forced):
                return False
            if idle_since and entry.used_s > idle_since:
                return False
            del self._loaded[name]
        for call in self._before_unload:
            for host in (entry.host, *entry.host.adapters.values()):
                with contextlib.suppress(Exception):  # a store that is full must not keep it here
                    call(host)
        entry.host.close()
        del entry
        for told in self._after_unload:
            told()
        return True

    def _sweep(self, ttl_s: float) -> None:
        while not self._stop.wait(min(ttl_s / 4, 10.0)):
            since = self._clock() - ttl_s
            for name in self.names:
                try:
                    self._unload(name, idle_since=max(since, 1e-9))
                except Exception as error:  # the others are looked after all the same
                    log.error("model %r could not be let go of", name, exc_info=error)


def model_notes(host: ModelHost) -> tuple[str, ...]:
    """Say what a user of a model should know when it is loaded."""
    if host.template is None or host.template.is_prefix_stable:
        return ()
    return tuple(f"chat template of {host.name!r}: {found}" for found in host.template.findings)


def _open_host(name: str) -> ModelHost:
    """Load a model with all as by default."""
    from kvcellar.hosting.host import open_host

    return open_host(name)

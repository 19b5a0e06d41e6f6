"""A server on a free port, in this process, with uvicorn in a thread: what clients really meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx

from kvcellar.agents import ModelHost, open_host
from kvcellar.engine import EngineStats
from kvcellar.server.config import ServerConfig
from kvcellar.server.front.connections import Connections
from kvcellar.server.run import Server, listen
from kvcellar.server.state import models
from kvcellar.server.state.models import ServedModels
from kvcellar.server.state.service import Service
from kvcellar.store import Store, StoreConfig

T = TypeVar("T")

# Where a model comes or goes nothing is collected, and what the tests have frozen stays so: of all
# that a process of tests has loaded a collection takes a second.
models.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)

PATIENCE_S = 180.0
"""For whatever has to happen at some time; a test never depends on how soon."""


class Live:
    """A running server and its inside, for tests."""

    def __init__(
        self,
        url: str,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        connections: Connections,
    ) -> None:
        self.url = url
        self.service = service
        self.connections = connections
        self._loop = loop
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def get(self, path: str) -> Any:
        """A 200 as JSON."""
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """A success as JSON."""
        response = self.http.post(path, json=body, **more)
        assert response.is_success, response.text
        return response.json()

    def host(self) -> ModelHost:
        """The only model that is in memory; the default one where nothing was asked of any yet."""
        if hosts := self.service.models.hosts():
            (host,) = hosts
            return host

        async def loaded() -> ModelHost:
            async with self.service.models.registry.use(self.service.models.default) as host:
                return host

        return self.run(loaded())

    def engine(self) -> EngineStats:
        """The counts of that model's engine."""
        return self.host().service.run(lambda engine: engine.stats()).result(PATIENCE_S)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for what will be."""
        waited = threading.Event()
        for _ in range(int(PATIENCE_S / 0.02)):
            if is_so():
                return
            waited.wait(0.02)
        stats = self.engine()
        raise AssertionError(
            f"{what} did not come within {PATIENCE_S:g} s: {self.service.n_active} active, "
            f"{self.service.conversations._taken or 'no'} conversations taken, {stats}"
        )

    def is_still(self) -> bool:
        """True if nobody is being served, and no cell is under a sequence.

        Cells that a client asked to keep for some minutes are under none.
        """
        if not self.service.models.hosts():  # nothing was asked of it yet
            return self.service.n_active == 0
        stats = self.engine()
        return (
            self.service.n_active == 0
            and stats.running == stats.waiting == 0
            and stats.live_cells == stats.protected_tokens
            and not self.service.conversations._taken
        )


def load_demo(capacity: int = 4096, backend: str | None = None) -> Callable[[str, Any], ModelHost]:
    """Opens the bundled model in float32: greedy tokens do not depend on the batch."""

    def load(path: str, progress: Any) -> ModelHost:
        settings: Any = {"capacity": capacity, "dtype": "float32", "backend": backend}
        return open_host(path, progress=progress, **settings)

    return load


@contextmanager
def serving(
    folder: Path,
    *,
    load: Callable[[str, Any], ModelHost] | None = None,
    offered: dict[str, str] | None = None,
    models: dict[str, Any] | None = None,
    warm_bytes: int = 1 << 26,
    **config: Any,
) -> Iterator[Live]:
    """A server as a process of its own would have it; everything is closed at the end."""
    settings = ServerConfig(port=0, **config)
    with Store(folder, StoreConfig(warm_bytes=warm_bytes)) as store:
        served = ServedModels(offered or {"demo": "demo"}, load or load_demo(), **(models or {}))
        listener = listen(settings.host, 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        is_up = threading.Event()
        inside: list[Any] = []

        async def serve() -> None:
            service = Service(settings, store, served)
            server = Server(service)
            inside.extend((service, server, asyncio.get_running_loop()))
            is_up.set()
            await server.run_in_loop(listener)

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
        thread.start()
        assert is_up.wait(PATIENCE_S)
        service, server, loop = inside
        live = Live(url, service, loop, server.connections)
        try:
            yield live
        finally:
            live.http.close()
            loop.call_soon_threadsafe(server.stop)
            thread.join(PATIENCE_S)
            listener.close()
            assert not thread.is_alive(), "the server did not stop"

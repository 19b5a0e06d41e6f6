"""One replica: the server without its port, and an account of what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.types import Message

from kvcellar.agents import Hosting
from kvcellar.deploy.prefilling import Prefiller
from kvcellar.deploy.reading import HttpRequest, PromptReader
from kvcellar.deploy.routing import MOST_AGENTS, Report, Wanted, agent_hash, digest_of_models
from kvcellar.engine import Engine
from kvcellar.errors import EngineClosedError, EngineFailedError
from kvcellar.prefix import PrefixDigest, digest_of
from kvcellar.prefix.digest import MOST
from kvcellar.server.app import create_app
from kvcellar.server.config import ServerConfig
from kvcellar.server.run import MAX_WAITING, log_to_stderr
from kvcellar.server.state.models import ServedModels
from kvcellar.server.state.service import Service
from kvcellar.server.stream.streams import ended
from kvcellar.store import Store

HEADER = b"x-replica"
"""Names the replica that has answered; on a request, the one that is to answer."""

_AHEAD = 64
"""Messages of an answer that wait to be sent."""

_LEAVE_S = 5.0
"""Seconds in which an answer whose client has left ends by itself."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Everything that a replica is made of, as a value that travels.

    Attributes:
        config: policy of its server.
        hosting: how models are loaded.
        offered: names of models, and what the hosting takes for them; the first is the default.
        store: folder of its agents; with ``shared`` each replica has one of its own, beside it.
        shared: URL of a place that all replicas share, behind their folders; None: the folder is
            shared itself.
        idle_unload_s: seconds after which a model that nobody uses goes; None: never.
    """

    config: ServerConfig
    hosting: Hosting
    offered: Mapping[str, str]
    store: Path
    shared: str | None = None
    idle_unload_s: float | None = None

    def open_models(self) -> ServedModels:
        """Return the models that are offered; those that answer are loaded when they are used."""
        return ServedModels(
            self.offered,
            self.hosting.open,
            takes_any=self.config.takes_any_model,
            idle_ttl_s=self.idle_unload_s,
            context_of=self.hosting.context_of,
            **self.hosting.registry,
        )


class Replica:
    """The server's application with a store and models of its own, asked by values.

    Create it, ``start`` it on the event loop that asks it, and ``close`` it in a thread.
    """

    def __init__(self, spec: ReplicaSpec, name: str, place: str) -> None:
        """Open the store.

        Args:
            spec: of all replicas.
            name: that no other replica ever has.
            place: a name that no other replica has now; who comes after it has it again.

        Raises:
            StoreError: it cannot be used.
            ConfigError: the URL names no place that can be shared.
        """
        log_to_stderr()
        self.name = name
        self._place = place
        self._spec = spec
        folder = spec.store
        if spec.shared is not None:
            folder = folder.with_name(f"{folder.name}-{place}")
        self._store = Store(folder, spec.hosting.store, shared=spec.shared)
        self._served: OrderedDict[str, int] = OrderedDict()
        self._n_asked = 0
        self._reported: tuple[int, Report] | None = None
        self._revision = time.time_ns()  # that of a name's next replica is higher

    async def start(self) -> None:
        """Load the default model; from then on it answers.

        Raises:
            ModelError, BackendError, ConfigError: from loading.
        """
        waiting = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="kvcellar-waiting")
        asyncio.get_running_loop().set_default_executor(waiting)
        models = await asyncio.to_thread(self._spec.open_models)
        self.service = Service(self._spec.config, self._store, models)
        async with models.registry.use(models.default):
            pass
        self._app = create_app(self.service)
        self._reader = PromptReader(self.service)
        self._prefiller = Prefiller(self.service, self._place)

    async def answer(
        self, asked: HttpRequest, wanted: Wanted
    ) -> AsyncGenerator[list[Message], None]:
        """Answer a request: yield what the application sends, as it comes, in batches.

        Leaving the iteration ends the answer as a client does that leaves.
        """
        self._n_asked += 1
        if wanted.agent:
            self._served.pop(wanted.agent, None)
            self._served[wanted.agent] = int(time.time())
            while len(self._served) > MOST_AGENTS:
                self._served.popitem(last=False)
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(asked, gone, messages))
        try:
            is_over = False
            while not is_over:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                is_over = batch[-1] is None
                said = [message for message in batch if message is not None]
                if said:
                    yield said
            await task
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait({task}, timeout=_LEAVE_S)
            await ended(task)

    async def _run(
        self, asked: HttpRequest, gone: asyncio.Event, messages: asyncio.Queue[Message | None]
    ) -> None:
        sent = iter([{"type": "http.request", "body": asked.body, "more_body": False}])

        async def receive() -> Message:
            message = next(sent, None)
            if message is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (HEADER, self.name.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            if not gone.is_set():
                await messages.put(message)

        try:
            await self._app({**asked.scope}, receive, send)
        finally:
            if not gone.is_set():
                await messages.put(None)

    async def read(self, asked: HttpRequest) -> Wanted:
        """Return what a request wants, without answering it."""
        return await self._reader.read(asked)

    async def prepare(self, asked: HttpRequest) -> None:
        """Read the prompt of a request that another replica answers, as ``Prefiller.read``."""
        _, prompt = await self._reader.prompt(asked)
        if prompt is not None:
            await self._prefiller.read(*prompt)

    async def report(self) -> dict[str, Any]:
        """Return what this replica holds; the same as before where nobody has asked since."""
        n_asked = -1 if self.service.n_active else self._n_asked
        if self._reported is None or self._reported[0] != n_asked:
            self._revision += 1
            agents = [[agent_hash(agent), at] for agent, at in self._served.items()]
            of_models = digest_of_models(await self._digests(), self._revision)
            report = Report(of_models, np.array(agents, dtype=np.uint64).reshape(-1, 2))
            self._reported = n_asked, report
        return self._reported[1].to_stats()

    async def _digests(self) -> dict[str, PrefixDigest]:
        """Return a digest of each model's index; together they have at most so many hashes."""
        hosts = self.service.models.hosts()

        def digest(engine: Engine) -> PrefixDigest:
            return digest_of(engine.index, most=MOST // len(hosts))

        found: dict[str, PrefixDigest] = {}
        for host in hosts:
            with contextlib.suppress(EngineClosedError):
                found[host.name] = await host.between_steps(digest)
        return found

    def check_health(self) -> None:
        """Raise where it has to be started again.

        Raises:
            EngineFailedError: the engine of a model has stopped.
        """
        for host in self.service.models.hosts():
            if host.service.failure is not None:
                raise EngineFailedError(f"model {host.name!r}: {host.service.failure}")

    async def close(self) -> None:
        """End answers as a server that is stopped does, and save every agent."""
        self.service.begin_closing()
        self.service.end_answers()
        await asyncio.to_thread(self.service.close)
        await asyncio.to_thread(self._store.close)

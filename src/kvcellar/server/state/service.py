"""State that the routes share: the agents, the models, who is being served, and when to refuse."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Iterator, Sized
from typing import Any

from starlette.requests import Request

from kvcellar.agents import AgentManager, ModelHost, salt_of, without_salt
from kvcellar.engine import EngineStats, FinishEvent
from kvcellar.errors import DeadlineError, EngineClosedError
from kvcellar.grammar.grammars import Grammars
from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError, ContextExceeded
from kvcellar.server.state.conversations import Conversations
from kvcellar.server.state.fetching import Fetcher
from kvcellar.server.state.metrics import Metrics
from kvcellar.server.state.models import ServedModels
from kvcellar.server.state.picture_desk import PictureDesk
from kvcellar.server.state.pins import Pins
from kvcellar.server.state.signing import signer_of
from kvcellar.server.state.stored import StoredResponses
from kvcellar.server.state.stored_conversations import StoredConversations
from kvcellar.store import Store


class Service:
    """One server's state. Everything here runs on the server's event loop.

    Attributes:
        config: policy.
        store: of the agents; the caller's to close.
        models: the caller's to close, by ``close``.
        agents: all of them.
        conversations: whose turn a request is.
        grammars: what answers may be held to.
        pins: prefixes that clients asked to keep.
        metrics: what is counted.
        responses: those that are stored.
        signer: signs what models think.
        stored_conversations: those that clients keep here.
        pictures: reads those of requests.
        started_s: when it began, by ``time.monotonic``.
    """

    def __init__(self, config: ServerConfig, store: Store, models: ServedModels) -> None:
        """Create a service that serves nobody yet."""
        self.config = config
        self.store = store
        self.models = models
        self.agents = AgentManager(
            store,
            models.registry,
            default_model=models.default,
            rules=config.rules,
            control_tokens_in_text=config.control_tokens_in_text,
        )
        self.conversations = Conversations(self.agents, config.max_unnamed)
        self.grammars = Grammars(config.dialect)
        self.pins = Pins()
        self.metrics = Metrics()
        self.responses = StoredResponses(store)
        self.signer = signer_of(store.path, store.shared)
        self.stored_conversations = StoredConversations(store)
        self.pictures = PictureDesk(Fetcher(config.allowed_fetches))
        self.started_s = time.monotonic()
        self.is_closing = False
        self.is_ended = False
        self.closing = asyncio.Event()
        self._n_active = 0
        self._answering: list[asyncio.Task[Any]] = []
        self._kept: set[asyncio.Task[None]] = set()
        models.registry.before_unload(self.pins.leave)

    @property
    def n_active(self) -> int:
        """Generations that wait or run."""
        return self._n_active

    @contextlib.contextmanager
    def admitted(self, n: int = 1) -> Iterator[None]:
        """Count ``n`` generations for as long as the block lasts.

        Raises:
            ApiError: 429, there are too many; 503, the server is being stopped.
            EngineClosedError: ``end_answers`` ended what the block did.
        """
        if self.is_closing:
            raise ApiError(
                503,
                "the server is being stopped; try the next one",
                "shutting_down",
                retry_after_s=5,
            )
        limit = self.config.max_requests
        if self._n_active + n > limit:
            self.metrics.refused.labels("queue").inc()
            raise ApiError(
                429,
                f"{self._n_active} generations wait or run and {n} more would be above the limit "
                f"of {limit}; come back in a moment, or start the server with --max-requests",
                "queue_full",
                retry_after_s=1,
                details={"active": self._n_active, "limit": limit},
            )
        self._n_active += n
        self.metrics.active.set(self._n_active)
        task = asyncio.current_task()
        assert task is not None, "generations run on the server's loop"
        self._answering.append(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_ended:
                raise
            task.uncancel()  # it was not its caller who wanted it to end
            raise EngineClosedError(
                "the server is being stopped and this answer ends here; ask again when it is back"
            ) from None
        finally:
            self._answering.remove(task)
            self._n_active -= n
            self.metrics.active.set(self._n_active)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something to its end, whoever has asked for it and left."""
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def kept_is_done(self) -> None:
        """Wait for what ``keep`` was given; ``end_answers`` ends it."""
        await asyncio.gather(*self._kept, return_exceptions=True)

    def check_context(self, host: ModelHost, tokens: Sized) -> None:
        """Refuse a prompt that can never be answered, before anything is computed.

        Where the prompt fits, its answer may have fewer tokens than were asked for: it ends with
        ``length`` where the context does.

        Args:
            host: the model's.
            tokens: the whole prompt.

        Raises:
            ContextExceeded: 400, it is longer than the context.
        """
        if len(tokens) > host.context:
            self.metrics.refused.labels("context").inc()
            raise ContextExceeded(len(tokens), host.context, max_positions=host.max_positions)

    async def check_finish(self, host: ModelHost, finish: FinishEvent) -> None:
        """Refuse what has ended without having been answered.

        Raises:
            ApiError: 429, there was no room for it in time.
            EngineClosedError: the server is being stopped.
            Exception: what the engine says.
        """
        if isinstance(finish.error, DeadlineError):
            raise await self.no_room(host, finish.error)
        if finish.error is not None:
            raise finish.error
        if finish.reason == "cancelled" and not self.is_closing:
            raise ApiError(
                409,
                "this answer was stopped by another client; what it said is in the agent's history",
                "answer_stopped",
            )
        if finish.reason not in ("stop", "length"):
            raise EngineClosedError("the server is being stopped; ask the next one")

    async def no_room(self, host: ModelHost, error: Exception) -> ApiError:
        """Say what it would take for a request to fit that waited too long for its cells."""
        stats = await self.stats_of(host)
        holders = [
            {"agent": without_salt(info.agent_id), "tokens": info.n_tokens}
            for info in await self.agents.directory.listed()
            if info.model == host.name and info.state == "generating"
            if salt_of(info.agent_id) == host.space.salt
        ]
        free = stats.free_cells if stats else 0
        evictable = stats.evictable_cells if stats else 0
        named = ", ".join(f"{h['agent']} ({h['tokens']} tokens)" for h in holders[:5])
        self.metrics.refused.labels("wait").inc()
        return ApiError(
            429,
            f"{error}; now {free} cells are free and {evictable} evictable; first would have to "
            f"end: {named or 'what runs without an agent'}",
            "no_room_in_time",
            retry_after_s=5,
            details={"available": free + evictable, "holders": holders},
        )

    async def stats_of(self, host: ModelHost) -> EngineStats | None:
        """Return the counts of a host's engine; None where it has just gone."""
        try:
            return await host.service.stats()
        except EngineClosedError:
            return None

    def begin_closing(self) -> None:
        """Take nothing new, and end the streams that would never end."""
        self.is_closing = True
        self.closing.set()

    def end_answers(self) -> None:
        """End every generation now, with an error that says why; none begins any more."""
        self.begin_closing()
        self.is_ended = True
        for task in self._answering:
            task.cancel()

    def close(self) -> None:
        """Publish every agent, and let go of the models. In a thread; may be called twice."""
        self.is_closing = True
        self.agents.work.close()
        self.models.registry.close()
        with contextlib.suppress(Exception):
            self.store.flush()


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    service: Service = request.app.state.service
    return service


def new_id(prefix: str) -> str:
    """Make up a name that nobody can guess."""
    return f"{prefix}{uuid.uuid4().hex}"


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a pydantic model as it came: without what was not said."""
    found: dict[str, Any] = value.model_dump(exclude_none=True)
    return found

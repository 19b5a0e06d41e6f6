"""Reading of a prompt without answering it: whose turn a request is, and the tokens that it has.

The request takes its way through the server's own routes, so that every protocol is read as it
would be answered, up to the moment at which it would take its agent's seat.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sized
from contextvars import ContextVar
from typing import Any, NamedTuple

from starlette.types import Message

from kvcellar.agents import ModelHost, Turn
from kvcellar.deploy.routing import Wanted, prompt_hashes
from kvcellar.errors import KVCellarError, UnknownAgentError
from kvcellar.history import History
from kvcellar.hosting.text_limits import size_of
from kvcellar.hosting.thread_lanes import OTHER_BYTES
from kvcellar.prefix import key_of
from kvcellar.server.app import create_api
from kvcellar.server.errors import ApiError
from kvcellar.server.state.conversations import Conversations, Seat, Whose
from kvcellar.server.state.service import Service

PROMPTS = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/infill",
    )
)
"""Paths of what has a prompt."""


class HttpRequest(NamedTuple):
    """A request of HTTP as a value.

    Attributes:
        scope: of ASGI, with nothing in it but plain values.
        body: all of it.
    """

    scope: dict[str, Any]
    body: bytes


class _ReadError(ApiError):
    """The end of reading; nobody is told of it."""

    def __init__(self) -> None:
        super().__init__(503, "the prompt was read", "read")


class _Found:
    """Turn or prompt that a request turned out to be."""

    def __init__(self) -> None:
        self.turn: tuple[Turn, Whose] | None = None
        self.prompt: tuple[ModelHost, Any] | None = None


_FOUND: ContextVar[_Found] = ContextVar("found")


class _NoSeats(Conversations):
    """Gives no seat, and takes note of who wanted one."""

    @contextlib.asynccontextmanager
    async def seat(self, turn: Turn, whose: Whose) -> AsyncIterator[Seat]:
        """Take note of a turn.

        Raises:
            _ReadError: always.
        """
        _FOUND.get().turn = turn, whose
        raise _ReadError
        yield  # a seat that nobody gets


class _Reading(Service):
    """The service of a replica with which nothing is answered."""

    def __init__(self, service: Service) -> None:
        self.__dict__.update(service.__dict__)
        self.conversations = _NoSeats(service.agents, 0)

    @contextlib.contextmanager
    def admitted(self, n: int = 1) -> Iterator[None]:
        """Admit everybody: to read is not to answer."""
        yield

    def check_context(self, host: ModelHost, tokens: Sized) -> None:
        """Take note of a prompt that is nobody's turn.

        Raises:
            _ReadError: always.
        """
        _FOUND.get().prompt = host, tokens
        raise _ReadError


class PromptReader:
    """Finds out of requests what decides where they go."""

    def __init__(self, service: Service) -> None:
        """Read with the models, templates and agents of a service."""
        self._service = service
        self._api = create_api(_Reading(service))

    async def read(self, asked: HttpRequest) -> Wanted:
        """Return what a request wants; of one that cannot be answered, nothing in particular."""
        agent, prompt = await self.prompt(asked)
        if prompt is None:
            return Wanted(agent)
        host, tokens = prompt
        model = self._service.models.files_of(host.name)
        hashes = prompt_hashes(key_of(tokens, host.reading(len(tokens)).space), model)
        return Wanted(agent, hashes, len(tokens))

    async def prompt(self, asked: HttpRequest) -> tuple[str, tuple[ModelHost, History] | None]:
        """Return whose turn a request is, and its prompt with who reads it; None where it has none.

        Of one that cannot be answered nothing is said: whoever answers it says what is wrong.
        """
        found = _Found()
        _FOUND.set(found)
        sent = iter([{"type": "http.request", "body": asked.body, "more_body": False}])

        async def receive() -> Message:
            return next(sent, {"type": "http.disconnect"})

        async def send(message: Message) -> None:
            """Drop it: the client is not told."""

        await self._api({**asked.scope}, receive, send)
        if found.prompt is not None:
            host, tokens = found.prompt
            return "", (host, History(tokens))
        if found.turn is None:
            return "", None
        with contextlib.suppress(KVCellarError):
            return agent_of(found.turn[1]), await self._of_turn(*found.turn)
        return agent_of(found.turn[1]), None

    async def _of_turn(self, turn: Turn, whose: Whose) -> tuple[ModelHost, History] | None:
        """Return the prompt that a turn would have; None of one that is given as tokens.

        Raises:
            KVCellarError: it cannot be answered.
        """
        service = self._service
        own = None if turn.model is None else service.models.registry.host(turn.model)
        if own is None or turn.messages is None:
            return None
        host = own.isolated(whose.salt)
        with contextlib.suppress(UnknownAgentError):
            turn = await service.conversations.meant(turn, whose)
        messages, tools, kwargs = turn.messages or (), turn.tools, turn.template_kwargs
        agent_id = turn.agent_id or None

        def read() -> History:
            prompt_of = service.agents.turns.prompt_of
            return prompt_of(host, messages, tools, template_kwargs=kwargs, agent_id=agent_id)

        work = service.agents.work
        return host, await work.run(size_of(messages, tools).cost + OTHER_BYTES, read)


def agent_of(whose: Whose) -> str:
    """Return what keeps requests of one conversation together; empty: nothing does."""
    if whose.name is not None:
        return whose.name
    if whose.after is not None:
        return whose.after[0]
    return "" if whose.session is None else f"session {whose.salt} {whose.session}"

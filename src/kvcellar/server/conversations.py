"""Whose turn is it: an agent that was named, one whose history is continued, or a new one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvcellar.agents import AgentManager
from kvcellar.errors import AgentError, KVCellarError, UnknownAgentError

__all__ = ["Conversations", "Seat"]

UNNAMED = "chat-"
"""How the ids of conversations begin that nobody named."""


@dataclass(slots=True, eq=False)
class Seat:
    """Whose turn a request is.

    Attributes:
        agent_id: an agent that nobody else uses meanwhile, or a named one, which takes turns.
        has_answered: set by whoever finished the turn; an unnamed one without it is forgotten.
    """

    agent_id: str
    is_new: bool = False
    has_answered: bool = field(default=False)


class Conversations:
    """Finds the agent for a conversation that comes as text. On one event loop."""

    def __init__(self, agents: AgentManager, max_unnamed: int) -> None:
        """Nobody talks yet."""
        self._agents = agents
        self._max_unnamed = max_unnamed
        self._taken: set[str] = set()

    @asynccontextmanager
    async def seat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        model: str,
        agent_id: str | None = None,
    ) -> AsyncIterator[Seat]:
        """The agent that a conversation belongs to, for as long as the block lasts.

        Args:
            messages: all of it, as the agents know it.
            tools: definitions of its tools.
            model: who answers.
            agent_id: a name that the client gave; made where there is none.
        """
        if agent_id is not None:
            await self._named(agent_id, model)
            yield Seat(agent_id)
            return
        seat = await self._unnamed(messages, tools, model)
        try:
            yield seat
        finally:
            self._taken.discard(seat.agent_id)
            if seat.is_new and not seat.has_answered:
                await self._forget(seat.agent_id)

    async def _named(self, agent_id: str, model: str) -> None:
        known = {(info.agent_id, info.model) for info in self._agents.list()}
        if not any(agent_id == name for name, _ in known):
            with contextlib.suppress(AgentError):  # another request made it meanwhile
                await self._agents.create(agent_id, model=model)

    async def _unnamed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        model: str,
    ) -> Seat:
        await self._prune()
        place = self._agents.place_of(messages, tools, model=model)
        if place is not None:
            is_own = place.agent_id.startswith(UNNAMED)
            is_taken = place.is_busy or place.agent_id in self._taken
            if place.is_end and is_own and not is_taken:
                self._taken.add(place.agent_id)
                return Seat(place.agent_id)
            new_id = self._new_id()
            with contextlib.suppress(KVCellarError):  # it changed, or went, meanwhile
                await self._agents.fork(
                    place.agent_id,
                    new_id,
                    position=place.position,
                    model=place.model,
                    is_passing=True,
                )
                return Seat(new_id, is_new=True)
            self._taken.discard(new_id)
        new_id = self._new_id()
        try:
            await self._agents.create(new_id, model=model, is_passing=True)
        except BaseException:
            self._taken.discard(new_id)
            raise
        return Seat(new_id, is_new=True)

    def _new_id(self) -> str:
        new_id = f"{UNNAMED}{uuid.uuid4().hex[:12]}"
        self._taken.add(new_id)
        return new_id

    async def _prune(self) -> None:
        """Forget the unnamed that were silent longest."""
        silent = [name for name in self._agents.silent(UNNAMED) if name not in self._taken]
        for name in silent[: max(0, len(silent) - self._max_unnamed)]:
            await self._forget(name)

    async def _forget(self, agent_id: str) -> None:
        with contextlib.suppress(UnknownAgentError):
            await self._agents.forget(agent_id)

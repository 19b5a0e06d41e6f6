"""Finds the agent of a request: a named one, one whose history is continued, or a new one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvcellar.agents import (
    AgentManager,
    Gate,
    Joined,
    Turn,
    checked_id,
    is_unnamed,
    salted_id,
    unnamed_id,
)
from kvcellar.agents.records.names import is_response
from kvcellar.errors import AgentError, KVCellarError, UnknownAgentError
from kvcellar.store.disk.journal import MOST_DOCUMENTS

MAX_SESSIONS = 4096
"""Session ids of clients whose last agent is remembered."""


@dataclass(frozen=True, slots=True)
class Whose:
    """Whom a request is for, as its client says it.

    Attributes:
        name: of an agent. A person gave it, so it is a promise: the agent has to be there, and its
            history is never replaced.
        may_create: whether the agent of that name may be made where there is none.
        session: what a client calls its own conversation: a hint where to look, never a name.
        own_id: id of an agent that a protocol wants made for this one answer, and kept with it.
        after: of ``own_id``: the agent that it goes on from, and how many of its tokens.
        salt: of those with whom it shares anything; ``name`` and the other ids have it.
    """

    name: str | None = None
    may_create: bool = False
    session: str | None = None
    own_id: str | None = None
    after: tuple[str, int] | None = None
    salt: str = ""


@dataclass(slots=True, eq=False)
class Seat:
    """Turn of a request with its agent, and how that was found.

    Attributes:
        turn: with the whole conversation that is to be answered, of an agent that nobody else uses
            meanwhile, or of a named one, which takes turns.
        is_new: whether the agent was made for this request.
        notice: what the client should know of the choice, in a sentence.
        has_answered: set by whoever finished the turn; a new agent without it is forgotten.
    """

    turn: Turn
    is_new: bool = False
    notice: str | None = None
    has_answered: bool = field(default=False)


class Conversations:
    """Finds the agent for a conversation that comes as text. On one event loop."""

    def __init__(self, agents: AgentManager, max_unnamed: int) -> None:
        """Create a finder of agents that holds none."""
        self._agents = agents
        self._max_unnamed = max_unnamed
        self._taken: set[str] = set()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._forgetting: asyncio.Task[None] | None = None
        self._seats: dict[str, tuple[Gate, int]] = {}
        """Per named agent that requests are for: one at a time, and how many there are."""

    @asynccontextmanager
    async def seat(self, turn: Turn, whose: Whose) -> AsyncIterator[Seat]:
        """Find the agent that a turn belongs to, and keep it for as long as the block lasts.

        Args:
            turn: what the client sent, as the agents know it.
            whose: what the client said of whom it is for.

        Raises:
            UnknownAgentError: there is none of that name, and nobody asked to have it made.
        """
        if whose.own_id is not None:
            found = self._own(whose.own_id, whose.after, turn)
        elif whose.name is not None:
            found = self._named(whose.name, whose.may_create, turn)
        else:
            found = self._unnamed(turn, whose.session, whose.salt)
        async with found as seat:
            yield seat

    async def meant(self, turn: Turn, whose: Whose) -> Turn:
        """Put what a named agent's history adds to a conversation into its turn.

        It is what ``seat`` would do at this moment; nothing is made, changed or waited for.

        Returns:
            The turn, of the agent whose history it goes on from; as it was where no agent is named,
            or the agent would be made.

        Raises:
            UnknownAgentError: there is none of that name, and nobody asked to have it made.
        """
        if whose.name is None:
            return turn
        if await self._agents.directory.has(whose.name):
            joined = await self._agents.lookup.join(
                whose.name, turn.messages or (), model=turn.model
            )
            return _of(joined.agent_id, turn, joined)
        if whose.may_create:
            checked_id(whose.name)
            return turn
        raise await self._unknown(whose.name)

    # Named -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _named(self, name: str, may_create: bool, turn: Turn) -> AsyncIterator[Seat]:
        is_new = False
        agent_id = name
        while True:
            async with self._alone(agent_id):
                if agent_id == name and not await self._agents.directory.has(name):
                    if not may_create:
                        raise await self._unknown(name)
                    is_new = await self._make(name, turn.model)
                if not turn.messages:
                    seat = Seat(_of(agent_id, turn), is_new)
                else:
                    joined = await self._agents.lookup.join(name, turn.messages, model=turn.model)
                    if not joined.is_continuing:
                        break
                    if joined.agent_id != agent_id:  # a branch: as soon as it is free
                        agent_id = joined.agent_id
                        continue
                    own = replace(_of(agent_id, turn, joined), is_continuing=True)
                    notice = _notice(name, agent_id, is_appended=joined.is_appended)
                    seat = Seat(own, is_new, notice)
                try:
                    yield seat
                finally:
                    if is_new and not seat.has_answered:
                        await self._forget_unused(name, 0)
                return
        info = await self._agents.lifecycle.branch(name, joined, model=turn.model)
        agent_id = info.agent_id
        async with self._alone(agent_id):
            notice = _notice(name, agent_id, is_appended=False)
            seat = Seat(_of(agent_id, turn, joined), is_new=True, notice=notice)
            try:
                yield seat
            finally:
                if not seat.has_answered:
                    await self._forget_unused(agent_id, info.n_turns)

    async def _unknown(self, name: str) -> UnknownAgentError:
        """Say that there is none of that name, and the way out."""
        try:
            await self._agents.directory.describe(name)
        except UnknownAgentError as error:
            return UnknownAgentError(
                f"{error}; make it with POST /v1/agents, or send the header X-Agent-Create: true "
                f"to have it made on first use"
            )
        raise AssertionError(f"agent {name!r} is there")

    async def _make(self, agent_id: str, model: str | None) -> bool:
        """Make an agent where there is none of that name; whether that was done."""
        if await self._agents.directory.has(agent_id):
            return False
        try:
            await self._agents.lifecycle.create(agent_id, model=model)
        except AgentError:
            if await self._agents.directory.has(agent_id):  # another request made it meanwhile
                return False
            raise
        return True

    async def _forget_unused(self, agent_id: str, n_turns: int) -> None:
        """Forget an agent that was made for a turn that never was."""
        with contextlib.suppress(UnknownAgentError):
            if len(self._agents.directory.turns(agent_id)) <= n_turns:
                await self._agents.lifecycle.forget(agent_id)

    @asynccontextmanager
    async def _alone(self, agent_id: str) -> AsyncIterator[None]:
        """Hold a named agent: what is found out about it holds until its turn has ended."""
        gate, n = self._seats.get(agent_id, (Gate(), 0))
        self._seats[agent_id] = gate, n + 1
        try:
            async with gate:
                yield
        finally:
            gate, n = self._seats.pop(agent_id)
            if n > 1:
                self._seats[agent_id] = gate, n - 1

    # Of one answer -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _own(
        self, own_id: str, after: tuple[str, int] | None, turn: Turn
    ) -> AsyncIterator[Seat]:
        """Make an agent for one answer; without an answer it is forgotten again."""
        self._prune()
        seat = Seat(_of(own_id, turn), is_new=True)
        await self._begin_own(own_id, after, turn.model)
        try:
            await self._expect(own_id, turn)
            yield seat
        finally:
            if not seat.has_answered:
                await self._forget(own_id)

    async def _begin_own(
        self, own_id: str, after: tuple[str, int] | None, model: str | None
    ) -> None:
        """Make the agent of an answer: where another one was, or afresh where that is gone."""
        if after is not None:
            other_id, position = after
            with contextlib.suppress(UnknownAgentError, AgentError):
                await self._agents.lifecycle.fork(
                    other_id, own_id, position=position, is_passing=True
                )
                return
        await self._agents.lifecycle.create(own_id, model=model, is_passing=True)

    # Unnamed -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _unnamed(self, turn: Turn, session: str | None, salt: str) -> AsyncIterator[Seat]:
        session = None if session is None else f"{salt} {session}"
        seat = await self._find(turn, session, salt)
        agent_id = seat.turn.agent_id
        if session is not None:
            self._sessions[session] = agent_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        try:
            yield seat
        finally:
            self._taken.discard(agent_id)
            if seat.is_new and not seat.has_answered:
                await self._forget(agent_id)

    async def _find(self, turn: Turn, session: str | None, salt: str) -> Seat:
        self._prune()
        likely = None if session is None else self._sessions.get(session)
        place = await self._agents.lookup.place(
            turn.messages or (), turn.tools, model=turn.model or "", likely=likely, salt=salt
        )
        if place is not None:
            is_own = is_unnamed(place.agent_id)
            is_taken = place.is_busy or place.agent_id in self._taken
            if place.is_end and is_own and not is_taken:
                self._taken.add(place.agent_id)
                return Seat(_of(place.agent_id, turn))
            new_id = self._new_id(salt)
            with contextlib.suppress(KVCellarError):  # it changed, or went, meanwhile
                await self._agents.lifecycle.fork(
                    place.agent_id,
                    new_id,
                    turn=place.n_turns,
                    model=place.model,
                    is_passing=True,
                )
                await self._expect(new_id, turn, likely=place.agent_id)
                return Seat(_of(new_id, turn), is_new=True)
            self._taken.discard(new_id)
        new_id = self._new_id(salt)
        try:
            await self._agents.lifecycle.create(new_id, model=turn.model, is_passing=True)
        except BaseException:
            self._taken.discard(new_id)
            raise
        await self._expect(new_id, turn)
        return Seat(_of(new_id, turn), is_new=True)

    async def _expect(self, agent_id: str, turn: Turn, likely: str | None = None) -> None:
        """Find out what a new agent's first turn comes close to, so that it can say why not."""
        await self._agents.lookup.expect(
            agent_id, turn.messages or (), model=turn.model or "", likely=likely
        )

    def _new_id(self, salt: str) -> str:
        new_id = salted_id(unnamed_id(), salt)
        self._taken.add(new_id)
        return new_id

    def _prune(self) -> None:
        """Have the unnamed that were silent longest forgotten, for which nobody waits."""
        if self._forgetting is None or self._forgetting.done():
            self._forgetting = asyncio.create_task(self._forget_silent())

    async def _forget_silent(self) -> None:
        for is_meant, most in ((is_unnamed, self._max_unnamed), (is_response, MOST_DOCUMENTS)):
            silent = [
                name for name in self._agents.directory.silent(is_meant) if name not in self._taken
            ]
            for name in silent[: max(0, len(silent) - most)]:
                if name in self._taken:  # somebody goes on from it by now
                    continue
                self._taken.add(name)
                try:
                    with contextlib.suppress(KVCellarError):  # then the next time
                        await self._forget(name)
                finally:
                    self._taken.discard(name)

    async def _forget(self, agent_id: str) -> None:
        with contextlib.suppress(UnknownAgentError):
            await self._agents.lifecycle.forget(agent_id)


def _of(agent_id: str, turn: Turn, joined: Joined | None = None) -> Turn:
    """Return a client's turn as one of an agent, what the client left out included.

    The agent keeps its tools, and what its template was given, where what is new comes alone; else
    the client says them all.
    """
    turn = replace(turn, agent_id=agent_id)
    if not turn.is_chat:
        return turn
    if joined is not None:
        turn = replace(turn, messages=joined.messages, joined=joined)
        if joined.is_appended:
            return replace(turn, template_kwargs=turn.template_kwargs or None)
    tools = [] if turn.tools is None else turn.tools
    return replace(turn, tools=tools, template_kwargs=turn.template_kwargs or {})


def _notice(name: str, agent_id: str, *, is_appended: bool) -> str | None:
    """Say what a client should know of where its messages went."""
    if agent_id != name:
        return (
            f"this conversation does not continue the history of agent {name}, which is as it was; "
            f"the answer is in its branch {agent_id}"
        )
    if is_appended:
        return f"these messages were put behind the history of agent {name}"
    return None

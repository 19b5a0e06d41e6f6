"""The life of an agent: create, fork, keep, rewind, finish and delete."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.agents.directory import Directory, name_taken
from kvcellar.agents.dropped import DroppedStates
from kvcellar.agents.freeing import free_cells
from kvcellar.agents.leasing import changing
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord, LiveAgent
from kvcellar.agents.records.names import checked_id, derived_id, new_ids, salt_of
from kvcellar.agents.records.titles import checked_title
from kvcellar.agents.records.views import AgentInfo
from kvcellar.agents.text.match_messages import Joined
from kvcellar.errors import AgentError, NameTakenError, StoreError, UnknownReferenceError
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.models import ModelRegistry
from kvcellar.hosting.text_limits import refuse_bytes, size_of
from kvcellar.store import Store
from kvcellar.valid import valid_json


@dataclass(frozen=True, slots=True, eq=False)
class Lifecycle:
    """Makes and changes agents. Verbs that change one wait for its turn; ``fork`` does not.

    Attributes:
        store: where histories are.
        models: who runs them.
        directory: who there is.
        publisher: saves agents.
        dropped: takes what is dropped.
        default_model: of agents that are created without one.
    """

    store: Store
    models: ModelRegistry
    directory: Directory
    publisher: Publisher
    dropped: DroppedStates
    default_model: str

    # Coming ------------------------------------------------------------------------------------

    async def create(
        self,
        agent_id: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        title: str = "",
        salt: str = "",
        is_passing: bool = False,
    ) -> AgentInfo:
        """Make a new agent without a history.

        Args:
            agent_id: None: a name is made up, of the title where there is one.
            model: None: the default, for a name that no agent has with any model.
            system: its system message.
            tools: definitions of its tools.
            title: what people are to read in place of the name: any text on one line.
            salt: of the name that is made up.
            is_passing: write nothing of it before its first turn has ended.

        Raises:
            AgentNameError: it cannot be a name; nothing was changed.
            AgentNameError: the title is too long; nothing was changed.
            NameTakenError: the name is taken, with this model or, where none was named, with
                another; nothing was changed.
            ContextError: what is said is longer than the model's context; nothing was changed.
            ModelError: the model cannot be loaded; nothing was changed.
            StoreError: it cannot be saved; nothing was changed.
        """
        title = checked_title(title)
        agent_id = await self._new_id(title, salt) if agent_id is None else checked_id(agent_id)
        system, tools = valid_json((system, tools))
        if model is None and await self.directory.has(agent_id):
            raise name_taken(self.directory.agent(agent_id))
        async with self.models.use(model or self.default_model) as host:
            if host.tokenizer is not None:
                refuse_bytes(host.tokenizer, size_of(system, tools).n_bytes, host.context)
            host = host.isolated(salt_of(agent_id))
            live = LiveAgent(is_passing=is_passing)
            agent = AgentRecord(agent_id, host.name, host.key, given_title=title, live=live)
            if system is not None:
                agent.messages = Messages([{"role": "system", "content": system}])
            if tools:
                agent.tools = [dict(tool) for tool in tools]
            await self.directory.register(agent, host)
            return agent.info()

    async def rename(self, agent_id: str, title: str) -> AgentInfo:
        """Give an agent another title; its name stays, by which clients know it.

        Args:
            agent_id: whose.
            title: any text on one line; empty: it is called by what was said again.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentNameError: the title is too long; nothing was changed.
            StoreError: it could not be written; nothing was changed.
        """
        title = checked_title(title)
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent):
            before, agent.given_title = agent.given_title, title
            agent.advance()
            try:
                await self.publisher.make_durable(agent)
            except BaseException:
                agent.given_title = before
                raise
            await self.publisher.save(agent, self.directory.host_of(agent))
        return agent.info()

    async def fork(
        self,
        agent_id: str,
        new_id: str | None = None,
        *,
        position: int | None = None,
        turn: int | None = None,
        model: str | None = None,
        is_passing: bool = False,
        branch_of: str | None = None,
    ) -> AgentInfo:
        """Make an agent that shares the beginning of another; no KV is copied, here or on disk.

        The other may be generating: then the new one shares what there is by now.

        Args:
            agent_id: the parent.
            new_id: None: a name is made up.
            position: tokens to share; None: all.
            turn: or turns to share, from the beginning, or from the end where negative.
            model: of the parent, where agents of that name belong to several.
            is_passing: write nothing of it before its next turn has ended.
            branch_of: id of the named agent whose clients are answered by the new one too.

        Raises:
            UnknownAgentError: there is no such parent.
            AgentError: the name is taken, or cannot be one, or there is no such place; nothing was
                changed.
            StoreError: the new one cannot be saved; nothing was changed.
        """
        parent = await self.directory.find(agent_id, model)
        if new_id is None:
            new_id = derived_id(agent_id, f"-{uuid.uuid4().hex[:6]}")
        if salt_of(new_id) != salt_of(agent_id):
            raise AgentError("an agent and its fork have one salt; nothing was changed")
        host = self.directory.host_of(parent)
        now = await self._as_it_is(parent, host)
        at, n_turns = now.position_of(position, turn), now.turns_of(turn)
        child = now.forked(checked_id(new_id), at, n_turns)
        child.live.is_passing, child.branch_of = is_passing, branch_of
        await self.directory.register(child, host)
        return replace(child.info(), notes=_moved(position, at))

    async def branch(self, agent_id: str, joined: Joined, *, model: str | None = None) -> AgentInfo:
        """Fork an agent for a conversation that does not continue it, where the two part.

        Args:
            agent_id: the named agent; the branch is called after it: ``poet.2``, ``poet.3``, ...
            joined: what ``Lookup.join`` has found.
            model: who will answer.

        Raises:
            UnknownAgentError: the agent is gone.
            AgentError: its history has changed; nothing was made.
            StoreError: the branch cannot be saved; nothing was made.
        """
        directory = self.directory
        parent = directory.known(joined.agent_id, model) or await directory.find(joined.agent_id)
        child = await self.branch_off(parent, agent_id, joined.n_turns)
        return child.info()

    async def branch_off(
        self, parent: AgentRecord, branch_of: str, n_turns: int | None
    ) -> AgentRecord:
        """Fork an agent under the next free number behind a name.

        Args:
            parent: the agent; it may be in a turn, here or elsewhere.
            branch_of: the name, whose clients are answered by the branch too.
            n_turns: turns to share; None: all.

        Raises:
            AgentError, StoreError: as ``branch``.
        """
        host = self.directory.host_of(parent)
        now = await self._as_it_is(parent, host)
        at = now.position_of(None, n_turns)
        for number in itertools.count(2):
            new_id = derived_id(branch_of, f".{number}")
            if await self.directory.has(new_id):
                continue
            child = now.forked(new_id, at, n_turns)
            child.branch_of, child.live.beside = branch_of, parent.as_it_is()
            with contextlib.suppress(NameTakenError):  # by somebody else, just now
                await self.directory.register(child, host)
                return child
        raise AssertionError("there is always another number")

    async def part(self, agent: AgentRecord) -> AgentRecord:
        """Make a branch of what was said here to an agent with which another machine has gone on.

        The agent is what the other has said to it from then on. Returns the branch.

        Raises:
            AgentError, StoreError: as ``branch``.
        """
        branch = await self.branch_off(agent, agent.branch_of or agent.agent_id, None)
        async with changing(self.publisher, agent, is_read=False):
            await self.publisher.give_way(agent)
        return branch

    # Going back --------------------------------------------------------------------------------

    async def rewind(
        self,
        agent_id: str,
        *,
        position: int | None = None,
        turn: int | None = None,
        follows: str | None = None,
    ) -> AgentInfo:
        """Go back to a place in the history; ``undo`` brings back what came behind it.

        Args:
            agent_id: whose.
            position: tokens that stay.
            turn: or turns that stay, from the beginning, or from the end where negative.
            follows: digest of the history that it goes back from; None: of any.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: there is no such place; nothing was changed.
            MovedOnError: it has another history by now; nothing was changed.
            StoreError: what is dropped cannot be saved; nothing was changed.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent):
            agent.check_follows(follows)
            before = agent.tokens
            at, n_turns = agent.position_of(position, turn), agent.turns_of(turn)
            if at < len(before) or (n_turns is not None and n_turns < len(agent.turns)):
                await self.dropped.drop(agent, "rewind", agent_id, uuid.uuid4().hex)
            agent.cut(at, n_turns)
            agent.miss, agent.is_rewound = None, True
            agent.advance()
            await self.publisher.save(agent, self.directory.host_of(agent))
            await self.publisher.make_durable(agent)
            await free_cells(self.directory, agent, before, len(agent.tokens))
        return replace(agent.info(), notes=_moved(position, at))

    # Going -------------------------------------------------------------------------------------

    async def delete(self, agent_id: str, *, is_final: bool = False) -> None:
        """Forget an agent: its cells and its reference; what others share stays.

        ``undo`` brings it back until the store needs the room, unless it is final, or the store
        had no room to keep it.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent, is_read=not is_final):
            if not is_final:
                await self._drop(agent, "delete", agent_id, uuid.uuid4().hex)
            await free_cells(self.directory, agent)
            await self._remove(agent)

    async def _drop(self, agent: AgentRecord, verb: str, by: str, act: str) -> None:
        """Keep what an agent has for ``undo``, unless the store is full, which gets room by it."""
        with contextlib.suppress(StoreError):
            await self.dropped.drop(agent, verb, by, act)

    async def forget(self, agent_id: str) -> None:
        """Delete an agent and leave what it computed to the cache, for whoever begins alike.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent, is_read=False):
            await self._remove(agent)

    async def _remove(self, agent: AgentRecord) -> None:
        """Take an agent out of the directory and the store. Within its gate."""
        self.directory.remove(agent)
        await self.publisher.settled(agent)
        if not agent.live.is_passing:
            with contextlib.suppress(UnknownReferenceError):
                await asyncio.to_thread(self.store.delete, agent.name)

    async def keep(self, agent_id: str, among: Collection[str] | None = None) -> Sequence[str]:
        """Keep this branch and delete its siblings, with all that was forked from them.

        ``undo`` of this one brings back all that it has deleted.

        Args:
            agent_id: the one that stays.
            among: names of the siblings that may go; None: all.

        Returns:
            The ids that are gone.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: one of them is generating; nothing was deleted.
        """
        agent = await self.directory.find(agent_id)
        doomed = _beside(agent, self.directory.agents(), among)
        busy = [other.agent_id for other in doomed if other.live.gate.is_taken]
        if busy:
            raise AgentError(
                f"{', '.join(busy)} are in a turn, so {agent_id!r} cannot be kept alone; end their "
                f"turns first"
            )
        act = uuid.uuid4().hex
        async with contextlib.AsyncExitStack() as held:  # all of them, before one of them goes
            for other in sorted(doomed, key=lambda other: other.name):
                await held.enter_async_context(changing(self.publisher, other))
            for other in doomed:
                await self._drop(other, "keep", agent_id, act)
                await free_cells(self.directory, other)
                await self._remove(other)
        return [other.agent_id for other in doomed]

    async def finish(self, agent_id: str) -> AgentInfo:
        """End a sub-agent: its private cells are free; its history stays stored.

        Raises:
            UnknownAgentError: there is none of that name.
            StoreError: it could not be written; nothing was changed.
        """
        agent = await self.directory.find(agent_id)
        async with changing(self.publisher, agent):
            before = agent.is_finished, agent.is_waiting
            agent.is_finished, agent.is_waiting = True, False
            try:
                await self.publisher.publish(agent, self.directory.host_of(agent))
            except BaseException:
                agent.is_finished, agent.is_waiting = before
                raise
            await free_cells(self.directory, agent)
        return agent.info()

    # Inside ------------------------------------------------------------------------------------

    async def _new_id(self, title: str, salt: str) -> str:
        """Return an id that no agent has yet."""
        for agent_id in new_ids(title, salt):
            if not await self.directory.has(agent_id):
                return agent_id
        raise AssertionError("there is always another")

    async def _as_it_is(self, agent: AgentRecord, host: ModelHost | None) -> AgentRecord:
        """Copy an agent at this moment, the turn that it is in included."""
        request_id = agent.live.request_id
        if request_id is None or host is None:
            await self.publisher.refresh(agent)
            return agent.as_it_is()
        tokens = await host.between_steps(lambda engine: engine.publish(request_id))
        now = agent.as_it_is()
        n = len(agent.tokens)
        if tokens is not None and len(tokens) > n == tokens.common_prefix(agent.tokens):
            now.tokens = tokens
        return now


def _moved(position: int | None, at: int) -> tuple[str, ...]:
    """Say where a place is that was given inside of a picture; nothing where it was not."""
    if position is None or position == at:
        return ()
    return (f"position {position} is inside of a picture; it is taken for {at}, where that begins",)


def _beside(
    agent: AgentRecord, agents: Sequence[AgentRecord], among: Collection[str] | None
) -> list[AgentRecord]:
    """Return an agent's siblings, of those that may go, and all that was forked from them."""
    found = {
        a.name: a
        for a in agents
        if a is not agent and a.is_sibling_of(agent) and (among is None or a.agent_id in among)
    }
    while True:
        more = {
            a.name: a
            for a in agents
            if a.name not in found and any(a.is_child_of(b) for b in found.values())
        }
        if not more:
            found.pop(agent.name, None)
            return list(found.values())
        found |= more

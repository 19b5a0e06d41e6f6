"""An agent's state in the store: published after each turn, taken over from other processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from kvcellar.agents.models import ModelHost
from kvcellar.agents.records import Agent, key_of
from kvcellar.agents.residence import save_history
from kvcellar.engine import Engine
from kvcellar.errors import EngineClosedError, StoreError, UnknownReferenceError
from kvcellar.store import SaveState, SaveTicket, Store

__all__ = ["Publisher"]

T = TypeVar("T")


class Publisher:
    """Saves agents and knows what became of each save."""

    def __init__(self, store: Store) -> None:
        """Nothing saved yet."""
        self.store = store
        self._tickets: dict[str, SaveTicket] = {}

    def refresh(self, agent: Agent) -> None:
        """Take over what another process has published of the agent since."""
        ticket = self._tickets.get(agent.name)
        if ticket is not None:
            if ticket.state is SaveState.QUEUED:
                return
            if ticket.reference is not None:
                agent.revision = max(agent.revision, ticket.reference.revision)
                agent.n_stored = ticket.reference.n_stored
        with contextlib.suppress(StoreError, UnknownReferenceError, KeyError, TypeError):
            ref = self.store.get(agent.name)
            if ref.revision > agent.revision and key_of(ref) == agent.key:
                agent.take(ref)

    async def save(self, agent: Agent, host: ModelHost | None) -> SaveTicket | None:
        """Publish the agent's state; None where that is done already, without a write of rows."""
        if host is not None:
            with contextlib.suppress(EngineClosedError):
                ticket = await _in_engine(host, lambda e: self.between_steps(e, agent, False))
                if ticket is not None:
                    return ticket
        await self.settled(agent)
        return await asyncio.to_thread(self._without_cells, agent)

    def between_steps(
        self, engine: Engine, agent: Agent, is_last_resort: bool
    ) -> SaveTicket | None:
        """Publish the agent's state from cells, in the engine's thread; see ``save_history``."""
        ticket = save_history(
            engine,
            self.store,
            agent.name,
            agent.key,
            agent.token_array(),
            parent=agent.parent,
            parent_position=agent.parent_position,
            metadata=agent.metadata(),
            is_last_resort=is_last_resort,
        )
        return None if ticket is None else self._follow(agent, ticket)

    def _without_cells(self, agent: Agent) -> SaveTicket | None:
        """Publish a state of which no cell is here: what is stored of it is referred to."""
        ref = None
        tokens, n = agent.token_array(), len(agent.tokens)
        if self.store.has_reference(agent.name):
            before = self.store.get(agent.name)
            if len(before.tokens) == n and bool((before.tokens == tokens).all()):
                self.store.update_metadata(agent.name, agent.metadata())
                ref = self.store.get(agent.name)
            elif len(before.tokens) > n and bool((before.tokens[:n] == tokens).all()):
                ref = self.store.cut(agent.name, n, metadata=agent.metadata())
        elif agent.parent is not None and self.store.has_reference(agent.parent):
            before = self.store.get(agent.parent)
            if len(before.tokens) >= n and bool((before.tokens[:n] == tokens).all()):
                ref = self.store.fork(agent.parent, agent.name, n, metadata=agent.metadata())
        if ref is not None:
            agent.revision, agent.n_stored = ref.revision, ref.n_stored
            return None
        ticket = self.store.save(
            agent.name,
            agent.key,
            tokens,
            None,
            n_computed=self.store.match(agent.key, tokens).n_resumable,
            parent=agent.parent,
            parent_position=agent.parent_position,
            metadata=agent.metadata(),
        )
        self._follow(agent, ticket).wait()
        return ticket

    def _follow(self, agent: Agent, ticket: SaveTicket) -> SaveTicket:
        self._tickets[agent.name] = ticket
        agent.n_stored = ticket.n_stored
        return ticket

    async def settled(self, agent: Agent) -> None:
        """Wait until the last save of an agent is over."""
        ticket = self._tickets.pop(agent.name, None)
        if ticket is not None:
            await asyncio.to_thread(ticket.wait)
            if ticket.reference is not None:
                agent.revision = max(agent.revision, ticket.reference.revision)

    def complete(self, agent: Agent, host: ModelHost) -> None:
        """Wait until what an agent has said is on disk; save again what found no room. For threads.

        The host still runs, and its cache still has what the store lacks.
        """
        ticket = self._tickets.get(agent.name)
        if ticket is None:
            return
        ticket.wait()
        if ticket.state is not SaveState.PUBLISHED or ticket.is_partial:
            self.store.flush()
            again = host.service.run(lambda engine: self.between_steps(engine, agent, True))
            second = again.result()
            if second is not None:
                second.wait()


async def _in_engine(host: ModelHost, function: Callable[[Engine], T]) -> T:
    return await asyncio.wrap_future(host.service.run(function))

"""An agent's state in the store: published after each turn, taken over from other processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.checking import checked_facts, key_of
from kvcellar.agents.records.durable import entry_of, stored_state
from kvcellar.errors import (
    EngineClosedError,
    PictureError,
    StoreError,
    UnknownReferenceError,
)
from kvcellar.hosting.messages import Message
from kvcellar.models.text.pictures import names_in
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.store import Reference, SaveState, SaveTicket, Store

if TYPE_CHECKING:
    from kvcellar.hosting.host import ModelHost

REST_EVERY_S = 5.0
"""How long the KV of short turns may wait for the engine to rest."""

MOST_SAVES = 4
"""Times that a state is saved before it is given up: other processes remove blocks meanwhile."""


class Publisher:
    """Saves agents and knows what became of each save.

    After a turn the history is published at once. Its KV is too, where it fills a block; what is
    less is taken when the engine rests, so that a talk of short turns does not write one growing
    block again and again beside its own next turn.
    """

    def __init__(self, store: Store, shelf: PictureShelf) -> None:
        """Create a publisher that has saved nothing yet; it finds new pictures on a shelf."""
        self.store = store
        self._shelf = shelf
        self._tickets: dict[str, SaveTicket] = {}
        self._lock = threading.Lock()
        self._owed_since: dict[str, float] = {}
        """By agent since when there is KV of it that was not taken."""

    def revision_of(self, agent: AgentRecord) -> int | None:
        """Return the revision of an agent that this process knows; None while a save is queued."""
        ticket = self._tickets.get(agent.name)
        if ticket is None:
            return agent.revision
        if ticket.state is SaveState.QUEUED:
            return None
        if ticket.reference is not None and ticket.reference.revision > agent.revision:
            agent.revision = ticket.reference.revision
            agent.n_stored = ticket.reference.n_stored
        return agent.revision

    def news_of(self, agent: AgentRecord) -> Reference | None:
        """Read the state that another process has published of the agent; None where there is none.

        Costs one query where there is none. What cannot be used is none either; nor is a state
        older than what this process has, even where that could not be written.
        """
        known = self.revision_of(agent)
        is_saving = known is None  # then ours is the later state, unless their number is higher
        if known is None:
            known = agent.revision
        entries = self.store.recorded(agent.name, agent.serial)  # first, as in ``stored_state``
        if not entries and self.store.revision(agent.name) in (None, known):
            return None
        with contextlib.suppress(StoreError, UnknownReferenceError):
            ref = stored_state(self.store, agent.name)
            is_other = ref.revision != known and not is_saving
            if is_news(ref, agent, is_other=is_other) and key_of(ref) == agent.key:
                checked_facts(ref)
                return ref
        return None

    async def make_durable(self, agent: AgentRecord) -> None:
        """Have the agent's tokens and messages on disk; its K and V may follow. Within its gate.

        A no-op where they are, and for an agent that has said nothing yet and nobody named.

        Raises:
            StoreError: they could not be written.
        """
        if not agent.live.is_passing and (
            agent.live.mark is None or agent.live.mark.serial != agent.serial
        ):
            await asyncio.to_thread(self._save_pictures, agent.messages)
            await asyncio.to_thread(self._record, agent)
            await asyncio.to_thread(self._share, agent)

    def _share(self, agent: AgentRecord) -> None:
        """Wait a moment until other machines have what the agent has said; see ``SharedTier``."""
        ticket = self._tickets.get(agent.name)
        is_coming = ticket is not None and ticket.state in (SaveState.QUEUED, SaveState.PUBLISHED)
        if self.store.shared is not None and is_coming:
            self.store.shared.wait(agent.name, agent.serial)

    def _record(self, agent: AgentRecord) -> None:
        ticket = self._tickets.get(agent.name)
        saved = None if ticket is None else ticket.reference
        if saved is not None and saved.serial >= agent.serial:
            agent.live.mark = agent.marked()
            return
        mark = agent.live.mark
        if mark is not None and not agent.follows(mark):
            mark = None
        payload, now = entry_of(agent, mark)
        self.store.record(agent.name, agent.serial, payload)
        agent.live.mark = now

    async def expect_pictures(self, messages: Sequence[Message]) -> None:
        """Make the pictures of a turn durable before its words are; what fails is tried again."""
        with contextlib.suppress(StoreError):
            if names_in(messages):
                await asyncio.to_thread(self._save_pictures, messages)

    def _save_pictures(self, messages: Sequence[Message]) -> None:
        """Make the pictures of messages durable, and have upkeep leave those alone that are.

        Raises:
            StoreError: one could not be written.
        """
        for name in dict.fromkeys(names_in(messages)):
            if not self.store.keep_picture(name):
                with contextlib.suppress(PictureError):  # it was lost before: its words are kept
                    self.store.put_picture(name, self._shelf.get(name).data)

    async def refresh(self, agent: AgentRecord) -> None:
        """Take over what another process has published of the agent since. Within its gate."""
        if agent.live.is_passing:
            return
        if self.store.shared is not None:
            await asyncio.to_thread(self.store.shared.pull, agent.name)
        ref = await asyncio.to_thread(self.news_of, agent)
        if ref is not None:
            agent.take(ref)

    def is_diverged(self, agent: AgentRecord) -> bool:
        """Return whether another machine has gone on with the agent beside this one."""
        return self.store.shared is not None and self.store.shared.is_diverged(agent.name)

    async def give_way(self, agent: AgentRecord) -> None:
        """Take over what another machine has said to the agent, for what was said here.

        Within its gate; what was said here has another name by now.
        """
        await self.settled(agent)
        if self.store.shared is not None:
            await asyncio.to_thread(self.store.shared.pull, agent.name, is_giving_way=True)
            agent.take(await asyncio.to_thread(stored_state, self.store, agent.name))

    async def save(self, agent: AgentRecord, host: ModelHost | None) -> SaveTicket:
        """Publish the agent's state: with what the cache has of it, or else what the store has."""
        if host is not None:
            with contextlib.suppress(EngineClosedError):
                ticket = await host.between_steps(lambda _: self.between_steps(host, agent, False))
                if ticket is not None:
                    return ticket
        await self.settled(agent)
        return await asyncio.to_thread(self._without_cells, agent)

    async def publish(
        self, agent: AgentRecord, host: ModelHost | None, *, is_whole: bool = False
    ) -> None:
        """Save the agent's state and wait until it is on disk.

        Args:
            agent: whose state.
            host: in whose cache its KV may be.
            is_whole: all of its KV as well, as far as it was computed.

        Raises:
            StoreError: it could not be written; what was published before still is.
        """
        for n_left in reversed(range(MOST_SAVES)):
            ticket = await self.save(agent, host)
            state = await asyncio.to_thread(ticket.wait)
            if state is SaveState.PUBLISHED and not (is_whole and ticket.is_partial):
                return
            if not n_left:
                raise StoreError(f"{agent.label} could not be saved: {ticket.reason}")
            # The queue was full, and is not any more; or another process removed a block meanwhile.
            await asyncio.to_thread(self.store.flush)

    def after_turn(
        self, host: ModelHost, agent: AgentRecord, *, is_interrupted: bool
    ) -> SaveTicket | None:
        """Publish what a turn has left, in the engine's thread; see the class.

        Of one that was interrupted all is taken at once: the engine may be about to close.
        """
        now = time.monotonic()
        with self._lock:
            since = self._owed_since.setdefault(agent.name, now)
            if is_interrupted or now - since >= REST_EVERY_S:
                return self._publish(host, agent, True)
            block_tokens = host.key.layout.block_tokens
            ticket = self._publish(host, agent, True, min_new=block_tokens)
            if agent.name in self._owed_since:
                then = agent.as_it_is()  # it may be in its next turn when the engine rests
                host.service.when_at_rest(agent.name, lambda: self._at_rest(host, agent, then))
            return ticket

    def _at_rest(self, host: ModelHost, agent: AgentRecord, then: AgentRecord) -> None:
        """Take the KV that an agent is owed, unless that has happened."""
        with self._lock:
            if agent.name in self._owed_since:
                with contextlib.suppress(StoreError):  # a full or closed store: events say so
                    self._publish(host, then, True)
                    agent.n_stored = then.n_stored

    def between_steps(
        self, host: ModelHost, agent: AgentRecord, is_last_resort: bool
    ) -> SaveTicket | None:
        """Publish the agent's state from cells, in the engine's thread; see ``save_history``."""
        with self._lock:
            return self._publish(host, agent, is_last_resort)

    def _publish(
        self, host: ModelHost, agent: AgentRecord, is_last_resort: bool, min_new: int = 0
    ) -> SaveTicket | None:
        from kvcellar.agents.kv.residence import save_history  # needs the engine, as a host does

        ticket = save_history(
            host, self.store, agent, is_last_resort=is_last_resort, min_new=min_new
        )
        if ticket is None:
            return None
        if not min_new or ticket.n_stored + 1 >= len(agent.tokens):
            self._owed_since.pop(agent.name, None)
        return self._follow(agent, ticket)

    def _without_cells(self, agent: AgentRecord) -> SaveTicket:
        """Publish a state of which no cell is here, on what is stored of it. For threads."""
        ticket = self.store.save(
            agent.name,
            agent.key,
            agent.tokens,
            parent=agent.parent,
            parent_position=agent.parent_position,
            metadata=agent.metadata(),
        )
        self._follow(agent, ticket).wait()
        if ticket.reference is not None:
            agent.revision, agent.n_stored = ticket.reference.revision, ticket.reference.n_stored
        return ticket

    def _follow(self, agent: AgentRecord, ticket: SaveTicket) -> SaveTicket:
        self._tickets[agent.name] = ticket
        agent.n_stored = ticket.n_stored
        return ticket

    async def settled(self, agent: AgentRecord) -> None:
        """Wait until the last save of an agent is over; what it is owed is not taken any more."""
        ticket = await asyncio.to_thread(self._last_save, agent)
        if ticket is not None:
            await asyncio.to_thread(ticket.wait)
            if ticket.reference is not None:
                agent.revision = max(agent.revision, ticket.reference.revision)

    def _last_save(self, agent: AgentRecord) -> SaveTicket | None:
        with self._lock:  # which the engine's thread holds while it copies rows
            self._owed_since.pop(agent.name, None)
            return self._tickets.pop(agent.name, None)

    def complete(self, agent: AgentRecord, host: ModelHost) -> None:
        """Wait until what an agent has said is on disk; save again what found no room. For threads.

        The host still runs, and its cache still has what the store lacks.
        """
        ticket = self._tickets.get(agent.name)
        if ticket is None:
            return
        ticket.wait()
        is_owed = agent.name in self._owed_since
        if is_owed or ticket.state is not SaveState.PUBLISHED or ticket.is_partial:
            self.store.flush()
            self.in_engine(agent, host)

    def in_engine(self, agent: AgentRecord, host: ModelHost) -> None:
        """Publish the agent's state and wait until it is on disk. For threads.

        Where the engine has stopped, its tokens are published with the KV that is stored.
        """
        try:
            ticket = host.service.run(lambda _: self.between_steps(host, agent, True)).result()
        except EngineClosedError:
            ticket = self._without_cells(agent)
        if ticket is not None:
            ticket.wait()


def is_news(ref: Reference, agent: AgentRecord, *, is_other: bool) -> bool:
    """Return true if a stored state is later than the agent's own, or as late and another one."""
    return ref.serial > agent.serial or (is_other and ref.serial == agent.serial)

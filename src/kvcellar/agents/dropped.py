"""Keep what rewind, keep, delete and a replaced history drop, until it is brought back.

A state that is dropped is an agent of its own under a name that no agent can have. It shares its
blocks with whoever has them, survives a restart, and is the first to go where the store needs room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcellar.agents.directory import Directory
from kvcellar.agents.leasing import changing
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.names import derived_id
from kvcellar.agents.records.views import AgentInfo
from kvcellar.errors import AgentError, NameTakenError, StoreError, UnknownReferenceError
from kvcellar.store import DROPPED, Store

MOST = 100
"""States that are kept in one store; the oldest go."""

MAX_AGE_S = 30 * 86400.0
"""How long a state is kept."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A state of an agent that can be brought back.

    Attributes:
        agent_id: whose state it is.
        model: of that agent.
        verb: what dropped it: ``rewind``, ``delete``, ``keep`` or ``replace``.
        by: id of the agent that the verb was for.
        act: the same for all that one verb dropped.
        at_s: when, in seconds since 1970.
        n_tokens: length of its history.
        n_turns: turns of it.
        n_messages: messages of it.
        name: of its history in the store.
    """

    agent_id: str
    model: str
    verb: str
    by: str
    act: str
    at_s: float
    n_tokens: int
    n_turns: int
    n_messages: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class DroppedStates:
    """Saves what is dropped, and brings it back.

    Attributes:
        store: where it is kept.
        directory: who there is.
        publisher: saves agents.
    """

    store: Store
    directory: Directory
    publisher: Publisher

    def listed(self) -> Sequence[Dropped]:
        """List what can be brought back, the oldest first. Waits for the store: for threads."""
        return [about for about, _ in _read_all(self.store)]

    def forget_all(self) -> int:
        """Delete all that could be brought back; returns how many. For threads."""
        return _forget(self.store, _names(self.store))

    async def forget(self, name: str) -> None:
        """Delete one state, by the name of its history in the store."""
        await asyncio.to_thread(_forget, self.store, [name])

    async def drop(self, agent: AgentRecord, verb: str, by: str, act: str) -> str | None:
        """Save what an agent has before it is dropped; returns its name. Within the agent's gate.

        Args:
            agent: whose state it is; None is returned where it has said nothing, unless it is
                deleted and something of this very agent was dropped before.
            verb: what drops it: ``rewind``, ``delete``, ``keep`` or ``replace``.
            by: id of the agent that the verb is for.
            act: the same for all that one verb drops.

        Raises:
            StoreError: it cannot be saved; nothing was changed.
        """
        if not agent.tokens and not agent.messages:
            known = await asyncio.to_thread(_read_all, self.store) if verb == "delete" else ()
            if all(state.created_s != agent.created_s for _, state in known):
                return None
        now = await asyncio.to_thread(_next_ns, self.store)
        said = {"id": agent.agent_id, "verb": verb, "by": by, "act": act, "at_s": now / 1e9}
        state = agent.copied(f"{DROPPED}{now:020d}-{uuid.uuid4().hex[:8]}", dropped=said)
        try:
            await self.publisher.publish(state, self.directory.host_of(agent))
        finally:
            await self.publisher.settled(state)
        await asyncio.to_thread(_forget_old, self.store)
        return state.name

    async def undo(self, agent_id: str) -> Sequence[AgentInfo]:
        """Bring back what was dropped of an agent last, or by a ``keep`` of it.

        A deleted agent is there again, under its name. One that went back has its turns again.
        Where the agent has gone on since, or another has its name, what was dropped comes back as
        an agent of another name: nothing is replaced. Each call goes one step further back.

        Returns:
            The agents that are there again, or longer than they were.

        Raises:
            UnknownAgentError: there is none of that name, and none was dropped.
            AgentError: nothing of it was dropped that the store still has.
            StoreError: it cannot be saved; what was dropped can still be brought back.
        """
        states = await asyncio.to_thread(_read_all, self.store)
        mine = [one for one in states if agent_id in (one[0].agent_id, one[0].by)]
        if not mine:
            await self.directory.find(agent_id)
            raise AgentError(
                f"nothing of agent {agent_id!r} can be brought back: nothing was dropped by "
                f"rewind, keep, delete or a replaced history, or the store needed the room"
            )
        last, _ = mine[-1]
        is_whole_act = last.by == agent_id
        mine = [one for one in mine if is_whole_act and one[0].act == last.act] or mine[-1:]
        found = []
        for about, state in mine:
            found.append(await self._bring_back(state, about.agent_id))
            await self.forget(about.name)
        return found

    async def _bring_back(self, state: AgentRecord, agent_id: str) -> AgentInfo:
        await self.directory.refresh()
        back = state.copied(agent_id, dropped=None)
        host = self.directory.host_of(back)
        current = self.directory.named(back.name)
        if current is None:
            with contextlib.suppress(NameTakenError):  # by somebody else, just now
                await self.directory.register(back, host)
                return back.info()
        elif current.created_s == back.created_s:
            async with changing(self.publisher, current):
                if current.is_beginning_of(back):
                    current.take_history(back)
                    await self.publisher.save(current, host)
                    await self.publisher.make_durable(current)
                    return current.info()
        back.created_s = time.time()
        for number in itertools.count(2):
            back.agent_id = derived_id(agent_id, f".{number}")
            if not await self.directory.has(back.agent_id):
                with contextlib.suppress(NameTakenError):
                    await self.directory.register(back, host)
                    return back.info()
        raise AssertionError("there is always another number")


def _read_all(store: Store) -> list[tuple[Dropped, AgentRecord]]:
    """Read all dropped states, the oldest first; one that is damaged is left out. For threads."""
    found = []
    for name in _names(store):
        with contextlib.suppress(StoreError, UnknownReferenceError):
            state = AgentRecord.from_reference(store.get(name))
            dropped = None if state is None else _read(name, state)
            if state is not None and dropped is not None:
                found.append((dropped, state))
    return found


def _read(name: str, state: AgentRecord) -> Dropped | None:
    said = state.dropped or {}
    texts = [said.get(part) for part in ("id", "verb", "by", "act")]
    at_s = said.get("at_s")
    if not all(isinstance(text, str) for text in texts) or not isinstance(at_s, int | float):
        return None
    agent_id, verb, by, act = map(str, texts)
    counts = len(state.tokens), len(state.turns), len(state.messages)
    return Dropped(agent_id, state.model, verb, by, act, float(at_s), *counts, name)


def _forget_old(store: Store) -> None:
    """Delete the states that are too old, and the oldest of too many. For threads."""
    names = _names(store)
    oldest = int((time.time() - MAX_AGE_S) * 1e9)
    too_old = [name for name in names if name < f"{DROPPED}{oldest:020d}"]
    _forget(store, {*too_old, *names[:-MOST]})


def _forget(store: Store, names: Iterable[str]) -> int:
    """Delete dropped states; returns how many there were. For threads."""
    n = 0
    for name in names:
        with contextlib.suppress(UnknownReferenceError):
            store.delete(name)
            n += 1
    return n


def _next_ns(store: Store) -> int:
    """Return nanoseconds since 1970, or more: after all dropped states, also where a clock was set.

    For threads.
    """
    stamps = (name.removeprefix(DROPPED).partition("-")[0] for name in _names(store))
    return max(time.time_ns(), *(int(stamp) + 1 for stamp in stamps if stamp.isdecimal()), 0)


def _names(store: Store) -> list[str]:
    """Return the names of all dropped states, which begin with when; the oldest first."""
    return sorted(name for name in store.reference_names() if name.startswith(DROPPED))

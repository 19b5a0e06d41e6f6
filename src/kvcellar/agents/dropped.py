"""Keep what rewind, keep, delete and a replaced history drop, until it is brought back.

A state that is dropped is an agent of its own under a name that no agent can have. It shares its
blocks with whoever has them, survives a restart, and is the first to go where the store needs room.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.agents.gate import Gate
from kvcellar.agents.marks import next_serial
from kvcellar.agents.records import Agent
from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.store import DROPPED, Store

__all__ = [
    "MAX_AGE_S",
    "MOST",
    "Dropped",
    "as_dropped",
    "brought_back",
    "forget",
    "forget_old",
    "read_all",
]

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


def as_dropped(agent: Agent, verb: str, by: str, act: str) -> Agent:
    """Make the agent that a dropped state is saved as."""
    now = time.time_ns()
    said = {"id": agent.agent_id, "verb": verb, "by": by, "act": act, "at_s": now / 1e9}
    name = f"{DROPPED}{now:020d}-{uuid.uuid4().hex[:8]}"
    return _copied(agent, agent_id=name, dropped=said)


def brought_back(state: Agent, agent_id: str) -> Agent:
    """Make an agent of a dropped state again."""
    return _copied(state, agent_id=agent_id, dropped=None)


def _copied(agent: Agent, **changes: Any) -> Agent:
    """Copy what an agent has said, without what is known of its place in the store."""
    return replace(
        agent,
        revision=0,
        n_stored=0,
        serial=next_serial(agent.serial),
        n_changes=0,
        mark=None,
        gate=Gate(),
        request_id=None,
        expected=[],
        is_waiting=False,
        is_paused=False,
        is_passing=False,
        **changes,
    )


def read_all(store: Store) -> list[tuple[Dropped, Agent]]:
    """Read all dropped states, the oldest first; one that is damaged is left out. For threads."""
    found = []
    for name in _names(store):
        with contextlib.suppress(StoreError, UnknownReferenceError):
            state = Agent.from_reference(store.get(name))
            dropped = None if state is None else _read(name, state)
            if state is not None and dropped is not None:
                found.append((dropped, state))
    return found


def _read(name: str, state: Agent) -> Dropped | None:
    said = state.dropped or {}
    texts = [said.get(part) for part in ("id", "verb", "by", "act")]
    at_s = said.get("at_s")
    if not all(isinstance(text, str) for text in texts) or not isinstance(at_s, int | float):
        return None
    agent_id, verb, by, act = map(str, texts)
    counts = len(state.tokens), len(state.turns), len(state.messages)
    return Dropped(agent_id, state.model, verb, by, act, float(at_s), *counts, name)


def forget_old(store: Store) -> None:
    """Delete the states that are too old, and the oldest of too many. For threads."""
    names = _names(store)
    oldest = int((time.time() - MAX_AGE_S) * 1e9)
    too_old = [name for name in names if name < f"{DROPPED}{oldest:020d}"]
    forget(store, {*too_old, *names[:-MOST]})


def forget(store: Store, names: Sequence[str] | set[str] | None = None) -> int:
    """Delete dropped states, all where none are named; returns how many. For threads."""
    n = 0
    for name in _names(store) if names is None else names:
        with contextlib.suppress(UnknownReferenceError):
            store.delete(name)
            n += 1
    return n


def _names(store: Store) -> list[str]:
    """Names of all dropped states, which begin with when; the oldest first."""
    return sorted(name for name in store.reference_names() if name.startswith(DROPPED))

"""Joins a client's messages to a named agent's history: they continue it, follow it, or branch off.

A name that a person gave to an agent is a promise: its history is never replaced by a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.agents.records.agent import Agent
from kvcellar.hosting.conversation import Message, n_alike, split_begun
from kvcellar.hosting.volatile import apply_rules, match_key


@dataclass(frozen=True, slots=True)
class Joined:
    """The place in an agent's history where a conversation goes on.

    Attributes:
        messages: the whole conversation that is to be answered.
        n_common: leading messages of it that the history has too.
        is_continuing: whether these are all of the history's, and more follow.
        is_appended: whether the client sent what is new alone, and the history was put before it.
        agent_id: whose history it is.
        n_turns: turns of that history up to the last answer that is common.
        added: messages of that history that the client did not send, and that are read behind its
            own leading system messages.
    """

    messages: Sequence[Mapping[str, Any]]
    n_common: int
    is_continuing: bool
    is_appended: bool
    agent_id: str
    n_turns: int
    added: Sequence[Mapping[str, Any]] = ()


def join(agent: Agent, messages: Sequence[Mapping[str, Any]], rules: Collection[str]) -> Joined:
    """Find out how messages meet an agent's history.

    A conversation without a system message has the agent's own. Messages without an answer in them
    that share no beginning with the history, apart from its system message, are new ones behind it.
    """
    known = agent.messages
    n_system = n_system_of(known)
    added: Sequence[Mapping[str, Any]] = ()
    if n_system and not n_system_of(messages):
        added = known[:n_system]
        messages = [*added, *messages]
    mine = [match_key(message, rules) for message in known]
    read = apply_rules(messages, None, rules).messages
    given = [match_key(message, rules) for message in read]
    n = n_alike(mine, given)
    if not agent.is_conversation:
        # What was put behind the messages as tokens cannot be said in messages: it is never gone on
        # from by them.
        return Joined(messages, n, False, False, agent.agent_id, _answered(agent, n), added)
    if n == len(mine) and len(given) > n:
        return Joined(messages, n, True, False, agent.agent_id, len(agent.turns), added)
    if len(known) == 1 == n_system and _goes_on(known[0], messages):
        return Joined(messages, n, True, False, agent.agent_id, 0, added)
    is_new = n == n_system == n_system_of(messages) < len(given)
    said, _ = split_begun(messages)
    if is_new and all(message.get("role") != "assistant" for message in said):
        whole = [*known, *messages[n:]]
        added = [*added, *known[n_system:]]
        return Joined(whole, len(known), True, True, agent.agent_id, len(agent.turns), added)
    return Joined(messages, n, False, False, agent.agent_id, _answered(agent, n), added)


def continues(agent: Agent, messages: Sequence[Mapping[str, Any]], rules: Collection[str]) -> bool:
    """Return whether messages begin with all of an agent's history and go on behind it."""
    joined = join(agent, messages, rules)
    return joined.is_continuing and len(joined.messages) == len(messages)


def _goes_on(known: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation begins with this system message; tools may follow in it."""
    first = messages[0]
    mine, theirs = known.get("content"), first.get("content")
    is_system = first.get("role") == "system" and len(messages) > 1
    return is_system and bool(mine) and str(theirs).startswith(f"{mine}\n\n")


def n_system_of(messages: Sequence[Mapping[str, Any]] | Sequence[Message]) -> int:
    """Count the system messages at the beginning."""
    roles = (message.get("role") for message in messages)
    return next((i for i, role in enumerate(roles) if role != "system"), len(messages))


def _answered(agent: Agent, n_messages: int) -> int:
    """Count the turns up to the last answer among the first messages."""
    numbered = enumerate(agent.turns_with_ends(), 1)
    within = [n for n, (turn, end) in numbered if turn.n_messages < end <= n_messages]
    return within[-1] if within else 0

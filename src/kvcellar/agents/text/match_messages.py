"""Joins a client's messages to a named agent's history: they continue it, follow it, or branch off.

A name that a person gave to an agent is a promise: its history is never replaced by a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.views import TurnRecord
from kvcellar.hosting.conversation import split_begun
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.volatile import apply_rules


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
        known: messages of that history.
        turns: of that history.
        added: messages of that history that the client did not send, and that are read behind its
            own leading system messages.
    """

    messages: Messages
    n_common: int
    is_continuing: bool
    is_appended: bool
    agent_id: str
    n_turns: int
    known: Messages
    turns: tuple[TurnRecord, ...]
    added: Messages

    def holds_for(self, agent: AgentRecord) -> bool:
        """Return true if the agent has the history that the conversation was compared with."""
        return agent.messages is self.known and agent.turns is self.turns


def join(
    agent: AgentRecord, messages: Sequence[Mapping[str, Any]], rules: Collection[str]
) -> Joined:
    """Find out how messages meet an agent's history.

    A conversation without a system message has the agent's own. Messages without an answer in them
    that share no beginning with the history, apart from its system message, are new ones behind it.
    """
    known, given, added = agent.messages, Messages(messages), Messages()
    n_system = n_system_of(known)
    if n_system and not n_system_of(given):
        added = known.prefix(n_system)
        given = added.plus(given)
    n = n_matched(agent, given, rules)

    def joined(n_turns: int, *, is_continuing: bool = False) -> Joined:
        met = (agent.agent_id, n_turns, known, agent.turns, added)
        return Joined(given, n, is_continuing, False, *met)

    if continues(agent, given, n):
        return joined(len(agent.turns), is_continuing=True)
    is_new = agent.is_conversation and n == n_system == n_system_of(given) < len(given)
    said, _ = split_begun(given)
    if is_new and all(message.get("role") != "assistant" for message in said):
        whole, added = known.plus(given.behind(n)), added.plus(known.behind(n_system))
        met = (agent.agent_id, len(agent.turns), known, agent.turns, added)
        return Joined(whole, len(known), True, True, *met)
    return joined(_answered(agent, n))


def n_matched(agent: AgentRecord, messages: Messages, rules: Collection[str]) -> int:
    """Count the messages with which a conversation and an agent's history begin."""
    return agent.messages.n_matched(apply_rules(messages, None, rules).messages, rules)


def continues(agent: AgentRecord, messages: Messages, n: int) -> bool:
    """Return whether messages begin with all of an agent's history and go on behind it.

    What was put behind the messages as tokens cannot be said in messages: it is never gone on from
    by them.

    Args:
        agent: the agent.
        messages: the whole conversation.
        n: messages with which both begin, as ``n_matched`` counts them.
    """
    known = agent.messages
    n_system = n_system_of(known)
    if not agent.is_conversation or (n_system and not n_system_of(messages)):
        return False
    is_longer = n == len(known) < len(messages)
    return is_longer or (len(known) == 1 == n_system and _goes_on(known[0], messages))


def _goes_on(known: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation begins with this system message; tools may follow in it."""
    first = messages[0]
    mine, theirs = known.get("content"), first.get("content")
    is_system = first.get("role") == "system" and len(messages) > 1
    return is_system and bool(mine) and str(theirs).startswith(f"{mine}\n\n")


def n_system_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the system messages at the beginning."""
    roles = (message.get("role") for message in messages)
    return next((i for i, role in enumerate(roles) if role != "system"), len(messages))


def _answered(agent: AgentRecord, n_messages: int) -> int:
    """Count the turns up to the last answer among the first messages."""
    numbered = enumerate(agent.turns_with_ends(), 1)
    within = [n for n, (turn, end) in numbered if turn.n_messages < end <= n_messages]
    return within[-1] if within else 0

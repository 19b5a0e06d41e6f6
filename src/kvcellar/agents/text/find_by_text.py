"""Finds the agent with the longest history whose beginning a client has sent as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.hosting.messages import Messages, n_alike
from kvcellar.hosting.volatile import apply_rules

MOST_NEAR = 16
"""Agents among which a conversation's nearest is looked for."""

_NEARLY = 0.75
"""Share of the words of two system messages by which they are nearly the same."""


@dataclass(frozen=True, slots=True)
class Place:
    """The end of an answer in an agent's history that a conversation goes on from.

    Attributes:
        agent_id: whose.
        model: of that agent.
        position: tokens up to there.
        n_turns: turns up to there.
        n_messages: messages up to there.
        is_end: whether the agent has said nothing since, so that it can go on itself.
        is_busy: whether it is in a turn.
    """

    agent_id: str
    model: str
    position: int
    n_turns: int
    n_messages: int
    is_end: bool
    is_busy: bool


_Known = tuple[Messages, list[bytes]]
"""An agent's messages, and the chain of them."""


class Places:
    """Finds places by chains of digests: one per message, over it, all before it and the tools.

    For any thread: each search goes by what was known when it began.
    """

    def __init__(self, rules: Collection[str]) -> None:
        """Create a finder that knows no conversation yet."""
        self._rules = rules
        self._known: dict[str, _Known] = {}

    def find(
        self,
        agents: Iterable[AgentRecord],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        likely: str | None = None,
    ) -> Place | None:
        """Return the place with most messages; None where no agent has answered a beginning of it.

        Args:
            agents: those that may be meant.
            messages: the whole conversation; the last one is to be answered.
            tools: definitions of its tools.
            likely: id of the agent that is preferred where several have as many tokens.
        """
        said = Messages(messages)
        read = apply_rules(said.prefix(len(said) - 1), tools, self._rules)
        wanted = self._chain(read.messages, read.tools)
        known: dict[str, _Known] = {}
        found: list[tuple[Place, bool, float]] = []
        for agent in agents:
            known[agent.name] = self._chain_of(agent, self._known.get(agent.name))
            place = _last_answer(agent, n_alike(wanted, known[agent.name][1]))
            if place is not None:
                found.append((place, agent.agent_id == likely, agent.used_s))
        self._known = known
        return max(found, key=_rank)[0] if found else None

    def _chain_of(self, agent: AgentRecord, known: _Known | None) -> _Known:
        messages = agent.messages
        if known is None or known[0] is not messages:
            known = (messages, self._chain(messages, agent.tools))
        return known

    def _chain(self, messages: Messages, tools: list[dict[str, Any]] | None) -> list[bytes]:
        digest = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
        chain = []
        for i in range(len(messages)):
            digest = digest.copy()
            digest.update(messages.key(i, self._rules).encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
            chain.append(digest.digest())
        return chain


def _last_answer(agent: AgentRecord, n_messages: int) -> Place | None:
    """Return the end of the last answer among an agent's first messages; None: there is none."""
    answered = [
        (n_turns, end, turn.stop)
        for n_turns, (turn, end) in enumerate(agent.turns_with_ends(), 1)
        if turn.n_messages < end <= n_messages
    ]
    if not answered:
        return None
    n_turns, end, position = answered[-1]
    is_end = end == len(agent.messages) and position == len(agent.tokens)
    is_busy = agent.live.gate.is_taken
    return Place(agent.agent_id, agent.model, position, n_turns, end, is_end, is_busy)


def _rank(found: tuple[Place, bool, float]) -> tuple[int, int, bool, bool, bool, float]:
    """Return the key by which places are compared: the most messages, then tokens, come first."""
    place, is_likely, used_s = found
    return (
        place.n_messages,
        place.position,
        is_likely and place.is_end,
        place.is_end,
        not place.is_busy,
        used_s,
    )


def nearest(
    agents: Sequence[AgentRecord], messages: Sequence[Mapping[str, Any]], likely: str | None
) -> AgentRecord | None:
    """Find the first agent whose conversation is nearly this one; None where there is none.

    Args:
        agents: the likeliest first.
        messages: the conversation.
        likely: id of an agent that is meant if it is there.
    """
    said = {_text_of(m) for m in messages if m.get("role") == "assistant"} - {""}
    words = _words_of_system(messages)
    for agent in agents:
        if agent.agent_id == likely:
            return agent
        if any(m.get("role") == "assistant" and _text_of(m) in said for m in agent.messages):
            return agent
        its = _words_of_system(agent.messages)
        if words and len(words & its) >= _NEARLY * max(len(words), len(its)):
            return agent
    return None


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _words_of_system(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    is_there = bool(messages) and messages[0].get("role") == "system"
    return set(_text_of(messages[0]).split()) if is_there else set()

"""Places at which the histories of a family part, by their tokens.

Two answers to one message are forked in front of it, and part behind it: where one was forked is
how it came about, and what they have in common is more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from kvcellar.agents.records.agent import AgentRecord


def partings(agents: Iterable[AgentRecord]) -> dict[str, tuple[AgentRecord, int]]:
    """Return by name of a history the relative with which it has most tokens in common, and them.

    Relatives are all that were forked from one agent, by whatever steps, and it itself. Each is
    held against those that came before it; who came first is in none. Takes a copy of the tokens of
    families, one family at a time.
    """
    found: dict[str, tuple[AgentRecord, int]] = {}
    for family in _families(agents):
        known = {agent.name: agent for agent in family}
        texts: list[bytes] = []  # in order, so that those who have most in common are neighbours
        owners: list[AgentRecord] = []
        for agent in sorted(family, key=lambda agent: agent.created_s):
            text = agent.tokens.tokens.astype(">u4").tobytes()
            at = bisect_left(texts, text)
            beside = [known[agent.parent]] if agent.parent in known else []
            beside += owners[max(0, at - 1) : at + 1]
            shared = [other.tokens.common_prefix(agent.tokens) for other in beside]
            if owners:
                best = max(shared)
                found[agent.name] = (beside[shared.index(best)], best)
            texts.insert(at, text)
            owners.insert(at, agent)
    return found


def _families(agents: Iterable[AgentRecord]) -> Iterator[list[AgentRecord]]:
    """Yield agents that have a common ancestor, which may be gone; those that are alone in none."""
    known = {agent.name: agent for agent in agents}
    families: dict[str, list[AgentRecord]] = {}
    for agent in known.values():
        root, seen = agent, {agent.name}
        while (above := known.get(root.parent or "")) is not None and above.name not in seen:
            if not root.is_child_of(above):
                break
            root = above
            seen.add(above.name)
        families.setdefault(root.parent or root.name, []).append(agent)
    yield from (family for family in families.values() if len(family) > 1)

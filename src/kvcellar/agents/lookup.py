"""Finds the agent of a conversation: the one that is named, a branch of it, or another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvcellar.agents.directory import Directory
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.names import salt_of
from kvcellar.agents.text.find_by_text import MOST_NEAR, Place, Places, nearest
from kvcellar.agents.text.match_messages import Joined, join
from kvcellar.hosting.text_limits import size_of
from kvcellar.hosting.thread_lanes import Work


class Lookup:
    """Compares conversations with the histories of agents. Changes neither."""

    def __init__(self, directory: Directory, work: Work, rules: Collection[str]) -> None:
        """Create a lookup among the agents of a directory."""
        self._directory = directory
        self._work = work
        self._rules = rules
        self._places = Places(rules)

    async def join(
        self, agent_id: str, messages: Sequence[Mapping[str, Any]], *, model: str | None = None
    ) -> Joined:
        """Find out where a conversation for a named agent goes on: in its history, or in a branch.

        Args:
            agent_id: whom the conversation is for.
            messages: the whole conversation, or what is new in it.
            model: who will answer.

        Returns:
            How the messages meet the agent's history, where they continue it; else, how they meet
            that of the branch that has most of them in common. Where they do not continue that
            either, make another with ``Lifecycle.branch``.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        directory = self._directory
        await directory.refresh()
        agent = directory.known(agent_id, model) or directory.agent(agent_id)
        branches = [a for a in directory.agents(agent.model) if a.branch_of == agent_id]

        def best() -> Joined:
            joined = join(agent, messages, self._rules)
            if joined.is_continuing:
                return joined
            found = [join(branch, messages, self._rules) for branch in branches]
            likely = [joined, *(one for one in found if not one.is_appended)]
            return max(likely, key=lambda one: (one.is_continuing, one.n_common, one.n_turns))

        return await self._work.run(size_of(messages, agent.messages).cost, best)

    async def expect(
        self,
        agent_id: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str,
        likely: str | None = None,
    ) -> None:
        """Find the agent whose history a conversation came close to, for ``why`` of its first turn.

        It has an answer of the conversation's, or nearly its system message, and was used lately.

        Args:
            agent_id: of the new agent that will answer.
            messages: the whole conversation.
            model: who answers.
            likely: id of an agent that is meant without looking.
        """
        salt = salt_of(agent_id)
        alike = (a for a in self._directory.agents(model) if salt_of(a.agent_id) == salt)
        agents = [a for a in alike if a.turns and a.agent_id != agent_id]
        agents.sort(key=lambda agent: (agent.agent_id == likely, agent.used_s), reverse=True)
        del agents[MOST_NEAR:]

        def find() -> AgentRecord | None:
            return nearest(agents, messages, likely)

        cost = size_of(messages).cost + sum(4 * len(agent.tokens) for agent in agents)
        agent, other = self._directory.known(agent_id, model), await self._work.run(cost, find)
        if agent is not None and other is not None:
            agent.live.beside = other.as_it_is()

    async def place(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str,
        likely: str | None = None,
        salt: str = "",
    ) -> Place | None:
        """Find where a conversation goes on from, as ``place_of``, in a thread where that is much.

        Agents of other processes are looked at too.
        """
        await self._directory.refresh()
        cost = size_of(messages, tools).cost
        return await self._work.run(
            cost, self.place_of, messages, tools, model=model, likely=likely, salt=salt
        )

    def place_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str,
        likely: str | None = None,
        salt: str = "",
    ) -> Place | None:
        """Find where a conversation goes on from: the longest answered beginning an agent has.

        It may be of an agent that has gone another way since; fork it there. Looks among the agents
        that are known here.

        Args:
            messages: the whole conversation; the last one is to be answered.
            tools: definitions of its tools.
            model: of the agents that may be meant.
            likely: id of the agent that is preferred where several have as much.
            salt: of the agents that may be meant.
        """
        known = (agent for agent in self._directory.agents(model) if agent.turns)
        agents = [agent for agent in known if salt_of(agent.agent_id) == salt]
        return self._places.find(agents, messages, tools, likely)

"""Agents: named histories that fork, go back, sleep and come back. Start here.

A turn is: find what the cache and the store hold of the history, bring back what is worth it, queue
the request, and when it has ended save what is new, in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from kvcellar.agents import dropped
from kvcellar.agents.checking import check_said
from kvcellar.agents.dropped import Dropped
from kvcellar.agents.durable import stored_state
from kvcellar.agents.history import Message, what_changed
from kvcellar.agents.host import ModelHost
from kvcellar.agents.joining import Joined, continues, join
from kvcellar.agents.lengths import Size, refuse_bytes, refuse_text, size_of
from kvcellar.agents.misses import Miss, miss_beside
from kvcellar.agents.models import ModelRegistry
from kvcellar.agents.places import MOST_NEAR, Place, Places, nearest
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records import (
    Agent,
    AgentInfo,
    Turn,
    checked_id,
    damaged_info,
    derived_id,
    model_tag,
    reference_name,
)
from kvcellar.agents.residence import BroughtBack, ProgressFn, bring_back
from kvcellar.agents.turns import (
    AgentUsage,
    AnswerFn,
    StartFn,
    TurnEnd,
    TurnPlan,
    miss_of,
    plan_turn,
    record_turn,
    usage_of,
)
from kvcellar.agents.volatile import DEFAULT_RULES, RULES, apply_rules, match_key
from kvcellar.agents.work import OTHER_BYTES, Work
from kvcellar.engine import DEFAULTABLE, Engine, FinishEvent, Request, SamplingParams, TokenEvent
from kvcellar.errors import (
    AgentError,
    EngineClosedError,
    NameTakenError,
    PromptError,
    StoreError,
    UnknownAgentError,
    UnknownReferenceError,
)
from kvcellar.history import History
from kvcellar.models.prompts import common_prefix, encode, render
from kvcellar.store import DROPPED, Reference, SaveTicket, Store
from kvcellar.valid import valid_json

__all__ = ["AgentManager", "AgentUsage", "TurnEnd"]

MOST_COUNTED = 4
"""A conversation of so many contexts is counted to its end where somebody asks how long it is."""

VERIFY = ("checksum", "canary")
"""What is asked of stored KV before it is used."""

_DEFAULT = SamplingParams(unset=DEFAULTABLE)
log = logging.getLogger("kvcellar.agents")

T = TypeVar("T")


class AgentManager:
    """All agents of one store. For callers on any event loop and thread.

    Each agent has one turn at a time; turns of different agents run in one batch. Verbs that change
    an agent wait for its turn to end, but ``fork``, ``wait`` and ``describe`` do not.
    """

    def __init__(
        self,
        store: Store,
        models: ModelRegistry,
        *,
        default_model: str = "demo",
        rules: Collection[str] = DEFAULT_RULES,
        verify: str = "checksum",
        control_tokens_in_text: bool = False,
    ) -> None:
        """Find the agents that earlier processes left in the store.

        Args:
            store: where histories are; it stays the caller's to close.
            models: who runs them; it stays the caller's to close.
            default_model: of agents that are created without one.
            rules: names of rules for volatile text that apply; see ``volatile.RULES``.
            verify: what is asked of KV before it is restored: ``checksum``, that its bytes are
                what was saved; ``canary``, besides, that a few rows are what the model computes.
            control_tokens_in_text: let text of messages spell control tokens, which is read as
                text otherwise.

        Raises:
            AgentError: there is no rule, or no way to verify, of that name.
        """
        unknown = set(rules) - RULES.keys()
        if unknown:
            raise AgentError(f"no rule {sorted(unknown)}; there are: {', '.join(RULES)}")
        if verify not in VERIFY:
            raise AgentError(f"verify {verify!r} is unknown; choose one of {', '.join(VERIFY)}")
        self.store = store
        self.models = models
        self.default_model = default_model
        self.rules = tuple(rules)
        self.control_tokens_in_text = control_tokens_in_text
        self._is_verified = verify == "canary"
        self._lock = threading.Lock()
        self._agents: dict[str, Agent] = {}
        self._claimed: set[str] = set()
        """Names of agents that are being made."""
        self._no_agents: dict[str, int] = {}
        """Histories in the store that are no agents, by the revision that was looked at."""
        self._unusable: dict[str, tuple[int, str]] = {}
        """Agents in the store that cannot be used: the revision that was looked at, and why."""
        self._damaged: dict[str, AgentInfo] = {}
        """These, and those of which not even a revision can be read."""
        self.work = Work()
        self._publisher = Publisher(store)
        self._places = Places(self.rules)
        models.before_unload(self._leave_model)
        self._learn(self._news())

    # Who there is ------------------------------------------------------------------------------

    def list(self) -> Sequence[AgentInfo]:
        """All agents, the least recently used first, before them those that are damaged.

        Asks the store, and waits for it.
        """
        self._learn(self._news())
        return self._listed()

    async def listed(self) -> Sequence[AgentInfo]:
        """All agents as ``list`` gives them, without keeping the event loop from other work."""
        await self.refresh()
        return self._listed()

    def _listed(self) -> Sequence[AgentInfo]:
        with self._lock:
            agents = sorted(self._agents.values(), key=lambda agent: agent.used_s)
        return [*self._damaged.values(), *(self._info(agent) for agent in agents)]

    async def refresh(self) -> None:
        """Take over what other processes have published, or deleted, of agents in no turn here.

        Costs one query where nothing has changed.
        """
        self._learn(await asyncio.to_thread(self._news))

    def silent(self, is_meant: Callable[[str], bool]) -> Sequence[str]:
        """Find agents that are known here, are in no turn and have ids that are meant.

        Returns:
            Their ids, longest silent first.
        """
        with self._lock:
            found = [
                agent
                for agent in self._agents.values()
                if is_meant(agent.agent_id) and not agent.gate.is_taken
            ]
        return [agent.agent_id for agent in sorted(found, key=lambda agent: agent.used_s)]

    async def describe(self, agent_id: str, model: str | None = None) -> AgentInfo:
        """One agent, and how much of it is in the cache.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        await self.refresh()
        agent = await self._sought(agent_id, model)
        host = self._host_of(agent)
        if host is None:
            return self._info(agent, 0)
        tokens = agent.token_array()

        def count(engine: Engine) -> int:
            n = engine.match(tokens)
            if agent.is_waiting:  # to look is not to use
                engine.demote(tokens)
            return n

        return self._info(agent, await _in_engine(host, count))

    def why_not(self, agent_id: str, model: str | None = None) -> str:
        """Say in a sentence what there is to say where ``why`` is None.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = self._agent(agent_id, model)
        n = len(agent.turns)
        if agent.is_rewound:
            left = f"it has {n} turn{'s' * (n > 1)} left" if n else "it has no turn left"
            return f"agent {agent_id!r} went back since its last turn; {left}, and nothing is lost"
        if not n:
            return f"agent {agent_id!r} has taken no turn yet, so nothing was lost"
        if n == 1 and agent.parent is None:
            return "nothing was lost: it was the first turn, and there was no history to reuse"
        return "nothing was lost: the last turn reused all of the history"

    def why(self, agent_id: str, model: str | None = None) -> Miss | None:
        """What the last turn had to compute again, and why; None where nothing was lost.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        return self._agent(agent_id, model).miss

    def conversation(self, agent_id: str, model: str | None = None) -> Sequence[Message]:
        """The messages of an agent, oldest first.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        return self._agent(agent_id, model).messages

    def turns(self, agent_id: str, model: str | None = None) -> Sequence[Turn]:
        """The turns of an agent, oldest first.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        return self._agent(agent_id, model).turns

    def identify(
        self,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        model: str | None = None,
    ) -> str | None:
        """The agent that a conversation, or a token history, continues; None where there is none.

        It has to contain the agent's whole history, message for message or token for token; of
        several the longest. Two agents that merely begin alike are never taken for each other.
        """
        self._learn(self._news())
        with self._lock:
            agents = [a for a in self._agents.values() if model in (None, a.model) and a.turns]
        best: tuple[int, float] = (0, 0.0)
        found = None
        if messages is not None:
            read = apply_rules(messages, None, self.rules).messages
            keys = [match_key(message, self.rules) for message in read]
        for agent in agents:
            if messages is not None:
                mine = [match_key(message, self.rules) for message in agent.messages]
                n = len(mine) if mine and keys[: len(mine)] == mine and len(keys) > len(mine) else 0
            else:
                given = tokens or ()
                n = len(agent.tokens)
                n = n if len(given) > n and common_prefix(agent.tokens, given) == n else 0
            if n and (n, agent.used_s) > best:
                best, found = (n, agent.used_s), agent.agent_id
        return found

    async def has(self, agent_id: str) -> bool:
        """Return whether there is an agent of that name, with any model."""
        if self._known(agent_id, None) is None:
            await self.refresh()
        return self._known(agent_id, None) is not None

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
            either, make another with ``branch``.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        await self.refresh()
        agent = self._known(agent_id, model) or await self._sought(agent_id)
        with self._lock:
            branches = [a for a in self._agents.values() if a.branch_of == agent_id]

        def best() -> Joined:
            joined = join(agent, messages, self.rules)
            if joined.is_continuing:
                return joined
            found = [join(a, messages, self.rules) for a in branches if a.model == agent.model]
            likely = [joined, *(one for one in found if not one.is_appended)]
            return max(likely, key=lambda one: (one.is_continuing, one.n_common, one.n_turns))

        return await self.work.run(size_of(messages, agent.messages).cost, best)

    async def branch(self, agent_id: str, joined: Joined, *, model: str | None = None) -> AgentInfo:
        """Fork an agent for a conversation that does not continue it, where the two part.

        Args:
            agent_id: the named agent; the branch is called after it: ``poet.2``, ``poet.3``, ...
            joined: what ``join`` has found.
            model: who will answer.

        Raises:
            UnknownAgentError: the agent is gone.
            AgentError: its history has changed; nothing was made.
            StoreError: the branch cannot be saved; nothing was made.
        """
        parent = self._known(joined.agent_id, model) or await self._sought(joined.agent_id)
        for number in itertools.count(2):
            new_id = derived_id(agent_id, f".{number}")
            if not await self.has(new_id):
                with contextlib.suppress(NameTakenError):  # by somebody else, just now
                    info = await self.fork(
                        parent.agent_id,
                        new_id,
                        turn=joined.n_turns,
                        model=parent.model,
                        branch_of=agent_id,
                    )
                    self._agent(new_id, parent.model).beside = replace(parent, beside=None)
                    return info
        raise AssertionError("there is always another number")

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
        with self._lock:
            agents = [
                a
                for a in self._agents.values()
                if a.model == model and a.turns and a.agent_id != agent_id
            ]
        agents.sort(key=lambda agent: (agent.agent_id == likely, agent.used_s), reverse=True)

        def find() -> Agent | None:
            return nearest(agents[:MOST_NEAR], messages, likely)

        cost = size_of(messages).cost + sum(4 * len(agent.tokens) for agent in agents[:MOST_NEAR])
        agent, other = self._known(agent_id, model), await self.work.run(cost, find)
        if agent is not None and other is not None:
            agent.beside = replace(other, beside=None)

    def place_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str,
        likely: str | None = None,
    ) -> Place | None:
        """Where a conversation goes on from: the longest answered beginning that an agent has.

        Unlike ``identify`` it finds agents that have gone another way since; fork them there. It
        looks among the agents that are known: ``refresh`` takes in those of other processes.

        Args:
            messages: the whole conversation; the last one is to be answered.
            tools: definitions of its tools.
            model: of the agents that may be meant.
            likely: id of the agent that is preferred where several have as much.
        """
        with self._lock:
            agents = [a for a in self._agents.values() if a.model == model and a.turns]
        return self._places.find(agents, messages, tools, likely)

    def prompt_of(
        self,
        host: ModelHost,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_asking: bool = True,
        agent_id: str | None = None,
    ) -> Sequence[int]:
        """The tokens of a conversation, as a turn that is given it has them.

        Args:
            host: the model.
            messages: the whole conversation.
            tools: definitions of its tools; None: those of the agent, if one is named.
            is_asking: end with the opening of an answer.
            agent_id: whose history it goes on from, where that is known.

        Raises:
            ContextError: it is so much longer than the context that not all of it was counted.
            PromptError: the model has no tokenizer.
            ModelError: its template refuses the messages, or there is none.
        """
        if host.tokenizer is None:
            raise PromptError(f"model {host.name!r} has no tokenizer; give tokens")
        agent: Agent | None = None
        model = host.name
        if agent_id is not None:
            agent = self._known(agent_id, model) or self._known(agent_id, None)
            tools = agent.tools if agent is not None and tools is None else tools
        elif "date" in self.rules:  # what a date becomes depends on the history
            place = self.place_of(messages, tools, model=model)
            agent = self._known(place.agent_id, place.model) if place is not None else None
        known = agent.messages if agent is not None else ()
        read = apply_rules(messages, tools, self.rules, known)
        rendered = render(
            host.tokenizer,
            read.messages,
            read.tools,
            is_asking=is_asking,
            control_tokens_in_text=self.control_tokens_in_text,
        )
        refuse_text(host.tokenizer, rendered.text, host.context, times=MOST_COUNTED)
        return encode(host.tokenizer, rendered)

    def histories(self, model: str) -> Sequence[tuple[str, tuple[int, ...], int | None]]:
        """The agents of a model that is in memory: id, tokens, and the request that runs for it."""
        with self._lock:
            agents = [agent for agent in self._agents.values() if agent.model == model]
        host = self.models.host(model)
        key = None if host is None else host.key
        return [
            (a.agent_id, tuple(a.expected) or a.tokens, a.request_id)
            for a in agents
            if a.key == key
        ]

    def text_around(
        self, agent_id: str, position: int, n_tokens: int = 12, model: str | None = None
    ) -> tuple[str, str]:
        """The text before and behind a place in an agent's history, a few tokens each.

        Both are empty where the agent's model is not in memory.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = self._agent(agent_id, model)
        host = self._host_of(agent)
        if host is None or host.tokenizer is None:
            return "", ""
        decode = host.tokenizer.decode
        parts = agent.tokens[max(0, position - n_tokens) : position], agent.tokens[position:]
        return decode(list(parts[0])), decode(list(parts[1][:n_tokens]))

    # Coming and going --------------------------------------------------------------------------

    async def create(
        self,
        agent_id: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_passing: bool = False,
    ) -> AgentInfo:
        """A new agent without a history.

        Args:
            agent_id: None: a name is made up.
            model: None: the default.
            system: its system message.
            tools: definitions of its tools.
            is_passing: save nothing of it until its second turn, or until its model goes.

        Raises:
            AgentNameError: it cannot be a name; nothing was changed.
            AgentError: the name is taken with this model; nothing was changed.
            ContextError: what is said is longer than the model's context; nothing was changed.
            ModelError: the model cannot be loaded; nothing was changed.
            StoreError: it cannot be saved; nothing was changed.
        """
        agent_id = checked_id(agent_id if agent_id is not None else f"agent-{uuid.uuid4().hex[:8]}")
        system, tools = valid_json((system, tools))
        async with self.models.use(model or self.default_model) as host:
            if host.tokenizer is not None:
                refuse_bytes(host.tokenizer, size_of(system, tools).n_bytes, host.context)
            agent = self._new(agent_id, host)
            if system is not None:
                agent.messages = ({"role": "system", "content": system},)
            if tools:
                agent.tools = [dict(tool) for tool in tools]
            agent.is_passing = is_passing
            await self._register(agent, host)
            return agent.info()

    async def delete(
        self, agent_id: str, model: str | None = None, *, is_final: bool = False
    ) -> None:
        """Forget an agent: its cells and its reference; what others share stays.

        ``undo`` brings it back until the store needs the room, unless it is final, or the store
        had no room to keep it.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = await self._sought(agent_id, model)
        await self._delete(agent, "delete", agent_id, uuid.uuid4().hex, is_final=is_final)

    async def _delete(
        self, agent: Agent, verb: str, by: str, act: str, *, is_final: bool = False
    ) -> None:
        async with agent.gate:
            if not is_final:
                await self._publisher.refresh(agent)
                with contextlib.suppress(StoreError):  # a store that is full gets room by it
                    await self._drop(agent, verb, by, act)
            await self._let_go(agent)
            with self._lock:
                self._agents.pop(agent.name, None)
            await self._publisher.settled(agent)
            with contextlib.suppress(UnknownReferenceError):
                await asyncio.to_thread(self.store.delete, agent.name)

    async def forget(self, agent_id: str, model: str | None = None) -> None:
        """Delete an agent and leave what it computed to the cache, for whoever begins alike.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        agent = await self._sought(agent_id, model)
        async with agent.gate:
            with self._lock:
                self._agents.pop(agent.name, None)
            await self._publisher.settled(agent)
            if not agent.is_passing:
                with contextlib.suppress(UnknownReferenceError):
                    await asyncio.to_thread(self.store.delete, agent.name)

    async def finish(self, agent_id: str, model: str | None = None) -> AgentInfo:
        """A sub-agent is done: its private cells are free at once; its history stays stored."""
        agent = await self._sought(agent_id, model)
        async with agent.gate:
            agent.is_finished, agent.is_waiting = True, False
            await self._publisher.save(agent, self._host_of(agent))
            await self._let_go(agent)
        return agent.info()

    # Branches ----------------------------------------------------------------------------------

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
        """A new agent that shares the beginning of another; no KV is copied, here or on disk.

        The other may be generating: then the new one shares what there is by now.

        Args:
            agent_id: the parent.
            new_id: None: a name is made up.
            position: tokens to share; None: all.
            turn: or turns to share, from the beginning, or from the end where negative.
            model: of the parent, where agents of that name belong to several.
            is_passing: save nothing of it until its next turn, or until its model goes.
            branch_of: id of the named agent whose clients are answered by the new one too.

        Raises:
            UnknownAgentError: there is no such parent.
            AgentError: the name is taken, or cannot be one, or there is no such place; nothing was
                changed.
            StoreError: the new one cannot be saved; nothing was changed.
        """
        parent = await self._sought(agent_id, model)
        new_id = (
            checked_id(new_id)
            if new_id is not None
            else derived_id(agent_id, f"-{uuid.uuid4().hex[:6]}")
        )
        host = self._host_of(parent)
        now = await self._as_it_is(parent, host)
        at = now.position_of(position, turn)
        child = replace(
            now,
            agent_id=new_id,
            parent=parent.name,
            parent_position=at,
            parent_created_s=parent.created_s,
            created_s=time.time(),
            used_s=time.time(),
            is_waiting=False,
            is_paused=False,
            is_finished=False,
            miss=None,
            revision=0,
            n_stored=0,
            gate=type(now.gate)(),
            request_id=None,
            expected=[],
            is_passing=is_passing,
            branch_of=branch_of,
            beside=None,
            is_rewound=False,
        )
        child.cut(at, now.turns_of(turn))
        await self._register(child, host)
        return child.info()

    async def rewind(
        self,
        agent_id: str,
        *,
        position: int | None = None,
        turn: int | None = None,
        model: str | None = None,
    ) -> AgentInfo:
        """Go back to a place in the history; ``undo`` brings back what came behind it.

        Args:
            agent_id: whose.
            position: tokens that stay.
            turn: or turns that stay, from the beginning, or from the end where negative.
            model: of the agent, where several have that name.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: there is no such place; nothing was changed.
            StoreError: what is dropped cannot be saved; nothing was changed.
        """
        agent = await self._sought(agent_id, model)
        async with agent.gate:
            await self._publisher.refresh(agent)
            before = agent.tokens
            at, n_turns = agent.position_of(position, turn), agent.turns_of(turn)
            if at < len(before) or (n_turns is not None and n_turns < len(agent.turns)):
                await self._drop(agent, "rewind", agent_id, uuid.uuid4().hex)
            agent.cut(at, n_turns)
            agent.miss, agent.is_rewound = None, True
            agent.advance()
            await self._publisher.save(agent, self._host_of(agent))
            await self._publisher.make_durable(agent)
            await self._let_go(agent, before, len(agent.tokens))
        return agent.info()

    async def keep(self, agent_id: str, model: str | None = None) -> Sequence[str]:
        """Keep this branch and delete its siblings, with all that was forked from them.

        ``undo`` of this one brings back all that it has deleted.

        Returns:
            The ids that are gone.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: one of them is generating; nothing was deleted.
        """
        agent = await self._sought(agent_id, model)
        with self._lock:
            agents = list(self._agents.values())
        doomed = {a.name: a for a in agents if a is not agent and a.is_sibling_of(agent)}
        while True:
            more = {
                a.name: a
                for a in agents
                if a.name not in doomed and any(a.is_child_of(b) for b in doomed.values())
            }
            if not more:
                break
            doomed |= more
        doomed.pop(agent.name, None)
        busy = [a.agent_id for a in doomed.values() if a.gate.is_taken]
        if busy:
            raise AgentError(
                f"{', '.join(busy)} are in a turn, so {agent_id!r} cannot be kept alone; end their "
                f"turns first"
            )
        act = uuid.uuid4().hex
        for other in doomed.values():
            await self._delete(other, "keep", agent_id, act)
        return [other.agent_id for other in doomed.values()]

    # What was dropped ---------------------------------------------------------------------------

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
        states = await asyncio.to_thread(dropped.read_all, self.store)
        mine = [one for one in states if agent_id in (one[0].agent_id, one[0].by)]
        if not mine:
            await self._sought(agent_id)
            raise AgentError(
                f"nothing of agent {agent_id!r} can be brought back: nothing was dropped by "
                f"rewind, keep, delete or a replaced history, or the store needed the room"
            )
        last = mine[-1]
        if last[0].by == agent_id:
            mine = [one for one in mine if one[0].act == last[0].act]
        else:
            mine = [last]
        found = []
        for about, state in mine:
            found.append(await self._bring_back(state, about.agent_id))
            await asyncio.to_thread(dropped.forget, self.store, [about.name])
        return found

    def dropped(self) -> Sequence[Dropped]:
        """List what can be brought back, the oldest first. Waits for the store."""
        return [about for about, _ in dropped.read_all(self.store)]

    def forget_dropped(self) -> int:
        """Delete all that could be brought back; returns how many. Waits for the store."""
        return dropped.forget(self.store)

    async def _drop(self, agent: Agent, verb: str, by: str, act: str) -> str | None:
        """Save what an agent has before it is dropped; returns its name. Within the agent's gate.

        Raises:
            StoreError: it cannot be saved; nothing was changed.
        """
        if not agent.tokens and not agent.messages:
            return None
        state = dropped.as_dropped(agent, verb, by, act)
        try:
            await self._publisher.publish(state, self._host_of(agent))
        finally:
            await self._publisher.settled(state)
        await asyncio.to_thread(dropped.forget_old, self.store)
        return state.name

    async def _bring_back(self, state: Agent, agent_id: str) -> AgentInfo:
        await self.refresh()
        back = dropped.brought_back(state, agent_id)
        host = self._host_of(back)
        with self._lock:
            current = self._agents.get(back.name)
        if current is None:
            with contextlib.suppress(NameTakenError):  # by somebody else, just now
                await self._register(back, host)
                return back.info()
        elif current.created_s == back.created_s:
            async with current.gate:
                await self._publisher.refresh(current)
                if current.is_beginning_of(back):
                    current.take_history(back)
                    await self._publisher.save(current, host)
                    await self._publisher.make_durable(current)
                    return current.info()
        back.created_s = time.time()
        for number in itertools.count(2):
            back.agent_id = derived_id(agent_id, f".{number}")
            if not await self.has(back.agent_id):
                with contextlib.suppress(NameTakenError):
                    await self._register(back, host)
                    return back.info()
        raise AssertionError("there is always another number")

    # Sleep -------------------------------------------------------------------------------------

    async def pause(
        self, agent_id: str, model: str | None = None, *, progress: ProgressFn | None = None
    ) -> AgentInfo:
        """Write all of an agent to disk, then free the cells that only it needs.

        Raises:
            UnknownAgentError: there is none of that name.
            StoreError: it could not be written; its cells are still there.
        """
        agent = await self._sought(agent_id, model)
        async with agent.gate:
            host = self._host_of(agent)
            agent.is_paused, agent.is_waiting = True, False
            if progress is not None:
                progress(0.1, f"saving {len(agent.tokens)} tokens")
            try:
                await self._publisher.publish(agent, host, is_whole=True)
            except BaseException:
                agent.is_paused = False
                raise
            await self._let_go(agent)
            if progress is not None:
                progress(1.0, "saved")
        return agent.info(0)

    async def resume(
        self, agent_id: str, model: str | None = None, *, progress: ProgressFn | None = None
    ) -> BroughtBack:
        """Bring an agent's KV back into cells now, before its next turn asks for it.

        Returns:
            What was there and what came.

        Raises:
            UnknownAgentError: there is none of that name.
            ModelError: its model cannot be loaded.
        """
        agent = await self._sought(agent_id, model)
        async with agent.gate, self.models.use(agent.model) as host:
            await self._publisher.refresh(agent)
            self._check_model(agent, host)
            back = await bring_back(
                host,
                self.store,
                agent.tokens,
                is_wanted=True,
                is_verified=self._is_verified,
                progress=progress,
            )
            released = back.release(host)
            if released is not None:
                await asyncio.wrap_future(released)
            agent.is_paused = agent.is_waiting = agent.is_finished = False
            await self._publisher.save(agent, host)
        return back

    async def wait(self, agent_id: str, model: str | None = None) -> AgentInfo:
        """The agent waits for a tool: its cells are the first to go where memory is short.

        Its next turn ends the wait and brings back what went.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: it is generating.
        """
        agent = await self._sought(agent_id, model)
        if agent.request_id is not None:
            raise AgentError(
                f"agent {agent_id!r} is generating, so it cannot wait for a tool; end its turn"
            )
        agent.is_waiting = True
        host = self._host_of(agent)
        if host is not None:
            tokens = agent.token_array()
            await _in_engine(host, lambda engine: engine.demote(tokens))
        return agent.info()

    # Files -------------------------------------------------------------------------------------

    async def export(
        self,
        agent_id: str,
        file: str | Path,
        model: str | None = None,
        *,
        progress: ProgressFn | None = None,
    ) -> int:
        """Write an agent with its KV to one file; returns its bytes.

        Raises:
            UnknownAgentError: there is none of that name.
            StoreError: it cannot be saved, or the file cannot be written.
        """
        agent = await self._sought(agent_id, model)
        async with agent.gate:
            await self._publisher.save(agent, self._host_of(agent))
            await self._publisher.settled(agent)

            def write() -> int:
                return self.store.export_reference(agent.name, file, on_progress=progress)

            return await asyncio.to_thread(write)

    async def import_file(
        self, file: str | Path, new_id: str | None = None, *, progress: ProgressFn | None = None
    ) -> AgentInfo:
        """Take in an agent that ``export`` wrote; all of it is verified first.

        Args:
            file: the file.
            new_id: its name here; None: the one that it had.
            progress: told how much is done.

        Raises:
            StoreError: the file is none, or damaged, or of no agent; nothing was changed.
            AgentError: the name is taken, or can be none; nothing was changed.
        """
        claims = contextlib.ExitStack()

        def adopt(ref: Reference) -> Reference:
            """Whose history it is, before anything of it is published."""
            agent = Agent.from_reference(ref)
            if agent is None:
                raise StoreError(f"{file} holds a history that is no agent's; nothing changed")
            agent.agent_id = checked_id(agent.agent_id if new_id is None else new_id)
            claims.enter_context(self._claimed_name(agent))
            if self.store.has_reference(agent.name):
                raise _taken(agent)
            return replace(ref, name=agent.name, metadata=agent.metadata())

        def read() -> Agent:
            with claims:
                ref = self.store.import_reference(file, adopt=adopt, on_progress=progress)
                agent = Agent.from_reference(ref)
                assert agent is not None
                with self._lock:
                    self._agents[agent.name] = agent
            return agent

        return (await asyncio.to_thread(read)).info()

    # A turn ------------------------------------------------------------------------------------

    async def generate(
        self,
        agent_id: str,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        role: str = "user",
        params: SamplingParams = _DEFAULT,
        priority: int = 0,
        model: str | None = None,
        progress: ProgressFn | None = None,
        deadline_s: float | None = None,
        answer: AnswerFn | None = None,
        on_start: StartFn | None = None,
        is_continuing: bool = False,
    ) -> AsyncGenerator[TokenEvent | TurnEnd, None]:
        """One turn: what is new in, events out, the last a :class:`TurnEnd`.

        Give one of ``text``, ``messages`` and ``tokens``. Leaving the iteration ends the turn; what
        was sampled by then stays in the history. Turns of one agent run one after the other.

        Args:
            agent_id: whose turn.
            text: what somebody says next.
            messages: the whole conversation, as a client sends it back; what begins with the same
                tokens as the history is not computed again.
            tokens: tokens behind the history.
            tools: definitions of tools; None: as before.
            role: who says ``text``: ``user`` or ``tool``.
            params: how to sample; left out: as the model wants it, or else the likeliest token.
            priority: higher goes first.
            model: to run on; another one than before reads the conversation anew, and its history
                stays what it was.
            progress: told about a restore.
            deadline_s: longest time to wait for room; None for any.
            answer: from its text to the message that is kept, such as one with tool calls.
            on_start: told what the turn is and what the cache has of it, before it is queued.
            is_continuing: refuse ``messages`` that do not continue the agent's history.

        Raises:
            UnknownAgentError: there is none of that name.
            AgentError: the messages do not continue its history, though they have to; nothing was
                changed.
            PromptError: there is nothing to answer, or no room for it; nothing was changed.
            ModelError: the model cannot be loaded, or its template refuses the messages; nothing
                was changed.
        """
        if sum(value is not None for value in (text, messages, tokens)) != 1:
            raise PromptError("give one of text, messages and tokens to a turn")
        agent = await self._sought(agent_id)
        end: TurnEnd | None = None
        async with self.models.use(model or agent.model) as host:
            agent = self._on_model(agent, host)
            async with agent.gate:
                await self._publisher.refresh(agent)
                turn = await self._planned(
                    agent, host, text, messages, tokens, tools, role, is_continuing
                )
                turn.answer = answer
                settings = params.for_model(host.sampling)
                request = Request(History(turn.tokens), settings, priority, deadline_s)
                events = self._run(agent, host, turn, request, progress, on_start)
                async with (
                    self._replacing(agent, is_all_kept=tokens is not None, messages=turn.messages),
                    contextlib.aclosing(events),
                ):
                    async for event in events:
                        if isinstance(event, TurnEnd):
                            end = event
                        else:
                            yield event
        if end is not None:  # the agent is free for its next turn already
            yield end

    async def _planned(
        self,
        agent: Agent,
        host: ModelHost,
        text: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        tokens: Sequence[int] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        role: str,
        is_continuing: bool,
    ) -> TurnPlan:
        """Prepare what a turn brings, in a thread where that is much.

        Raises:
            AgentError: it has to continue the history, and does not.
            ContextError: it is longer than the model's context, as its bytes say.
            PromptError, ModelError: as ``generate``.
        """
        said = (text, messages if messages is not None else agent.messages, tools or agent.tools)
        size = size_of(*said) if tokens is None else Size(0, 0)

        def plan() -> TurnPlan:
            if tokens is None and host.tokenizer is not None:
                refuse_bytes(host.tokenizer, size.n_bytes, host.context)
            new = valid_json((text, messages, tools))
            check_said(new[1], new[2])
            if is_continuing and not continues(agent, new[1] or (), self.rules):
                raise AgentError(
                    f"the history of agent {agent.agent_id!r} was changed while this turn waited "
                    f"for its own; nothing was changed by it; send it again"
                )
            return plan_turn(
                agent,
                host,
                new[0],
                new[1],
                tokens,
                new[2],
                role,
                self.rules,
                control_tokens_in_text=self.control_tokens_in_text,
            )

        return await self.work.run(size.cost + (OTHER_BYTES if tokens is None else 0), plan)

    @contextlib.asynccontextmanager
    async def _replacing(
        self, agent: Agent, *, is_all_kept: bool, messages: Sequence[Message]
    ) -> AsyncIterator[None]:
        """Have what a turn drops of an agent's history where ``undo`` finds it."""
        before, name = agent.turns, None
        is_all_kept |= agent.is_passing or not before
        if not is_all_kept and not continues(agent, messages, self.rules):
            name = await self._drop(agent, "replace", agent.agent_id, uuid.uuid4().hex)
        try:
            yield
        finally:
            if name is not None and agent.turns == before:  # there was no turn
                await asyncio.to_thread(dropped.forget, self.store, [name])

    async def _run(
        self,
        agent: Agent,
        host: ModelHost,
        turn: TurnPlan,
        request: Request,
        progress: ProgressFn | None,
        on_start: StartFn | None,
    ) -> AsyncGenerator[TokenEvent | TurnEnd, None]:
        started = time.perf_counter()
        before = agent.tokens
        host.costs.recall(agent.rates)
        back = await bring_back(
            host,
            self.store,
            tuple(turn.tokens[:-1]),
            is_verified=self._is_verified,
            progress=progress,
        )
        if not agent.turns and agent.miss is not None:
            turn.miss = agent.miss  # of a name that belongs to another model
        done = _Done()

        def on_finish(event: FinishEvent) -> None:
            """In the engine's thread: what the turn computed is still in the cache."""
            with self._lock:
                done.is_over, agent.request_id = True, None
            try:
                done.save = self._record(agent, host, turn, event, before, back)
            except Exception as error:  # a full or closed store must not end the engine
                agent.notes = (*agent.notes, f"the last turn was not saved: {error}")

        first_s: float | None = None
        try:
            if on_start is not None:
                on_start(turn.tokens, back.n_cached + back.n_restored)
            agent.expected = list(turn.tokens)
            stream = await host.service.submit(request, on_finish)
            with self._lock:
                if not done.is_over:
                    agent.request_id = stream.request_id
            try:
                async for event in stream:
                    if isinstance(event, TokenEvent):
                        if first_s is None:
                            first_s = time.perf_counter() - started
                            back.release(host)
                        agent.expected.append(event.token.token_id)
                        yield event
                    elif isinstance(event, FinishEvent):
                        await self._make_durable(agent)
                        usage = usage_of(agent, turn, event, back, first_s)
                        yield TurnEnd(agent.agent_id, event, usage, done.save)
            finally:  # a reader that left: the turn has ended when its history is recorded
                with contextlib.suppress(EngineClosedError):
                    await stream.cancel()
                    async for _ in stream:
                        pass
                await self._make_durable(agent)
        finally:
            back.release(host)
            agent.request_id = None
            agent.expected = []

    async def _make_durable(self, agent: Agent) -> None:
        """Have what a turn said on disk before anybody is told that it has ended."""
        try:
            await self._publisher.make_durable(agent)
        except StoreError as error:
            agent.notes = (*agent.notes, f"the last turn is not on disk yet: {error}")

    def _record(
        self,
        agent: Agent,
        host: ModelHost,
        turn: TurnPlan,
        event: FinishEvent,
        before: tuple[int, ...],
        back: BroughtBack,
    ) -> SaveTicket | None:
        """Take a turn into the agent's history and save it. In the engine's thread."""
        usage = event.usage
        if usage is not None:
            n_computed = usage.prompt_tokens - usage.cached_tokens
            host.costs.learn_prefill(n_computed, usage.time_to_first_token_s)
        agent.miss = miss_of(agent, host, turn, event, before, back)
        if agent.miss is None and agent.beside is not None and usage is not None:
            agent.miss = self._miss_beside(agent.beside, host, turn, usage.cached_tokens)
        if not event.token_ids and event.reason in ("error", "deadline", "cancelled"):
            return None
        record_turn(agent, host, turn, event, before)
        n_kept = agent.turns[-1].start
        if n_kept < agent.n_stored:  # a window's state is at the end of what was stored
            agent.n_stored = 0 if agent.key.layout.window_groups else n_kept
        agent.beside, agent.is_rewound = None, False
        agent.advance()
        agent.is_passing &= len(agent.turns) < 2
        if agent.is_passing:
            return None
        is_interrupted = event.reason not in ("stop", "length")
        return self._publisher.after_turn(host, agent, is_interrupted=is_interrupted)

    def _miss_beside(
        self, other: Agent, host: ModelHost, turn: TurnPlan, n_cached: int
    ) -> Miss | None:
        """What the first turn of a conversation lost against the one that it came close to."""
        if other.key != host.key:
            return None
        pairs = zip(other.messages, turn.messages, strict=False)
        keys = ((match_key(a, self.rules), match_key(b, self.rules)) for a, b in pairs)
        n_known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], keys))
        cause = what_changed(other.messages, turn.messages, n_known, self.rules)
        if (turn.tools or None) != (other.tools or None):
            cause = "tools"
        return miss_beside(other.tokens, turn.tokens, n_cached, cause or "edited", host.tokenizer)

    # Inside ------------------------------------------------------------------------------------

    def _agent(self, agent_id: str, model: str | None = None) -> Agent:
        """The agent of that name; of several models', the one that was used last.

        Asks the store, and waits for it, where none is known.
        """
        agent = self._known(agent_id, model)
        if agent is None:
            self._learn(self._news())
            agent = self._known(agent_id, model)
        return agent if agent is not None else self._nobody(agent_id, model)

    async def _sought(self, agent_id: str, model: str | None = None) -> Agent:
        """As ``_agent``, without keeping the event loop from other work."""
        agent = self._known(agent_id, model)
        if agent is None:
            await self.refresh()
            agent = self._known(agent_id, model)
        return agent if agent is not None else self._nobody(agent_id, model)

    def _known(self, agent_id: str, model: str | None) -> Agent | None:
        with self._lock:
            found = [
                agent
                for agent in self._agents.values()
                if agent.agent_id == agent_id and model in (None, agent.model)
            ]
        return max(found, key=lambda agent: agent.used_s, default=None)

    def _nobody(self, agent_id: str, model: str | None) -> NoReturn:
        for info in self._damaged.values():
            if info.agent_id == agent_id:
                raise AgentError(
                    f"agent {agent_id!r} cannot be read: {info.damage}; `kvcellar store verify` "
                    f"puts it away"
                )
        with self._lock:
            names = sorted({agent.agent_id for agent in self._agents.values()})
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        of = "" if model is None else f" with model {model!r}"
        raise UnknownAgentError(f"no agent {agent_id!r}{of}; there are: {shown or 'none'}")

    def _info(self, agent: Agent, n_cached: int | None = None) -> AgentInfo:
        """The agent as others see it; whether its parent is still there, besides."""
        info = agent.info(n_cached)
        if agent.parent is None:
            return info
        with self._lock:
            parent = self._agents.get(agent.parent)
        return replace(info, is_parent_gone=parent is None or not agent.is_child_of(parent))

    async def _register(self, agent: Agent, host: ModelHost | None) -> None:
        """Make a new agent known, once its state is saved: a save that fails leaves no name behind.

        Raises:
            AgentError: the name is taken; nothing was changed.
            StoreError: it cannot be saved; nothing was changed.
        """
        await self.refresh()
        with self._claimed_name(agent):
            if await asyncio.to_thread(self.store.has_reference, agent.name):
                raise _taken(agent)
            if not agent.is_passing:
                try:
                    await self._publisher.publish(agent, host)
                except BaseException:
                    await self._publisher.settled(agent)
                    raise
            with self._lock:
                self._agents[agent.name] = agent

    @contextlib.contextmanager
    def _claimed_name(self, agent: Agent) -> Iterator[None]:
        """Keep an agent's name for it while it is made; nobody sees an agent of that name yet.

        Raises:
            AgentError: another has it.
        """
        with self._lock:
            if agent.name in self._agents or agent.name in self._claimed:
                raise _taken(agent)
            self._claimed.add(agent.name)
        try:
            yield
        finally:
            with self._lock:
                self._claimed.discard(agent.name)

    def _new(self, agent_id: str, host: ModelHost) -> Agent:
        return Agent(agent_id, host.name, host.key)

    def _on_model(self, agent: Agent, host: ModelHost) -> Agent:
        """The agent of the same name on this model; a fresh one where there is none yet."""
        name = reference_name(agent.agent_id, model_tag(host.key))
        with self._lock:
            if name in self._agents:
                return self._agents[name]
            fresh = self._new(agent.agent_id, host)
            fresh.notes = (
                f"agent {agent.agent_id!r} belongs to model {agent.model!r} as it was; its "
                f"conversation is read anew by {host.name!r}, and its {len(agent.tokens)} tokens "
                f"there are kept",
            )
            fresh.messages = tuple({**m, "content": m.get("content") or ""} for m in agent.messages)
            fresh.tools = agent.tools
            fresh.miss = Miss("other model", len(agent.tokens), 0)
            self._agents[name] = fresh
            return fresh

    def _check_model(self, agent: Agent, host: ModelHost) -> None:
        if agent.key != host.key:
            raise AgentError(
                f"agent {agent.agent_id!r} was saved with another version of model "
                f"{agent.model!r}; its next turn reads the conversation anew, and what is stored "
                f"is kept"
            )

    def _host_of(self, agent: Agent) -> ModelHost | None:
        """The host in whose cache the agent may be; None where its model is not in memory."""
        host = self.models.host(agent.model)
        return host if host is not None and host.key == agent.key else None

    def _news(self) -> _News:
        """Read what the store has of agents that are not known, or known otherwise. For threads."""
        with self._lock:
            agents = list(self._agents.values())
        known = {agent.name: self._publisher.revision_of(agent) for agent in agents}
        damaged = {
            name: why
            for name, why in self.store.damaged_references().items()
            if not name.startswith(DROPPED)
        }
        revisions = _of_agents(self.store.revisions())
        recorded = _of_agents(self.store.recorded_serials())
        news = _News()
        for agent in agents:
            mine = known[agent.name]
            if agent.gate.is_taken or agent.is_passing:
                continue
            latest = recorded.get(agent.name, 0)
            if agent.name not in revisions and not latest:
                if mine and not self.store.has_reference(agent.name):
                    news.gone.append((agent, mine))
            elif revisions.get(agent.name, mine) != mine or latest > agent.serial:
                ref = self._publisher.news_of(agent)
                if ref is not None:
                    news.changed.append((agent, mine, ref))
        for name, revision in (dict.fromkeys(recorded, 0) | revisions).items():
            if name in known or self._no_agents.get(name) == revision:
                continue
            before = self._unusable.get(name)
            if before is not None and before[0] == revision:
                news.unusable[name] = before
                continue
            try:
                found = Agent.from_reference(stored_state(self.store, name))
            except UnknownReferenceError:
                continue
            except StoreError as error:
                news.unusable[name] = revision, str(error)
                continue
            if found is None:
                self._no_agents[name] = revision
            elif found.name == name:
                news.found.append(found)
            else:
                news.unusable[name] = revision, f"it says that it is {found.name!r}"
        news.damaged = damaged | {name: why for name, (_, why) in news.unusable.items()}
        return news

    def _learn(self, news: _News) -> None:
        """Take over what ``_news`` has read, unless it has changed here meanwhile."""
        with self._lock:
            self._unusable = news.unusable
            self._damaged = {name: damaged_info(name, why) for name, why in news.damaged.items()}
            for agent in news.found:
                if agent.name not in self._claimed:
                    self._agents.setdefault(agent.name, agent)
            for agent, revision, ref in news.changed:
                if not agent.gate.is_taken and self._publisher.revision_of(agent) == revision:
                    agent.take(ref)
            for agent, revision in news.gone:
                is_same = self._agents.get(agent.name) is agent
                is_still = is_same and self._publisher.revision_of(agent) == revision
                if is_still and not agent.gate.is_taken:
                    del self._agents[agent.name]

    async def _as_it_is(self, agent: Agent, host: ModelHost | None) -> Agent:
        """The agent at this moment, the turn that it is in included."""
        request_id = agent.request_id
        if request_id is None or host is None:
            await self._publisher.refresh(agent)
            return replace(agent)

        def publish(engine: Engine) -> History | None:
            return engine.publish(request_id)

        tokens = await _in_engine(host, publish)
        now = replace(agent)
        if tokens is not None and len(tokens) > len(agent.tokens) == tokens.common_prefix(
            np.array(agent.tokens, dtype=np.int64)
        ):
            now.tokens = tuple(tokens)
        return now

    async def _let_go(
        self, agent: Agent, tokens: tuple[int, ...] | None = None, keep: int = 0
    ) -> None:
        """Free the cells that only this agent needs: of its history, or of one that it had."""
        host = self._host_of(agent)
        if host is None:
            return
        tokens = agent.tokens if tokens is None else tokens
        array = np.array(tokens, dtype=np.int64)
        with self._lock:
            others = [
                other
                for other in self._agents.values()
                if other is not agent
                and other.key == agent.key
                and not other.is_paused
                and not other.is_finished
            ]
        shared = [common_prefix(tokens, o.expected or o.tokens) for o in others]
        keep = max(keep, *shared) if shared else keep
        with contextlib.suppress(EngineClosedError):
            await _in_engine(host, lambda engine: engine.drop(array, keep))

    def _leave_model(self, host: ModelHost) -> None:
        """A model goes: wait until what its agents have said is on disk."""
        with self._lock:
            agents = [agent for agent in self._agents.values() if agent.key == host.key]
        for agent in agents:
            try:
                if agent.is_passing and agent.turns:
                    self._save_passing(agent, host)
                self._publisher.complete(agent, host)
            except Exception as error:  # the others are saved all the same
                log.error("agent %r could not be saved whole", agent.name, exc_info=error)

    def _save_passing(self, agent: Agent, host: ModelHost) -> None:
        agent.is_passing = False
        self._publisher.in_engine(agent, host)


def _of_agents(numbers: Mapping[str, int]) -> dict[str, int]:
    """Of histories by name those that agents may have; none that were dropped."""
    return {name: n for name, n in numbers.items() if "@" in name and not name.startswith(DROPPED)}


@dataclass(slots=True)
class _News:
    """What the store has of agents that is not known here yet.

    Attributes:
        found: agents that were not known.
        changed: an agent, its revision as it was known, and its state now.
        gone: an agent that is stored no more, and its revision as it was known.
        unusable: agents that cannot be used, the revision that was looked at, and why.
        damaged: these, and all else that cannot be read, and why.
    """

    found: list[Agent] = field(default_factory=list)
    changed: list[tuple[Agent, int | None, Reference]] = field(default_factory=list)
    gone: list[tuple[Agent, int]] = field(default_factory=list)
    unusable: dict[str, tuple[int, str]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Done:
    """What the engine's thread leaves for the caller's."""

    is_over: bool = False
    save: SaveTicket | None = None


def _taken(agent: Agent) -> NameTakenError:
    return NameTakenError(
        f"there is an agent {agent.agent_id!r} with model {agent.model!r} already; choose another "
        f"name, or delete it"
    )


async def _in_engine(host: ModelHost, function: Callable[[Engine], T]) -> T:
    """Call a function in the engine's thread, between two steps."""
    return await asyncio.wrap_future(host.service.run(function))

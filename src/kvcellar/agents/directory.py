"""The directory of agents by name, those of other processes included."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvcellar.agents.external_changes import News, NewsReader
from kvcellar.agents.leasing import changing
from kvcellar.agents.publishing import Publisher, is_news
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.families import partings
from kvcellar.agents.records.misses import Miss
from kvcellar.agents.records.names import is_made_up, model_tag, reference_name, salt_of
from kvcellar.agents.records.views import AgentInfo, TurnRecord, damaged_info
from kvcellar.checks import seen
from kvcellar.errors import AgentError, NameTakenError, UnknownAgentError
from kvcellar.history import History
from kvcellar.hosting.conversation import AgentTokenizer
from kvcellar.hosting.messages import Message
from kvcellar.pictures.tokens import is_placeholder
from kvcellar.space import Space
from kvcellar.store import Store
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.engine import Engine
    from kvcellar.hosting.host import ModelHost
    from kvcellar.hosting.models import ModelRegistry


class Directory:
    """All agents of one store. For any event loop and thread.

    What is asked without ``await`` is answered by what is known here, at once; ``refresh`` and the
    verbs that are awaited ask the store too, in a thread.
    """

    def __init__(self, store: Store, models: ModelRegistry, publisher: Publisher) -> None:
        """Find the agents that earlier processes left in the store."""
        self._store = store
        self._models = models
        self._publisher = publisher
        self._reader = NewsReader(store, publisher)
        self._lock = threading.Lock()
        self._agents: dict[str, AgentRecord] = {}
        self._claimed: set[str] = set()
        """Names of agents that are being made."""
        self._damaged: dict[str, AgentInfo] = {}
        self._learn(self._reader.read([]))

    # For everybody -----------------------------------------------------------------------------

    async def listed(self) -> Sequence[AgentInfo]:
        """Return all agents as ``infos`` does, after asking the store."""
        await self.refresh()
        return self.infos()

    def infos(self) -> Sequence[AgentInfo]:
        """Return all agents that are known here, the least recently used first.

        Before them come those that are damaged.
        """
        return [*self._damaged.values(), *(self.info_of(agent) for agent in self._by_use())]

    def parted(self) -> Sequence[AgentInfo]:
        """Return all agents as ``infos`` does, and where each parts from those of its family.

        Looks at all tokens of families: for threads.
        """
        agents = self._by_use()
        found = partings(agents)
        infos = list(self._damaged.values())
        for agent in agents:
            info = self.info_of(agent)
            if agent.name in found:
                beside, at = found[agent.name]
                info = replace(info, parted_from=beside.agent_id, parted_at=at)
            infos.append(info)
        return infos

    async def refresh(self, agent_id: str | None = None) -> None:
        """Take over what other processes have published, or deleted, of agents in no turn here.

        Args:
            agent_id: of an agent that is looked for, also where that takes asking other machines.
        """
        agents = self.agents()
        self._learn(await asyncio.to_thread(self._read, agents, agent_id))

    async def has(self, agent_id: str) -> bool:
        """Return whether there is an agent of that name, with any model."""
        if self.known(agent_id) is None:
            await self.refresh(agent_id)
        return self.known(agent_id) is not None

    async def describe(self, agent_id: str) -> AgentInfo:
        """Describe one agent, and how much of it is in the cache.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        await self.refresh()
        agent = await self.find(agent_id)
        host = self.host_of(agent)
        if host is None:
            return self.info_of(agent, 0)
        tokens = agent.tokens.tokens
        space = host.reading(len(tokens)).space

        def count(engine: Engine) -> int:
            n = engine.match(tokens, space)
            if agent.is_waiting:  # to look is not to use
                engine.demote(tokens, space)
            return n

        return self.info_of(agent, await host.between_steps(count))

    def silent(self, is_meant: Callable[[str], bool]) -> Sequence[str]:
        """Return ids that are meant, of agents in no turn to which no person gave a title.

        The longest silent is first.
        """
        found = [
            a
            for a in self.agents()
            if is_meant(a.agent_id) and not a.given_title and not a.live.gate.is_taken
        ]
        return [agent.agent_id for agent in sorted(found, key=lambda agent: agent.used_s)]

    def conversation(self, agent_id: str, model: str | None = None) -> Sequence[Message]:
        """Return the messages of an agent, oldest first.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        return self.agent(agent_id, model).messages

    def turns(self, agent_id: str) -> Sequence[TurnRecord]:
        """Return the turns of an agent, oldest first.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        return self.agent(agent_id).turns

    def why(self, agent_id: str) -> Miss | None:
        """Return what the last turn had to compute again, and why; None where nothing was lost.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        return self.agent(agent_id).miss

    def why_not(self, agent_id: str) -> str:
        """Say in a sentence what there is to say where ``why`` is None.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        agent = self.agent(agent_id)
        n = len(agent.turns)
        if agent.is_rewound:
            left = f"it has {n} turn{'s' * (n > 1)} left" if n else "it has no turn left"
            return f"agent {agent_id!r} went back since its last turn; {left}, and nothing is lost"
        if not n:
            return f"agent {agent_id!r} has taken no turn yet, so nothing was lost"
        if n == 1 and agent.parent is None:
            return "nothing was lost: it was the first turn, and there was no history to reuse"
        return "nothing was lost: the last turn reused all of the history"

    def histories(self, host: ModelHost) -> Sequence[tuple[str, History, int | None, Space]]:
        """Return (id, tokens, request that runs for it, space) of a model's agents in memory.

        Those of its adapters are among them.
        """
        models = [one.name for one in (host, *host.adapters.values())]
        found = ((a, self.host_of(a)) for model in models for a in self.agents(model))
        told = [(a, a.live.expected or a.tokens, host) for a, host in found if host is not None]
        return [
            (agent.agent_id, tokens, agent.live.request_id, host.reading(len(tokens)).space)
            for agent, tokens, host in told
        ]

    def text_around(
        self, agent_id: str, position: int, n_tokens: int = 12, model: str | None = None
    ) -> tuple[str, str]:
        """Return the text before and behind a place in an agent's history, a few tokens each.

        Both are empty where the agent's model is not in memory.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        agent = self.agent(agent_id, model)
        host = self.host_of(agent)
        if host is None or host.tokenizer is None:
            return "", ""
        before = agent.tokens[max(0, position - n_tokens) : position]
        behind = agent.tokens[position : position + n_tokens]
        return _with_pictures(host.tokenizer, before), _with_pictures(host.tokenizer, behind)

    # For those who work with agents ------------------------------------------------------------

    def agents(self, model: str | None = None) -> list[AgentRecord]:
        """Return all agents that are known here, of one model or of any."""
        with self._lock:
            return [agent for agent in self._agents.values() if model in (None, agent.model)]

    def known(self, agent_id: str, model: str | None = None) -> AgentRecord | None:
        """Return the agent of that name; of several models', the one that was used last."""
        found = [agent for agent in self.agents(model) if agent.agent_id == agent_id]
        return max(found, key=lambda agent: agent.used_s, default=None)

    def named(self, name: str) -> AgentRecord | None:
        """Return the agent whose history has that name in the store."""
        with self._lock:
            return self._agents.get(name)

    def agent(self, agent_id: str, model: str | None = None) -> AgentRecord:
        """Return the agent of that name, as ``known`` does.

        Raises:
            UnknownAgentError: none of that name is known here.
        """
        return self.known(agent_id, model) or self._nobody(agent_id, model)

    async def find(self, agent_id: str, model: str | None = None) -> AgentRecord:
        """Return the agent of that name, after asking the store where none is known.

        Raises:
            UnknownAgentError: there is none of that name.
        """
        if self.known(agent_id, model) is None:
            await self.refresh(agent_id)
        return self.agent(agent_id, model)

    def host_of(self, agent: AgentRecord) -> ModelHost | None:
        """Return the host in whose cache the agent may be; None: its model is not in memory."""
        host = self._models.host(agent.model)
        if host is None:
            return None
        host = host.isolated(agent.key.salt)
        return host if host.key == agent.key else None

    def info_of(self, agent: AgentRecord, n_cached: int | None = None) -> AgentInfo:
        """Describe an agent to others, and whether its parent is still there."""
        info = agent.info(n_cached)
        if agent.parent is None:
            return info
        parent = self.named(agent.parent)
        return replace(info, is_parent_gone=parent is None or not agent.is_child_of(parent))

    async def register(self, agent: AgentRecord, host: ModelHost | None) -> None:
        """Make a new agent known, once its state is saved: a save that fails leaves no name behind.

        Raises:
            NameTakenError: the name is taken; nothing was changed.
            StoreError: it cannot be saved; nothing was changed.
        """
        await self.refresh(agent.agent_id)
        with self.claimed_name(agent):
            async with changing(self._publisher, agent, is_read=False):
                if await asyncio.to_thread(self._store.has_reference, agent.name):
                    raise name_taken(agent)
                if not agent.live.is_passing:
                    try:
                        await self._publisher.publish(agent, host)
                    except BaseException:
                        await self._publisher.settled(agent)
                        raise
                self.add(agent)

    @contextlib.contextmanager
    def claimed_name(self, agent: AgentRecord) -> Iterator[None]:
        """Keep an agent's name for it while it is made; nobody sees an agent of that name yet.

        Raises:
            NameTakenError: another has it.
        """
        with self._lock:
            if agent.name in self._agents or agent.name in self._claimed:
                raise name_taken(agent)
            self._claimed.add(agent.name)
        try:
            yield
        finally:
            with self._lock:
                self._claimed.discard(agent.name)

    def add(self, agent: AgentRecord) -> None:
        """Make an agent known whose name is claimed for it."""
        with self._lock:
            self._agents[agent.name] = agent

    def remove(self, agent: AgentRecord) -> None:
        """Forget an agent."""
        with self._lock:
            self._agents.pop(agent.name, None)

    def on_model(self, agent: AgentRecord, host: ModelHost) -> AgentRecord:
        """Return the agent of the same name on this model; a fresh one where there is none yet.

        Another model goes on from what was said to it. The same model as it is now (in another
        ``kv_dtype``, for other lengths of RoPE) goes on from all that was said.
        """
        name = reference_name(agent.agent_id, model_tag(host.key))
        with self._lock:
            there = self._agents.get(name)
            if there is None:
                there = self._agents[name] = AgentRecord(agent.agent_id, host.name, host.key)
            elif not there.is_older_state_of(agent):
                return there
            was, now = (key.layout.kv_dtype for key in (agent.key, host.key))
            is_other = (agent.model, was) == (host.name, now)
            there.notes = (
                f"agent {agent.agent_id!r} belongs to model {agent.model!r} with K and V in {was}"
                f"{', as it was' if is_other else ''}; its conversation is read anew by "
                f"{host.name!r} in {now}, and its {len(agent.tokens)} tokens there are kept",
            )
            there.read_anew(agent)
            return there

    # Inside ------------------------------------------------------------------------------------

    def _read(self, agents: Sequence[AgentRecord], agent_id: str | None) -> News:
        """Read what the store has beyond these agents, after asking other machines. For threads."""
        if self._store.shared is not None:
            self._store.shared.pull_all(agent_id)
        return self._reader.read(agents)

    def _by_use(self) -> list[AgentRecord]:
        """Return all agents that are known here, the least recently used first."""
        return sorted(self.agents(), key=lambda agent: agent.used_s)

    def _nobody(self, agent_id: str, model: str | None) -> NoReturn:
        for info in self._damaged.values():
            if info.agent_id == agent_id:
                raise AgentError(
                    f"agent {agent_id!r} cannot be read: {info.damage}; `kvcellar store verify` "
                    f"puts it away"
                )
        salt = salt_of(agent_id)
        known = {a.agent_id for a in self.agents() if not is_made_up(a.agent_id)}
        names = sorted(name for name in known if salt_of(name) == salt)
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        of = "" if model is None else f" with model {seen(model)}"
        raise UnknownAgentError(f"no agent {seen(agent_id)}{of}; there are: {shown or 'none'}")

    def _learn(self, news: News) -> None:
        """Take over what was read, unless it has changed here meanwhile."""
        with self._lock:
            self._damaged = {name: damaged_info(name, why) for name, why in news.damaged.items()}
            for agent in news.found:
                if agent.name not in self._claimed:
                    self._agents.setdefault(agent.name, agent)
            for agent, revision, ref in news.changed:
                is_other = self._publisher.revision_of(agent) == revision  # else KV was saved here
                if not agent.live.gate.is_taken and is_news(ref, agent, is_other=is_other):
                    agent.take(ref)
            for agent, revision in news.gone:
                is_same = self._agents.get(agent.name) is agent
                is_still = is_same and self._publisher.revision_of(agent) == revision
                if is_still and not agent.live.gate.is_taken:
                    del self._agents[agent.name]


def name_taken(agent: AgentRecord) -> NameTakenError:
    """Return the refusal of a name that an agent has already."""
    return NameTakenError(
        f"there is an agent {agent.agent_id!r} with model {agent.model!r} already; go on with "
        f"that one, choose another name, or delete it"
    )


def _with_pictures(tokenizer: AgentTokenizer, tokens: IntArray) -> str:
    """Return the text of tokens, with a word for each picture that some of them stand for."""
    is_row = is_placeholder(tokens)
    edges = [0, *(np.flatnonzero(np.diff(is_row)) + 1).tolist(), len(tokens)]
    return "".join(
        "[picture]" if is_row[start] else tokenizer.decode(tokens[start:stop].tolist())
        for start, stop in itertools.pairwise(edges)
        if stop > start
    )

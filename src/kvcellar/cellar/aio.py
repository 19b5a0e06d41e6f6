"""The cellar for asyncio: what runs a model for agents, and what agents can do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from kvcellar.agents import (
    AgentInfo,
    AgentManager,
    Hosting,
    Message,
    ModelHost,
    ModelRegistry,
    Turn,
    TurnEnd,
)
from kvcellar.agents.text.reading import conversation_apart, worded
from kvcellar.cellar.answers import Answer, Asking, Why, answer_of_request
from kvcellar.cellar.asking import Said, Wishes, each_of, messages_of
from kvcellar.cellar.html import agent_html, cellar_html
from kvcellar.cellar.shown import shown
from kvcellar.cellar.streams import AsyncStream, all_of
from kvcellar.engine import EngineStats, FinishEvent, GeneratedToken, Request
from kvcellar.errors import AgentError, ConfigError, NameTakenError, PromptError
from kvcellar.grammar.grammars import Grammars
from kvcellar.history import History
from kvcellar.hosting.loader import limit_of
from kvcellar.models import LoadOptions
from kvcellar.models.adapter_names import adapted
from kvcellar.models.files.places import full_path
from kvcellar.store import Store, default_store
from kvcellar.valid import valid_text

if TYPE_CHECKING:
    from kvcellar.models.options import ProgressFn

T = TypeVar("T")

Prompt = str | Sequence[Mapping[str, Any]]
"""A text to go on from, or the messages of a conversation to answer."""


class AsyncCellar:
    """A model, its engine and its store, for asyncio. Enter it with ``async with``.

    Attributes:
        model: name of the model that answers, with its adapter.
    """

    def __init__(
        self,
        options: LoadOptions,
        *,
        store: str | Path | None = None,
        shared: str | None = None,
        memory: str | int | None = None,
        progress: ProgressFn | None = None,
    ) -> None:
        """Create a cellar that has nothing open yet; ``kvcellar.open_async`` says what it takes."""
        if len(options.adapters) > 1:
            raise ConfigError(
                f"a cellar answers with one adapter, and {', '.join(options.adapters)} were given; "
                f"open one for each, or serve them"
            )
        path = full_path(str(options.model))
        self.model = adapted(path, next(iter(options.adapters), ""))
        self._options = replace(options, model=path)
        self._folder = default_store() if store is None else Path(store).expanduser()
        self._shared = shared
        self._memory = None if memory is None else str(memory)
        self._progress = progress
        self._resources = contextlib.ExitStack()
        self._making = asyncio.Lock()
        self._agents: AgentManager | None = None
        self._host: ModelHost | None = None

    async def __aenter__(self) -> AsyncCellar:
        """Open the store and load the model.

        Raises:
            ModelError, BackendError, ConfigError, StoreError: it cannot be; nothing is left open.
        """
        await asyncio.to_thread(self._open)
        try:
            async with self.manager.models.use(self.model) as host:
                self._host = host
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open(self) -> None:
        """Open what the cellar consists of, but load no model."""
        if self._agents is not None:
            raise ConfigError(f"the cellar of {self.model!r} is open already; make another one")
        limit = limit_of(self._memory, self._options)
        hosting = Hosting.within(limit, self._options, models=[self._options])
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(Store(self._folder, hosting.store, shared=self._shared))
            models = ModelRegistry(lambda name: self._load(hosting, name), **hosting.registry)
            stack.callback(models.close)
            self._agents = AgentManager(store, models, default_model=self.model)
            self._resources = stack.pop_all()

    def _load(self, hosting: Hosting, name: str) -> ModelHost:
        with shown(f"loading {name}", self._progress) as report:
            return hosting.open(name, report)

    async def aclose(self) -> None:
        """End what runs, write what is unsaved, and let go of the model. May be called twice."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Close from a thread without an event loop."""
        self._host = None
        self._resources.close()

    # Agents ------------------------------------------------------------------------------------

    async def agent(self, name: str | None = None, *, system: str | None = None) -> AsyncAgent:
        """Return the agent of a name, which is made where there is none.

        Args:
            name: None: a new agent, whose name is made up.
            system: its system message. Of an agent that is there it has to be the same.

        Raises:
            AgentNameError: it cannot be a name; nothing was made.
            AgentError: the agent is there with another system message; it is as it was.
            StoreError: it cannot be saved; nothing was made.
        """
        directory, lifecycle = self.manager.directory, self.manager.lifecycle
        async with self._making:  # two who ask for one name at once get one agent
            if name is None or not await directory.has(name):
                try:
                    info = await lifecycle.create(name, model=self.model, system=system)
                    return AsyncAgent(self, info.agent_id)
                except NameTakenError:  # by another process, just now
                    if name is None:
                        raise
                    await directory.refresh()
        found = AsyncAgent(self, name)
        if system is not None and found.system != system:
            raise AgentError(
                f"agent {name!r} is there already, with "
                f"{'no' if found.system is None else 'another'} system message; choose another "
                f"name, delete it, or leave system out to go on with it"
            )
        return found

    async def agents(self) -> list[AsyncAgent]:
        """Return all agents of the store, the one that was used last at the end."""
        infos = await self.manager.directory.listed()
        return [AsyncAgent(self, info.agent_id) for info in infos if info.damage is None]

    async def import_agent(self, file: str | Path, name: str | None = None) -> AsyncAgent:
        """Take in an agent from a file that ``export`` wrote; all of it is verified first.

        Raises:
            AgentError, StoreError: the file is damaged, or the name is taken; nothing was changed.
        """
        info = await self.manager.sleep.import_file(Path(file).expanduser(), name)
        return AsyncAgent(self, info.agent_id)

    # Completions -------------------------------------------------------------------------------

    @overload
    async def complete(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: str, **how: Unpack[Asking]
    ) -> Answer: ...

    @overload
    async def complete(self, prompts: Sequence[Prompt], **how: Unpack[Asking]) -> list[Answer]: ...

    async def complete(
        self, prompts: str | Sequence[Prompt], **how: Unpack[Asking]
    ) -> Answer | list[Answer]:
        """Go on from texts, or answer conversations, all in one batch; nothing is remembered.

        Args:
            prompts: one text; or several, each a text or the messages of a conversation. What they
                begin alike with is computed once.
            how: a form of the answers, tools for conversations, and settings of sampling, as
                :class:`Asking`.

        Returns:
            One answer for one text, else as many as there are prompts, in their order.

        Raises:
            PromptError: a prompt is empty or too long.
            KVCellarError: the first error of any of them, once all have ended.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = [Wishes.of(how) for _ in listed]
        pairs = list(zip(listed, asked, strict=True))
        encoded = await asyncio.to_thread(lambda: [self._encoded(*pair) for pair in pairs])
        found = await all_of(list(map(self._run, encoded, asked)))
        return found[0] if isinstance(prompts, str) else found

    def _encoded(self, prompt: Prompt, wishes: Wishes) -> History:
        host = self.host
        if not isinstance(prompt, str):
            messages = wishes.show(host, messages_of(prompt, wishes.role))
            reading = wishes.read(host, (), [], messages)
            if reading is None:
                return self.manager.turns.prompt_of(host, messages, [])
            return self.manager.turns.prompt_of(
                host, *worded(messages, wishes.tools or [], reading, host)
            )
        wishes.read_text(host)
        if host.tokenizer is None:
            raise PromptError(f"model {host.name!r} has no tokenizer, so it reads no text")
        return History(host.tokenizer.encode(valid_text(prompt)))

    async def _run(self, prompt: History, wishes: Wishes) -> Answer:
        params = (await wishes.hold(self.grammars)).for_model(self.host.sampling)
        wishes.begin(prompt)
        reading = wishes.reading
        request = Request(prompt, params, space=self.host.space)
        if reading is not None:
            request = replace(request, marks=reading.marks, finder=reading.finder)
        tokens: list[GeneratedToken] = []
        async with await self.host.service.submit(request) as events:
            async for event in events:
                if isinstance(event, GeneratedToken):
                    tokens.append(event)
                elif isinstance(event, FinishEvent):
                    parser = None if reading is None else reading.parser()
                    if parser is not None:
                        parser.push(event.text)
                        parser.flush()
                    return answer_of_request(event, tokens, parser, wishes.notes)
        raise AssertionError("a request ends with a finish")

    # What it is --------------------------------------------------------------------------------

    @property
    def manager(self) -> AgentManager:
        """All verbs of agents, as :class:`kvcellar.agents.AgentManager` has them.

        Raises:
            ConfigError: the cellar is not open.
        """
        if self._agents is None:
            raise ConfigError(f"the cellar of {self.model!r} is not open; enter it with async with")
        return self._agents

    @property
    def host(self) -> ModelHost:
        """The model in memory with its engine.

        Raises:
            ConfigError: the cellar is not open.
        """
        if self._host is None:
            raise ConfigError(f"the cellar of {self.model!r} is not open")
        return self._host

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiles what answers are held to."""
        return Grammars()

    @property
    def context(self) -> int:
        """The longest conversation that the model can read, in tokens."""
        return self.host.context

    async def stats(self) -> EngineStats:
        """Return the engine's counts: cells, requests, tokens that were reused."""
        return await self.host.service.stats()

    def __repr__(self) -> str:
        if self._host is None:
            return f"<{type(self).__name__} of {self.model!r}, not open>"
        cache = self._host.engine.cache
        return (
            f"<{type(self).__name__} of {self.model!r}: {cache.capacity} cells in "
            f"{cache.config.kv_dtype}, store in {self._folder}>"
        )

    def _repr_html_(self) -> str:
        if self._host is None or self._agents is None:
            return ""
        return cellar_html(self._host, self._agents.directory)


class AsyncAgent:
    """An agent: a history with a name, which forks, goes back, sleeps and comes back.

    Attributes:
        name: its name, in the store and over HTTP too. Where another process did not let go of the
            agent, an answer is in a branch of it, and this is the branch from then on; the
            answer's ``usage.notes`` say so.
    """

    def __init__(self, cellar: AsyncCellar, name: str) -> None:
        """Refer to an agent by its name; ``AsyncCellar.agent`` makes one where there is none."""
        self.name = name
        self._cellar = cellar

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._cellar.model!r}>"

    def _repr_html_(self) -> str:
        return agent_html(self.name, self._cellar.manager.directory)

    # Talking -----------------------------------------------------------------------------------

    async def say(self, said: Said, **how: Unpack[Asking]) -> Answer:
        """Say something and return the whole answer, which joins the history.

        Args:
            said: a text, a message or several: what is new, behind the history.
            how: pictures, tools, a form of the answer, and settings of sampling, as
                :class:`Asking`.

        Raises:
            KVCellarError: as ``stream``.
        """
        async with self.stream(said, **how) as stream:
            async for _ in stream:
                pass
            return stream.answer

    def stream(self, said: Said, **how: Unpack[Asking]) -> AsyncStream:
        """Say something and iterate over the answer's text as it comes.

        Leaving its ``async with`` block ends the answer; what was said by then is in the history.

        Raises:
            PromptError: there is nothing to answer, or no room for it; nothing was changed.
            ModelError: the model has no chat template, or it refuses the messages; nothing was
                changed.
            ConfigError, GrammarError: the answer cannot be what is asked for; nothing was changed.
            PictureError: a picture cannot be read, or the model reads text alone; nothing was
                changed.
        """
        wishes = Wishes.of(how)
        events = self._events(messages_of(said, wishes.role), wishes)
        return AsyncStream(events, wishes, self._go_on_as)

    async def _events(
        self, new: list[dict[str, Any]], wishes: Wishes
    ) -> AsyncGenerator[GeneratedToken | TurnEnd, None]:
        """Run a turn."""
        manager, cellar = self._cellar.manager, self._cellar
        agent = await manager.directory.find(self.name)
        wishes.read(cellar.host, agent.messages, agent.tools, new)
        new = await asyncio.to_thread(wishes.show, cellar.host, new)
        turn = Turn(
            self.name,
            behind=new,
            tools=wishes.tools,
            params=await wishes.hold(cellar.grammars),
            model=cellar.model,
            reading=wishes.reading,
        )
        async with contextlib.aclosing(manager.turns.generate(turn)) as events:
            async for event in events:
                yield event

    def _go_on_as(self, name: str) -> None:
        """Refer to the agent that has answered: a branch, if another process was talking here."""
        self.name = name

    # Branches ----------------------------------------------------------------------------------

    async def fork(
        self, name: str | None = None, *, turn: int | None = None, position: int | None = None
    ) -> AsyncAgent:
        """Make an agent that shares the beginning of this one; no KV is copied.

        Args:
            name: None: made up from this one's.
            turn: turns to share, from the beginning, or from the end where negative; None: all.
            position: or tokens to share.

        Raises:
            AgentError: the name is taken, or cannot be one, or there is no such place; nothing was
                changed.
        """
        lifecycle = self._cellar.manager.lifecycle
        info = await lifecycle.fork(self.name, name, turn=turn, position=position)
        return AsyncAgent(self._cellar, info.agent_id)

    async def branch(self, n: int, *, turn: int | None = None) -> AsyncBranches:
        """Fork this agent ``n`` times; the branches answer in one batch.

        Raises:
            ConfigError: ``n`` is below 1; nothing was made.
        """
        if n < 1:
            raise ConfigError(f"there have to be branches, got n={n}")
        return AsyncBranches([await self.fork(turn=turn) for _ in range(n)])

    async def keep(self) -> list[str]:
        """Keep this branch and delete its siblings, with all that was forked from them.

        ``undo`` of this one brings them back.

        Returns:
            The names that are gone.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        return await self._keep(None)

    async def _keep(self, among: Sequence[str] | None) -> list[str]:
        return list(await self._cellar.manager.lifecycle.keep(self.name, among))

    async def rename(self, title: str) -> AgentInfo:
        """Give it another title, for people; its name stays. Empty: the first words said to it.

        Raises:
            AgentNameError: the title is too long; nothing was changed.
        """
        return await self._cellar.manager.lifecycle.rename(self.name, title)

    async def rewind(self, turn: int = -1, *, position: int | None = None) -> AgentInfo:
        """Go back; ``undo`` brings back what is dropped.

        Args:
            turn: turns that stay, from the beginning, or from the end where negative.
            position: or tokens that stay.

        Raises:
            AgentError: there is no such place; nothing was changed.
        """
        at = None if position is not None else turn
        lifecycle = self._cellar.manager.lifecycle
        return await lifecycle.rewind(self.name, turn=at, position=position)

    async def undo(self) -> list[AsyncAgent]:
        """Bring back what was dropped last of this agent, by rewind, keep or delete.

        Raises:
            AgentError: nothing was dropped.
        """
        infos = await self._cellar.manager.dropped.undo(self.name)
        return [AsyncAgent(self._cellar, info.agent_id) for info in infos]

    # Coming and going --------------------------------------------------------------------------

    async def pause(self) -> AgentInfo:
        """Have all of it on disk and none of it in memory; its next turn brings it back."""
        return await self._cellar.manager.sleep.pause(self.name)

    async def resume(self) -> int:
        """Load its KV into the cache; return how many tokens came from the store."""
        back = await self._cellar.manager.sleep.resume(self.name)
        return back.n_restored

    async def export(self, file: str | Path) -> int:
        """Write it with its KV to one file; return the bytes of that."""
        return await self._cellar.manager.sleep.export(self.name, Path(file).expanduser())

    async def delete(self, *, forever: bool = False) -> None:
        """Forget it; what others share stays. ``undo`` brings it back, unless it is forever."""
        await self._cellar.manager.lifecycle.delete(self.name, is_final=forever)

    # What it is --------------------------------------------------------------------------------

    @property
    def messages(self) -> Sequence[Message]:
        """Messages of its conversation, oldest first, with thoughts and calls apart from text."""
        agent = self._cellar.manager.directory.agent(self.name)
        return tuple(conversation_apart(agent, self._cellar.host))

    @property
    def system(self) -> str | None:
        """Text of its system message; None where it has none."""
        first = next(iter(self.messages), {})
        return str(first.get("content")) if first.get("role") == "system" else None

    async def info(self) -> AgentInfo:
        """Return what is known of it: tokens, turns, parent, and how much the cache holds."""
        return await self._cellar.manager.directory.describe(self.name)

    def why(self) -> Why:
        """Return what its last turn had to compute again, and why."""
        directory = self._cellar.manager.directory
        miss = directory.why(self.name)
        if miss is None:
            return Why(directory.why_not(self.name))
        return Why(f"{miss.tokens_lost} tokens were computed again: {miss.advice}", miss)


class AsyncBranches(Sequence[AsyncAgent]):
    """Branches of one agent, which answer in one batch."""

    def __init__(self, agents: Sequence[AsyncAgent]) -> None:
        """Group agents that were forked from one."""
        self._agents = list(agents)

    def __len__(self) -> int:
        return len(self._agents)

    @overload
    def __getitem__(self, index: int) -> AsyncAgent: ...

    @overload
    def __getitem__(self, index: slice) -> list[AsyncAgent]: ...

    def __getitem__(self, index: int | slice) -> AsyncAgent | list[AsyncAgent]:
        return self._agents[index]

    def __iter__(self) -> Iterator[AsyncAgent]:
        return iter(self._agents)

    async def say(self, said: Said | Sequence[Said], **how: Unpack[Asking]) -> list[Answer]:
        """Say the same to all branches, or to each its own; return their answers, in their order.

        A list of texts, or of lists of messages, has one for each branch; a text, a message or a
        list of messages is for all. Branch i samples with the seed plus i, so one seed gives
        several answers. Log probabilities come with each answer, for whoever chooses by
        ``mean_logprob``.

        Raises:
            ConfigError: there are more or fewer texts than branches; nothing was said.
            KVCellarError: the first error of any branch, once all have ended.
        """
        calls = []
        each = each_of(said, len(self._agents))
        for number, (agent, own) in enumerate(zip(self._agents, each, strict=True)):
            settings: Asking = {"logprobs": 0, **how}
            seed = settings.get("seed")
            if seed is not None:
                settings["seed"] = seed + number
            calls.append(agent.say(own, **settings))
        return await all_of(calls)

    async def keep(self, index: int) -> AsyncAgent:
        """Keep one of the branches and delete the others; ``undo`` of it brings them back.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        kept = self._agents[index]
        await kept._keep([one.name for one in self._agents])
        self._agents = [kept]
        return kept

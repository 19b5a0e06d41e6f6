"""The cellar for programs without an event loop: the same verbs, which wait."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from kvcellar.agents import AgentInfo, Message
from kvcellar.cellar.aio import AsyncAgent, AsyncBranches, AsyncCellar, Prompt
from kvcellar.cellar.answers import Answer, Asking, Why
from kvcellar.cellar.asking import Said
from kvcellar.cellar.streams import AsyncStream
from kvcellar.engine import EngineStats
from kvcellar.errors import ConfigError

T = TypeVar("T")

_PATIENCE_S = 5.0
"""Seconds that calls have for ending by themselves when their cellar closes."""


class _Loop:
    """An event loop in a thread of its own, where a cellar's coroutines run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self.is_over = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvcellar-cellar", daemon=True
        )
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; whoever stops waiting (Ctrl-C) cancels it.

        Raises:
            ConfigError: the cellar is closed.
        """
        with self._lock:
            if self.is_over:
                call.close()
                raise ConfigError("the cellar is closed; open it again")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End what still runs, so that nobody waits for it for ever, and the thread."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:  # most of them have just been told that the engine is closed
            await asyncio.wait(tasks, timeout=_PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()


class Cellar:
    """A model, its engine and its store. ``kvcellar.open`` makes one; close it, or use ``with``.

    Attributes:
        model: name of the model that answers.
    """

    def __init__(self, cellar: AsyncCellar) -> None:
        """Open a cellar.

        Raises:
            ModelError, BackendError, ConfigError, StoreError: it cannot be; nothing is left open.
        """
        self._cellar = cellar
        self._loop = _Loop()
        self._open: weakref.WeakValueDictionary[str, Stream] = weakref.WeakValueDictionary()
        try:
            self._loop.run(cellar.__aenter__())
        except Exception:
            self._loop.close()
            raise
        except BaseException:  # Ctrl-C does not wait for a model that loads, which goes once it is
            _aside(_give_up, cellar, self._loop)
            raise
        self._garbage = weakref.finalize(self, _close_anywhere, cellar, self._loop)

    @property
    def model(self) -> str:
        """Name of the model that answers."""
        return self._cellar.model

    def __enter__(self) -> Cellar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, write what is unsaved, and let go of the model. May be called twice."""
        for stream in list(self._open.values()):
            if stream.thread == threading.get_ident():  # left in its middle
                stream.close()
        if self._garbage.detach() is not None:
            _close(self._cellar, self._loop)

    # Agents ------------------------------------------------------------------------------------

    def agent(self, name: str | None = None, *, system: str | None = None) -> Agent:
        """Return the agent of a name, which is made where there is none.

        Args:
            name: None: a new agent, whose name is made up.
            system: its system message. Of an agent that is there it has to be the same.

        Raises:
            AgentNameError: it cannot be a name; nothing was made.
            AgentError: the agent is there with another system message; it is as it was.
            StoreError: it cannot be saved; nothing was made.
        """
        return self._of(self._loop.run(self._cellar.agent(name, system=system)))

    def agents(self) -> list[Agent]:
        """Return all agents of the store, the one that was used last at the end."""
        return [self._of(one) for one in self._loop.run(self._cellar.agents())]

    def import_agent(self, file: str | Path, name: str | None = None) -> Agent:
        """Take in an agent from a file that ``export`` wrote; all of it is verified first.

        Raises:
            AgentError, StoreError: the file is damaged, or the name is taken; nothing was changed.
        """
        return self._of(self._loop.run(self._cellar.import_agent(file, name)))

    def _of(self, agent: AsyncAgent) -> Agent:
        return Agent(agent, self)

    # Completions -------------------------------------------------------------------------------

    @overload
    def complete(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: str, **how: Unpack[Asking]
    ) -> Answer: ...

    @overload
    def complete(self, prompts: Sequence[Prompt], **how: Unpack[Asking]) -> list[Answer]: ...

    def complete(
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
        return self._loop.run(self._cellar.complete(prompts, **how))

    # What it is --------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """The longest conversation that the model can read, in tokens."""
        return self._cellar.context

    def stats(self) -> EngineStats:
        """Return the engine's counts: cells, requests, tokens that were reused."""
        return self._loop.run(self._cellar.stats())

    def __repr__(self) -> str:
        return repr(self._cellar).replace("AsyncCellar", "Cellar", 1)

    def _repr_html_(self) -> str:
        return self._cellar._repr_html_()


def _close(cellar: AsyncCellar, loop: _Loop) -> None:
    cellar.close_now()
    loop.close()


def _close_anywhere(cellar: AsyncCellar, loop: _Loop) -> None:
    """Close from whatever thread collects garbage, which may be one that has to end for it."""
    if threading.current_thread() is threading.main_thread():
        _close(cellar, loop)
    else:
        _aside(_close, cellar, loop)


def _aside(close: Callable[[AsyncCellar, _Loop], None], cellar: AsyncCellar, loop: _Loop) -> None:
    """Close in a thread that nobody waits for."""
    threading.Thread(target=close, args=(cellar, loop), name="kvcellar-close").start()


def _give_up(cellar: AsyncCellar, loop: _Loop) -> None:
    loop.close()  # which waits for threads that still open something
    cellar.close_now()


class Agent:
    """An agent: a history with a name, which forks, goes back, sleeps and comes back."""

    def __init__(self, agent: AsyncAgent, cellar: Cellar) -> None:
        """Refer to an agent; ``Cellar.agent`` makes one where there is none."""
        self._agent = agent
        self._cellar = cellar  # which stays open for as long as somebody has an agent of it
        self._loop = cellar._loop
        self._streams = cellar._open

    @property
    def name(self) -> str:
        """Its name, in the store and over HTTP too."""
        return self._agent.name

    def __repr__(self) -> str:
        return repr(self._agent).replace("AsyncAgent", "Agent", 1)

    def _repr_html_(self) -> str:
        return self._agent._repr_html_()

    # Talking -----------------------------------------------------------------------------------

    def say(self, said: Said, **how: Unpack[Asking]) -> Answer:
        """Say something and return the whole answer, which joins the history.

        Ctrl-C ends the answer; what was said by then is in the history.

        Args:
            said: a text, a message or several: what is new, behind the history.
            how: tools, a form of the answer, and settings of sampling, as :class:`Asking`.

        Raises:
            KVCellarError: as ``stream``.
        """
        self._end_stream()
        return self._loop.run(self._agent.say(said, **how))

    def stream(self, said: Said, **how: Unpack[Asking]) -> Stream:
        """Say something and iterate over the answer's text as it comes.

        An iteration that is left is ended by ``close``, by leaving its ``with`` block, or by the
        agent's next verb in the same thread; what was said by then is in the history.

        Raises:
            PromptError: there is nothing to answer, or no room for it; nothing was changed.
            ModelError: the model has no chat template, or it refuses the messages; nothing was
                changed.
            ConfigError, GrammarError: the answer cannot be what is asked for; nothing was changed.
        """
        self._end_stream()
        stream = Stream(self._agent.stream(said, **how), self._cellar)
        self._streams[self.name] = stream
        return stream

    def _end_stream(self) -> None:
        """End an answer that this thread has left in its middle, and would wait for for ever."""
        stream = self._streams.get(self.name)
        if stream is not None and stream.thread == threading.get_ident():
            stream.close()

    # Branches ----------------------------------------------------------------------------------

    def fork(
        self, name: str | None = None, *, turn: int | None = None, position: int | None = None
    ) -> Agent:
        """Make an agent that shares the beginning of this one; no KV is copied.

        Args:
            name: None: made up from this one's.
            turn: turns to share, from the beginning, or from the end where negative; None: all.
            position: or tokens to share.

        Raises:
            AgentError: the name is taken, or cannot be one, or there is no such place; nothing was
                changed.
        """
        return self._of(self._loop.run(self._agent.fork(name, turn=turn, position=position)))

    def branch(self, n: int, *, turn: int | None = None) -> Branches:
        """Fork this agent ``n`` times; the branches answer in one batch.

        Raises:
            ConfigError: ``n`` is below 1; nothing was made.
        """
        branches = self._loop.run(self._agent.branch(n, turn=turn))
        return Branches(branches, [self._of(one) for one in branches], self._loop)

    def keep(self) -> list[str]:
        """Keep this branch and delete its siblings, with all that was forked from them.

        ``undo`` of this one brings them back.

        Returns:
            The names that are gone.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        return self._verb(self._agent.keep)

    def rename(self, title: str) -> AgentInfo:
        """Give it another title, for people; its name stays. Empty: the first words said to it.

        Raises:
            AgentNameError: the title is too long; nothing was changed.
        """
        return self._verb(lambda: self._agent.rename(title))

    def rewind(self, turn: int = -1, *, position: int | None = None) -> AgentInfo:
        """Go back; ``undo`` brings back what is dropped.

        Args:
            turn: turns that stay, from the beginning, or from the end where negative.
            position: or tokens that stay.

        Raises:
            AgentError: there is no such place; nothing was changed.
        """
        return self._verb(lambda: self._agent.rewind(turn, position=position))

    def undo(self) -> list[Agent]:
        """Bring back what was dropped last of this agent, by rewind, keep or delete.

        Raises:
            AgentError: nothing was dropped.
        """
        return [self._of(one) for one in self._verb(self._agent.undo)]

    # Coming and going --------------------------------------------------------------------------

    def pause(self) -> AgentInfo:
        """Have all of it on disk and none of it in memory; its next turn brings it back."""
        return self._verb(self._agent.pause)

    def resume(self) -> int:
        """Load its KV into the cache; return how many tokens came from the store."""
        return self._verb(self._agent.resume)

    def export(self, file: str | Path) -> int:
        """Write it with its KV to one file; return the bytes of that."""
        return self._verb(lambda: self._agent.export(file))

    def delete(self, *, forever: bool = False) -> None:
        """Forget it; what others share stays. ``undo`` brings it back, unless it is forever."""
        self._verb(lambda: self._agent.delete(forever=forever))

    # What it is --------------------------------------------------------------------------------

    @property
    def messages(self) -> Sequence[Message]:
        """Messages of its conversation, oldest first, with thoughts and calls apart from text."""
        return self._agent.messages

    @property
    def system(self) -> str | None:
        """Text of its system message; None where it has none."""
        return self._agent.system

    def info(self) -> AgentInfo:
        """Return what is known of it: tokens, turns, parent, and how much the cache holds."""
        return self._loop.run(self._agent.info())

    def why(self) -> Why:
        """Return what its last turn had to compute again, and why."""
        return self._agent.why()

    def _of(self, agent: AsyncAgent) -> Agent:
        return Agent(agent, self._cellar)

    def _verb(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a verb that waits for the agent's turn."""
        self._end_stream()
        return self._loop.run(call())


class Stream:
    """Text of an answer as it comes: iterate over it. Behind the end ``answer`` is the whole."""

    def __init__(self, stream: AsyncStream, cellar: Cellar) -> None:
        """Wrap a stream; it begins with the first piece that is asked for."""
        self._stream = stream
        self._cellar = cellar
        self._loop = cellar._loop
        self.thread = threading.get_ident()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        """Return the next piece of text.

        Raises:
            KVCellarError: the turn ended with an error; what was said is in the history.
        """
        piece = self._loop.run(_next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the answer where it has not ended; what was said by then is in the history."""
        if not self._loop.is_over:  # a cellar that is closed has ended it
            self._loop.run(self._stream.aclose())

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            AgentError: it has not ended.
        """
        return self._stream.answer


async def _next(stream: AsyncStream) -> str | None:
    """Return the next piece; None at the end, since no future takes a StopIteration."""
    return await anext(stream, None)


class Branches(Sequence[Agent]):
    """Branches of one agent, which answer in one batch."""

    def __init__(self, branches: AsyncBranches, agents: Sequence[Agent], loop: _Loop) -> None:
        """Group agents that were forked from one."""
        self._branches = branches
        self._agents = list(agents)
        self._loop = loop

    def __len__(self) -> int:
        return len(self._agents)

    @overload
    def __getitem__(self, index: int) -> Agent: ...

    @overload
    def __getitem__(self, index: slice) -> list[Agent]: ...

    def __getitem__(self, index: int | slice) -> Agent | list[Agent]:
        return self._agents[index]

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents)

    def say(self, said: Said | Sequence[Said], **how: Unpack[Asking]) -> list[Answer]:
        """Say the same to all branches, or to each its own; return their answers, in their order.

        A list of texts, or of lists of messages, has one for each branch; a text, a message or a
        list of messages is for all. Branch i samples with the seed plus i, so one seed gives
        several answers. Log probabilities come with each answer, for whoever chooses by
        ``mean_logprob``.

        Raises:
            ConfigError: there are more or fewer texts than branches; nothing was said.
            KVCellarError: the first error of any branch, once all have ended.
        """
        return self._loop.run(self._branches.say(said, **how))

    def keep(self, index: int) -> Agent:
        """Keep one of the branches and delete the others; ``undo`` of it brings them back.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        self._loop.run(self._branches.keep(index))
        self._agents = [self._agents[index]]
        return self._agents[0]

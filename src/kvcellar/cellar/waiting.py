"""Parts of a cellar for programs without an event loop: a loop in a thread, and streams.

The verbs themselves are written from those for asyncio: ``sync.py``, by tools/write_sync_cellar.py.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from kvcellar.cellar.aio import AsyncAgent, AsyncBranches, AsyncCellar
from kvcellar.cellar.answers import Answer, Asking
from kvcellar.cellar.asking import Said
from kvcellar.cellar.streams import AsyncStream
from kvcellar.errors import ConfigError

T = TypeVar("T")
AgentT = TypeVar("AgentT", bound="WaitingAgent")

_PATIENCE_S = 5.0
"""Seconds that calls have for ending by themselves when their cellar closes."""


class Loop:
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


class WaitingCellar:
    """A model, its engine and its store, on a loop of its own; closes them.

    Attributes:
        model: name of the model that answers.
    """

    def __init__(self, cellar: AsyncCellar) -> None:
        """Open a cellar.

        Raises:
            ModelError, BackendError, ConfigError, StoreError: it cannot be; nothing is left open.
        """
        self._behind = cellar
        self._loop = Loop()
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
        return self._behind.model

    def __enter__(self) -> Self:
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
            _close(self._behind, self._loop)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(call)

    def __repr__(self) -> str:
        return repr(self._behind).replace("AsyncCellar", "Cellar", 1)

    def _repr_html_(self) -> str:
        return self._behind._repr_html_()


def _close(cellar: AsyncCellar, loop: Loop) -> None:
    cellar.close_now()
    loop.close()


def _close_anywhere(cellar: AsyncCellar, loop: Loop) -> None:
    """Close from whatever thread collects garbage, which may be one that has to end for it."""
    if threading.current_thread() is threading.main_thread():
        _close(cellar, loop)
    else:
        _aside(_close, cellar, loop)


def _aside(close: Callable[[AsyncCellar, Loop], None], cellar: AsyncCellar, loop: Loop) -> None:
    """Close in a thread that nobody waits for."""
    threading.Thread(target=close, args=(cellar, loop), name="kvcellar-close").start()


def _give_up(cellar: AsyncCellar, loop: Loop) -> None:
    loop.close()  # which waits for threads that still open something
    cellar.close_now()


class WaitingAgent:
    """An agent that is talked with from threads: its name, and what it says."""

    def __init__(self, agent: AsyncAgent, cellar: WaitingCellar) -> None:
        """Refer to an agent; ``Cellar.agent`` makes one where there is none."""
        self._behind = agent
        self._cellar = cellar  # which stays open for as long as somebody has an agent of it
        self._streams = cellar._open

    @property
    def name(self) -> str:
        """Its name, in the store and over HTTP too."""
        return self._behind.name

    def __repr__(self) -> str:
        return repr(self._behind).replace("AsyncAgent", "Agent", 1)

    def _repr_html_(self) -> str:
        return self._behind._repr_html_()

    # Talking -----------------------------------------------------------------------------------

    def say(self, said: Said, **how: Unpack[Asking]) -> Answer:
        """Say something and return the whole answer, which joins the history.

        Ctrl-C ends the answer; what was said by then is in the history.

        Args:
            said: a text, a message or several: what is new, behind the history.
            how: pictures, tools, a form of the answer, and settings of sampling, as
                :class:`Asking`.

        Raises:
            KVCellarError: as ``stream``.
        """
        self._end_stream()
        return self._wait(self._behind.say(said, **how))

    def stream(self, said: Said, **how: Unpack[Asking]) -> Stream:
        """Say something and iterate over the answer's text as it comes.

        An iteration that is left is ended by ``close``, by leaving its ``with`` block, or by the
        agent's next verb in the same thread; what was said by then is in the history.

        Raises:
            PromptError: there is nothing to answer, or no room for it; nothing was changed.
            ModelError: the model has no chat template, or it refuses the messages; nothing was
                changed.
            ConfigError, GrammarError: the answer cannot be what is asked for; nothing was changed.
            PictureError: a picture cannot be read, or the model reads text alone; nothing was
                changed.
        """
        self._end_stream()
        stream = Stream(self._behind.stream(said, **how), self._cellar)
        self._streams[self.name] = stream
        return stream

    def _end_stream(self) -> None:
        """End an answer that this thread has left in its middle, and would wait for for ever."""
        stream = self._streams.get(self.name)
        if stream is not None and stream.thread == threading.get_ident():
            stream.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._cellar._wait(call)

    def _wait_in_turn(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a verb that waits for the agent's turn."""
        try:
            self._end_stream()
        except BaseException:
            call.close()
            raise
        return self._wait(call)


class Stream:
    """Text of an answer as it comes: iterate over it. Behind the end ``answer`` is the whole."""

    def __init__(self, stream: AsyncStream, cellar: WaitingCellar) -> None:
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


class WaitingBranches(Sequence[AgentT]):
    """Branches of one agent."""

    def __init__(
        self, branches: AsyncBranches, agents: Sequence[AgentT], cellar: WaitingCellar
    ) -> None:
        """Group agents that were forked from one."""
        self._behind = branches
        self._agents = list(agents)
        self._cellar = cellar

    def __len__(self) -> int:
        return len(self._agents)

    @overload
    def __getitem__(self, index: int) -> AgentT: ...

    @overload
    def __getitem__(self, index: slice) -> list[AgentT]: ...

    def __getitem__(self, index: int | slice) -> AgentT | list[AgentT]:
        return self._agents[index]

    def __iter__(self) -> Iterator[AgentT]:
        return iter(self._agents)

    def keep(self, index: int) -> AgentT:
        """Keep one of the branches and delete the others; ``undo`` of it brings them back.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        self._wait(self._behind.keep(index))
        self._agents = [self._agents[index]]
        return self._agents[0]

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._cellar._wait(call)

"""The engine for many callers: one thread steps, everybody else submits and listens."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvcellar.engine.engine import Engine
from kvcellar.engine.mailbox import Mailbox
from kvcellar.engine.request import Event, FinishEvent, Request
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import EngineClosedError

__all__ = ["EngineService", "EventStream"]

T = TypeVar("T")

_TIDY = "tidy"

REST_S = 0.1
"""An engine that had nothing to do for so long rests: who asks next will hardly ask at once."""


@dataclass(slots=True, eq=False)
class EventStream:
    """The events of one request, in order, ending with its :class:`FinishEvent`.

    Iterate it to the end, or ``await cancel()``; leaving an ``async with`` block does that too.
    """

    request_id: int
    _events: Mailbox[Event]
    _service: EngineService
    _is_done: bool = False

    def __aiter__(self) -> AsyncIterator[Event]:
        """The stream itself."""
        return self

    async def __anext__(self) -> Event:
        """The next event."""
        if self._is_done:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_done = isinstance(event, FinishEvent)
        return event

    async def cancel(self) -> None:
        """End the request if it has not ended; its cells are free before the next step."""
        if not self._is_done:
            await self._service.cancel(self.request_id)

    async def __aenter__(self) -> EventStream:
        """The stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what has not ended."""
        await self.cancel()


class EngineService:
    """An engine in a thread of its own.

    Use it as a context manager, or call ``close``. Callers may be on any event loop and thread.
    """

    def __init__(self, engine: Engine) -> None:
        """Start the thread."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, tuple[asyncio.AbstractEventLoop, Mailbox[Event]]] = {}
        self._hooks: dict[int, Callable[[FinishEvent], None]] = {}
        self._for_rest: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kvcellar-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> EngineService:
        """The service itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def run(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine between two steps, in the engine's thread.

        Raises:
            EngineClosedError: the service is closed.
        """
        return self._call(lambda: function(self._engine))

    def when_at_rest(self, name: str, work: Callable[[], None]) -> None:
        """Do something when nobody has asked for anything for a while. From the engine's thread.

        One such work at a time, and whoever asks meanwhile goes before the next. What is left when
        the service closes is not done.

        Args:
            name: of several works of one name the last is done.
            work: called in the engine's thread, between two steps. It must not raise.
        """
        self._for_rest.pop(name, None)
        self._for_rest[name] = work

    async def submit(
        self, request: Request, on_finish: Callable[[FinishEvent], None] | None = None
    ) -> EventStream:
        """Queue a request and return its events as they come.

        Args:
            request: what to run.
            on_finish: called in the engine's thread when the request has ended, before anything
                else runs: what it computed is still in the cache. It must not raise.

        Raises:
            PromptError, UnknownRequestError: as ``Engine.submit``; nothing was queued.
            EngineClosedError: the service is closed.
        """
        loop = asyncio.get_running_loop()
        events: Mailbox[Event] = Mailbox()

        submitted: list[int] = []

        def add() -> int:
            submitted.append(self._engine.submit(request))
            if on_finish is not None:
                self._hooks[submitted[0]] = on_finish
            self._listeners[submitted[0]] = (loop, events)
            return submitted[0]

        call = asyncio.wrap_future(self._call(add))
        try:
            request_id = await asyncio.shield(call)
        except asyncio.CancelledError:
            # The caller left while the request was on its way in: nobody would listen to it.
            with contextlib.suppress(EngineClosedError):
                self._call(lambda: self._forget(submitted))
            raise
        return EventStream(request_id, events, self)

    def submit_quietly(
        self, request: Request, on_finish: Callable[[FinishEvent], None]
    ) -> Future[int]:
        """Queue a request whose events nobody hears; its id. For threads without an event loop.

        Args:
            request: what to run.
            on_finish: as ``submit`` takes it; called too when the service closes before the end.

        Raises:
            EngineClosedError: the service is closed. What ``Engine.submit`` raises is in the
                future, and ``on_finish`` is not called then.
        """

        def add() -> int:
            request_id = self._engine.submit(request)
            self._hooks[request_id] = on_finish
            return request_id

        return self._call(add)

    async def cancel(self, request_id: int) -> bool:
        """End a request; false where it has ended already."""
        return await asyncio.wrap_future(self._call(lambda: self._engine.cancel(request_id)))

    async def release(self, request_id: int) -> bool:
        """Let go of a kept sequence; false where it is not kept."""
        return await asyncio.wrap_future(self._call(lambda: self._engine.release(request_id)))

    async def stats(self) -> EngineStats:
        """The engine's counts, between two steps."""
        return await asyncio.wrap_future(self._call(self._engine.stats))

    def close(self) -> None:
        """Cancel what runs, tell its listeners, and end the thread. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The engine's thread -----------------------------------------------------------------------

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps, in the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; start another one")
            self._commands.put(run)
        return future

    def _forget(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self._engine.cancel(request_id)

    def _work(self) -> None:
        is_open = True
        while is_open:
            is_open = self._take_commands()
            if is_open and not self._engine.is_idle:
                self._tell(self._engine.step())
                if self._engine.is_idle:
                    self.when_at_rest(_TIDY, self._tidy)
        for request_id in {*self._listeners, *self._hooks}:
            self._engine.cancel(request_id)
        self._tell(self._engine.scheduler.events())

    def _tidy(self) -> None:
        """Copy crumbs together; as much as there is, but who asks meanwhile goes first."""
        if self._engine.tidy():
            self.when_at_rest(_TIDY, self._tidy)

    def _take_commands(self) -> bool:
        """Run what callers asked for; wait for it where there is nothing else to do."""
        while True:
            is_idle = self._engine.is_idle
            try:
                command = self._commands.get(is_idle, REST_S if self._for_rest else None)
            except queue.Empty:
                if not is_idle:
                    return True
                self._for_rest.pop(next(iter(self._for_rest)))()
                continue
            if command is None:
                return False
            command()

    def _tell(self, events: list[Event]) -> None:
        """Hand a step's events out: each event loop is woken once for all of its own."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox[Event], Event]]] = {}
        for event in events:
            is_last = isinstance(event, FinishEvent)
            if isinstance(event, FinishEvent) and event.request_id in self._hooks:
                self._hooks.pop(event.request_id)(event)
            listener = (
                self._listeners.pop(event.request_id, None)
                if is_last
                else self._listeners.get(event.request_id)
            )
            if listener is not None:
                loop, events_of_one = listener
                told.setdefault(loop, []).append((events_of_one, event))
        for loop, items in told.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the event loop is closed: nobody listens any more
                for _, event in items:
                    self._engine.cancel(event.request_id)


def _put_all(items: list[tuple[Mailbox[Event], Event]]) -> None:
    for events, event in items:
        events.put(event)

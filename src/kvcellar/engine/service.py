"""The engine for many callers: one thread steps, everybody else submits and listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcellar.engine.engine import Engine
from kvcellar.engine.mailbox import Mailbox
from kvcellar.engine.requests.request import Event, FinishEvent, Request
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import EngineClosedError, EngineFailedError

T = TypeVar("T")

log = logging.getLogger("kvcellar.engine")

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
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event, as soon as there is one."""
        if self._is_done:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_done = isinstance(event, FinishEvent)
        return event

    async def cancel(self) -> None:
        """End the request if it has not ended; its cells are free before the next step."""
        if not self._is_done:
            with contextlib.suppress(EngineClosedError):  # then it has ended with the engine
                await self._service.cancel(self.request_id)

    async def __aenter__(self) -> EventStream:
        """Return the stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what has not ended."""
        await self.cancel()


@dataclass(slots=True)
class _Command:
    """Something that a caller wants done between two steps, and where its result goes."""

    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: EngineClosedError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineService:
    """An engine in a thread of its own.

    Use it as a context manager, or call ``close``. Callers may be on any event loop and thread.
    Whatever the engine raises, nobody waits for ever: after an error of its own every request ends
    with it, and what is asked later is refused at once; see ``failure``.
    """

    def __init__(self, engine: Engine) -> None:
        """Start the thread."""
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._listeners: dict[int, tuple[asyncio.AbstractEventLoop, Mailbox[Event]]] = {}
        self._hooks: dict[int, Callable[[FinishEvent], None]] = {}
        self._for_rest: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: EngineFailedError | None = None
        self._step_since_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="kvcellar-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> EngineService:
        """Return the service itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the engine has stopped for good; None while it works, or was closed."""
        return self._engine.failure if self._failure is None else self._failure

    @property
    def step_s(self) -> float:
        """Seconds that the step has taken so far that is being computed; 0 while none is."""
        since_s = self._step_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def run(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine between two steps, in the engine's thread.

        Raises:
            EngineClosedError: the service is closed, or its engine has stopped.
        """
        return self._call(lambda: function(self._engine))

    def when_at_rest(self, name: str, work: Callable[[], None]) -> None:
        """Do something when nobody has asked for anything for a while. From the engine's thread.

        One such work at a time, and whoever asks meanwhile goes before the next. What is left when
        the service closes is not done.

        Args:
            name: of several works of one name the last is done.
            work: called in the engine's thread, between two steps. What it raises is logged.
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
                else runs: what it computed is still in the cache. What it raises is logged.

        Raises:
            PromptError: as ``Engine.submit``; nothing was queued.
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

    async def stats(self) -> EngineStats:
        """Return the engine's counts, between two steps."""
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
        command = _Command(function, Future())
        with self._lock:
            if self._is_closed:
                raise self._refusal()
            self._commands.put(command)
        return command.future

    def _refusal(self) -> EngineClosedError:
        if self._failure is not None:
            found = EngineFailedError(str(self._failure))
            found.__cause__ = self._failure.__cause__
            return found
        return EngineClosedError("the engine is closed; start another one")

    def _forget(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self._engine.cancel(request_id)

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nobody may wait for a thread that is gone
            log.error("the engine's thread has ended", exc_info=error)
            failure = EngineFailedError(
                f"the engine's thread has ended after {type(error).__name__}: {error}; start the "
                f"program again"
            )
            failure.__cause__ = error
            self._end(failure)
        else:
            self._end(self._engine.failure)

    def _serve(self) -> None:
        """Step and do what callers ask for, until the service is closed or the engine stops."""
        while self._take_commands() and self._engine.failure is None:
            if not self._engine.is_idle:
                self._step_since_s = time.monotonic()
                events = self._engine.step()
                self._step_since_s = None
                self._tell(events)
                if self._engine.is_idle:
                    self.when_at_rest(_TIDY, self._tidy)

    def _end(self, failure: EngineFailedError | None) -> None:
        """Refuse what was asked for and not done, and end every request that has not ended."""
        with self._lock:
            self._failure = failure
            self._is_closed = True
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command.refuse(self._refusal())
        try:
            if failure is None:
                for request_id in {*self._listeners, *self._hooks}:
                    self._engine.cancel(request_id)
            self._tell(self._engine.outcomes.events())
        except Exception as error:
            log.error("requests could not be ended in order", exc_info=error)
        left = {*self._listeners, *self._hooks}
        self._tell([FinishEvent(one, "error", error=self._refusal()) for one in left])

    def _tidy(self) -> None:
        """Copy crumbs together; as much as there is, but who asks meanwhile goes first."""
        if self._engine.tidy():
            self.when_at_rest(_TIDY, self._tidy)

    def _take_commands(self) -> bool:
        """Run what callers asked for; wait for it where there is nothing else to do."""
        while self._engine.failure is None:
            is_idle = self._engine.is_idle
            try:
                command = self._commands.get(is_idle, REST_S if self._for_rest else None)
            except queue.Empty:
                if not is_idle:
                    return True
                self._rest()
                continue
            if command is None:
                return False
            command.run()
        return True

    def _rest(self) -> None:
        """Do the first of the works that were put off."""
        name = next(iter(self._for_rest))
        try:
            self._for_rest.pop(name)()
        except Exception as error:
            log.error("what was put off until the engine rests failed: %s", name, exc_info=error)

    def _tell(self, events: list[Event]) -> None:
        """Hand a step's events out: each event loop is woken once for all of its own."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox[Event], Event]]] = {}
        for event in events:
            is_last = isinstance(event, FinishEvent)
            if isinstance(event, FinishEvent) and event.request_id in self._hooks:
                try:
                    self._hooks.pop(event.request_id)(event)
                except Exception as error:  # the others still have to be told
                    log.error("what follows the end of a request failed", exc_info=error)
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

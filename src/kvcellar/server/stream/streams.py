"""Streams of answers to clients that may leave at any moment or stop reading.

Time limits are ``asyncio.timeout``: ``wait_for`` of Python 3.11 can lose a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kvcellar.engine.mailbox import Mailbox
from kvcellar.errors import EngineClosedError
from kvcellar.server.errors import ClientGone

T = TypeVar("T")

_AHEAD = 256
"""Items that are produced before somebody takes them."""

Sources = Sequence[AsyncGenerator[T, None]]


class MergedStream(Generic[T]):
    """Merges several asynchronous generators: items as they come, with the number of each.

    They run in tasks of their own until all have ended, one has failed or the stream is closed;
    then all end together. Iterate it inside of ``async with``, which closes it.
    """

    def __init__(self, opened: AbstractAsyncContextManager[Sources[T]]) -> None:
        """Start to read what a context manager opens."""
        self._items: Mailbox[tuple[int, T | None, Exception | None] | None] = Mailbox()
        self._first: tuple[int, T | None, Exception | None] | None = None
        self._is_over = self._is_closed = False
        self._room = asyncio.Lock()
        self._task = asyncio.create_task(self._run(opened))

    @classmethod
    def of(cls, *sources: AsyncGenerator[T, None]) -> MergedStream[T]:
        """Start to read generators that need nothing around them."""
        return cls(nullcontext(sources))

    async def __aenter__(self) -> MergedStream[T]:
        """Return the stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __aiter__(self) -> MergedStream[T]:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> tuple[int, T | None]:
        """Take the next item and the number of its source; None where the stream was nudged.

        Raises:
            Exception: what a generator raised.
        """
        if self._is_over:
            raise StopAsyncIteration
        taken, self._first = self._first, None
        if taken is None:
            taken = await self._items.get()
        if taken is None:
            self._is_over = True
            raise StopAsyncIteration
        number, item, error = taken
        if error is not None:
            self._is_over = True
            raise error
        return number, item

    async def opened(self, timeout_s: float) -> T | None:
        """Wait for the first item, at most so long, so that an error can still be a status.

        Returns:
            The item, which is still to be taken; None: it is not there yet, or there is none.

        Raises:
            Exception: what a generator raised before its first item.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                self._first = await self._items.get()
                self._is_over = self._first is None
        if self._first is None:
            return None
        _, item, error = self._first
        if error is not None:
            raise error
        return item

    def nudge(self) -> None:
        """Let whoever takes items take one that is None, unless many wait."""
        if len(self._items) < _AHEAD:
            self._items.put((0, None, None))

    @property
    def has_more(self) -> bool:
        """True where the next item, or the end, is there at once."""
        return self._first is not None or len(self._items) > 0

    async def close(self) -> None:
        """End it and wait until all that it held is let go of. May be called twice."""
        self._is_closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _run(self, opened: AbstractAsyncContextManager[Sources[T]]) -> None:
        try:
            async with opened as sources:
                if len(sources) == 1:
                    await self._pass_on(0, sources[0])
                else:
                    await _together(self._pass_on(i, one) for i, one in enumerate(sources))
        except Exception as error:
            self._items.put((0, None, error))
        except asyncio.CancelledError:
            if self._is_closed:
                raise
            # Somebody else's doing: whoever takes the items must not wait for ever.
            stopped = EngineClosedError("the server is being stopped")
            self._items.put((0, None, stopped))
        else:
            self._items.put(None)

    async def _pass_on(self, number: int, source: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(source):
            async for item in source:
                if len(self._items) >= _AHEAD:
                    async with self._room:  # a mailbox makes one wait at a time
                        await self._items.shrunk(_AHEAD)
                self._items.put((number, item, None))


def kept_on(
    source: AsyncGenerator[T, None], keep: Callable[[Coroutine[Any, Any, None]], None]
) -> AsyncGenerator[T, None]:
    """Have a generator read to its end, and pass on its items for as long as somebody wants them.

    Args:
        source: what is read.
        keep: runs what reads it.
    """
    items: Mailbox[tuple[T | None, Exception | None]] = Mailbox()
    is_heard = True

    async def read() -> None:
        error: Exception | None = None
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    if is_heard:
                        items.put((item, None))
        except Exception as raised:
            error = raised
        items.put((None, error))

    async def hear() -> AsyncGenerator[T, None]:
        nonlocal is_heard
        try:
            while True:
                item, error = await items.get()
                if error is not None:
                    raise error
                if item is None:
                    return
                yield item
        finally:
            is_heard = False

    keep(read())
    return hear()


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, for as long as the client waits for it.

    Whoever leaves is noticed by what uvicorn says on ``receive``, not by a write that fails: a
    prompt may be computed for minutes without a write.

    Raises:
        ClientGone: it does not; the work was cancelled and has ended.
        Exception: what the work raised.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await ended(task, gone)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what runs, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until a client has left."""
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do several things at once; where one fails, all end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await ended(*tasks)

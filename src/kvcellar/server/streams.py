"""Answers that come in pieces, to clients that may leave at any moment or stop reading.

Whoever leaves is noticed by what uvicorn says on ``receive``, not by a write that fails: a prompt
may be computed for minutes without a write.

Time limits are ``asyncio.timeout``: ``wait_for`` of Python 3.11 can lose a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvcellar.engine.mailbox import Mailbox
from kvcellar.errors import EngineClosedError
from kvcellar.server.errors import ClientGone

__all__ = ["SseResponse", "Stream", "frame", "until_gone"]

T = TypeVar("T")

_AHEAD = 256
"""Items that are produced before somebody takes them."""


def frame(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = data.encode() if isinstance(data, str) else to_json(data)
    head = f"event: {event}\n".encode() if event is not None else b""
    return b"%sdata: %s\n\n" % (head, text)


class Stream(Generic[T]):
    """An asynchronous generator that runs in a task of its own until it ends or is closed."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        """Start it."""
        self._items: Mailbox[tuple[T | None, Exception | None]] = Mailbox()
        self._first: tuple[T | None, Exception | None] | None = None
        self._is_closed = False
        self._task = asyncio.create_task(self._run(source))

    async def _run(self, source: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    if len(self._items) >= _AHEAD:
                        await self._items.shrunk(_AHEAD)
                    self._items.put((item, None))
        except Exception as error:
            self._items.put((None, error))
        except asyncio.CancelledError:
            if self._is_closed:
                raise
            # Somebody else's doing: whoever takes the items must not wait for ever.
            self._items.put((None, EngineClosedError("the server is being stopped")))
        else:
            self._items.put((None, None))

    async def opened(self, timeout_s: float) -> None:
        """Wait for the first item, at most so long, so that an error can still be a status.

        Raises:
            Exception: what the generator raised before its first item.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                self._first = await self._items.get()
        if self._first is not None and self._first[1] is not None:
            raise self._first[1]

    async def take(self) -> T | None:
        """The next item; None at the end.

        Raises:
            Exception: what the generator raised.
        """
        taken = self._first
        if taken is None:
            taken = await self._items.get()
        self._first = None
        item, error = taken
        if error is not None:
            raise error
        return item

    def slip_in(self, item: T) -> None:
        """An item behind those that wait, unless there are many."""
        if len(self._items) < _AHEAD:
            self._items.put((item, None))

    @property
    def has_more(self) -> bool:
        """Whether ``take`` would return, or raise, at once."""
        return self._first is not None or len(self._items) > 0

    async def close(self) -> None:
        """End it and wait until all that it held is let go of. May be called twice."""
        self._is_closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


class SseResponse(Response):
    """Frames of server-sent events, until they end or the client is gone.

    Args of the constructor:
        frames: what is sent; closed in any case.
        on_error: the frame for an error that comes too late to be a status.
        ping: what is sent where nothing else was for ``ping_s``.
        ping_s: seconds.
        send_timeout_s: seconds after which a client that does not read counts as gone.
        headers: more headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Stream[bytes],
        on_error: Callable[[Exception], bytes],
        *,
        ping: bytes = b": ping\n\n",
        ping_s: float,
        send_timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        """See the class."""
        super().__init__(headers={"Cache-Control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames
        self._on_error = on_error
        self._ping, self._ping_s = ping, ping_s
        self._send_timeout_s = send_timeout_s
        self._since, self._is_sending = time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({pump, gone, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            else:
                scope["kvcellar.is_gone"] = True
        finally:
            await _ended(pump, gone, watch)
            await self._frames.close()

    async def _pump(self, send: Send) -> None:
        await self._send(
            send,
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            },
        )
        is_over = False
        while not is_over:
            bodies: list[bytes] = []
            try:
                while not bodies or self._frames.has_more:  # what has gathered goes in one piece
                    body = await self._frames.take()
                    is_over = body is None
                    if body is None:
                        break
                    bodies.append(body)
            except Exception as error:
                bodies.append(self._on_error(error))
                is_over = True
            if bodies:
                await self._send(send, _piece(b"".join(bodies)))
        await self._send(send, _piece(b"", is_last=True))

    async def _send(self, send: Send, message: Message) -> None:
        self._since, self._is_sending = time.monotonic(), True
        await send(message)
        self._since, self._is_sending = time.monotonic(), False

    async def _watch(self) -> None:
        """Say that the stream is alive where it is silent; end when a client does not read."""
        while True:
            limit_s = self._send_timeout_s if self._is_sending else self._ping_s
            left_s = self._since + limit_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, self._send_timeout_s))
            elif self._is_sending:
                return
            else:
                self._since = time.monotonic()
                self._frames.slip_in(self._ping)


def _piece(body: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, for as long as the client waits for it.

    Raises:
        ClientGone: it does not; the work was cancelled and has ended.
        Exception: what the work raised.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _ended(task, gone)


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what runs, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()

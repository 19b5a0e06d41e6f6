"""Answers as streams: each protocol writes its own frames, and all of them go out one way."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvcellar.server.errors import as_api_error, error_body
from kvcellar.server.state.service import service_of
from kvcellar.server.stream.streams import MergedStream, disconnected, ended, until_gone

T = TypeVar("T")

_UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers that have proxies, nginx among them, pass on each piece as it comes."""


_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}
"""Characters at which some clients end a line, and how JSON has them within one."""


def json_line(value: Any) -> bytes:
    """Write a value as JSON that is one line for every client, without an end."""
    line = to_json(value)
    for char, escaped in _LINE_ENDS.items():
        if char in line:
            line = line.replace(char, escaped)
    return line


def frame(data: Any, event: str | None = None) -> bytes:
    """Write one server-sent event; data that is no text becomes JSON."""
    text = data.encode() if isinstance(data, str) else json_line(data)
    head = f"event: {event}\n".encode() if event is not None else b""
    return b"%sdata: %s\n\n" % (head, text)


class Frames(ABC, Generic[T]):
    """Writer of one answer in one protocol: from items to bytes, as a rule server-sent events.

    Attributes:
        media_type: of the whole answer.
        ping: what is sent where nothing else was for a while.
        error_event: name of the event that says what went wrong.
    """

    media_type: ClassVar[str] = "text/event-stream"
    ping: bytes = b": ping\n\n"
    error_event: ClassVar[str | None] = None

    def __init__(self, request: Request) -> None:
        """Write to a request's client; nothing is written yet."""
        self._request = request

    def headers(self, first: T | None) -> Mapping[str, str]:
        """Return headers of the response, once the first item is there or has not come in time."""
        return {}

    @abstractmethod
    async def of(self, number: int, item: T) -> bytes:
        """Write the next item of an answer, which has a number where there are several."""

    def end(self) -> bytes:
        """Write what comes after all items."""
        return b""

    def failed(self, error: Exception) -> bytes:
        """Write an error that comes too late to be a status."""
        return frame(error_body(as_api_error(error), self._request), self.error_event)


async def sse(
    request: Request,
    items: MergedStream[T],
    frames: Frames[T],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response, once its first item is there or the client has waited for a while.

    Raises:
        Exception: what went wrong before the first item.
        ClientGone: nobody waits any more.
    """
    config = service_of(request).config
    try:
        first = await until_gone(request, items.opened(config.ping_s))
    except BaseException:
        await items.close()
        raise
    headers = {**(headers or {}), **frames.headers(first)}
    ping_s, send_timeout_s = config.ping_s, config.send_timeout_s
    return SseResponse(items, frames, ping_s=ping_s, send_timeout_s=send_timeout_s, headers=headers)


class SseResponse(Response, Generic[T]):
    """A stream of frames, until the items end or the client is gone.

    Args of the constructor:
        items: what is written; closed in any case.
        frames: writes it.
        ping_s: seconds of silence after which a ping is sent.
        send_timeout_s: seconds after which a client that does not read counts as gone.
        headers: more headers.
    """

    def __init__(
        self,
        items: MergedStream[T],
        frames: Frames[T],
        *,
        ping_s: float,
        send_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create a response of which nothing is sent yet."""
        super().__init__(headers={**_UNBUFFERED, **(headers or {})}, media_type=frames.media_type)
        del self.headers["content-length"]
        self._items = items
        self._frames = frames
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._since, self._is_sending = time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(disconnected(receive))
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({pump, gone, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            else:
                scope["kvcellar.is_gone"] = True
        finally:
            await ended(pump, gone, watch)
            await self._items.close()

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
                is_over = await self._gather(bodies)
            except Exception as error:
                bodies.append(self._frames.failed(error))
                is_over = True
            if body := b"".join(bodies):
                await self._send(send, _piece(body))
        await self._send(send, _piece(b"", is_last=True))

    async def _gather(self, bodies: list[bytes]) -> bool:
        """Write what is there, which goes out in one piece; return true at the end."""
        async for number, item in self._items:
            bodies.append(
                self._frames.ping if item is None else await self._frames.of(number, item)
            )
            if not self._items.has_more:
                return False
        bodies.append(self._frames.end())
        return True

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
                self._items.nudge()


def _piece(body: bytes, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}

"""Bodies of requests: how large, how intricate and how slow they may be, and how they are read.

Reading JSON holds the whole process, a byte of it for up to two hundred nanoseconds, and takes up
to thirty times its size. So what cannot be a request that is answered is refused while it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from kvcellar.errors import KVCellarError
from kvcellar.hosting.thread_lanes import SHORT_BYTES
from kvcellar.server.errors import ApiError, ContextExceeded, as_api_error
from kvcellar.server.front.encodings import Unpacking, unpacking_of
from kvcellar.server.state.service import Service, service_of

BODY_S = 60.0
"""Longest silence of a client in the middle of its body, and the time that any body has."""

BODY_RATE = 4 << 10
"""Bytes of a body for which it has another second."""

MOST_LOGGED_BYTES = 16 << 10
"""Of a body, where the log is to have it."""

MOST_VALUES = 150_000
MOST_CONTAINERS = 20_000
"""Values of all kinds in a body, and objects and lists of these."""

_BYTES_PER_BYTE = 3
"""A character of text takes up to so many times its bytes where clients write JSON as ASCII."""

_ROOM_BYTES = 1 << 20
"""For all of a body that is no text of the prompt."""

_LARGE_BYTES = 256 << 10
"""Bodies above this are counted in what all bodies may hold."""

_DRAIN_BYTES = 64 << 20
_DRAIN_S = 10.0
_DRAIN_SILENT_S = 0.5
"""How much of a body that nobody wants is taken, for how long, and how long it may stop coming."""

_MOST_PACKED = 100
"""Times its size to which the text of a conversation that is too long may unpack."""

_IMPORT = "/v1/agents/import"
_BATCHES = ("/v1/completions", "/v1/embeddings", "/api/embed")
"""Have prompts by the hundred, each of which may be as long as the context."""

_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'",[{')


class Bodies:
    """Limits of all bodies of one server, and what those that are read now take."""

    def __init__(self, service: Service) -> None:
        """Create limits under which no body is read yet."""
        self._service = service
        self.n_held = 0

    def refuse_long(self, scope: Scope, n_bytes: int) -> None:
        """Refuse a body of so many bytes.

        Raises:
            ContextExceeded: 400, it is longer than any model's context.
            ApiError: 413, it is too large; 429, all bodies together are.
        """
        config = self._service.config
        limit = config.max_body_bytes
        if scope["path"] == _IMPORT:
            limit = config.max_import_bytes
        elif scope["path"] not in _BATCHES and (prompt := self._service.models.longest_prompt()):
            most, context = prompt
            most *= _BYTES_PER_BYTE
            if n_bytes > most + _ROOM_BYTES:
                self._service.metrics.refused.labels("context").inc()
                raise ContextExceeded(n_bytes * context // most, context, is_least=True)
        if n_bytes > limit:
            raise ApiError(
                413,
                f"the body has {n_bytes} bytes and the limit is {limit}; send less, or start the "
                f"server with --max-body",
                "body_too_large",
            )

    def hold(self, n_bytes: int) -> None:
        """Count bytes of a body that is read.

        Raises:
            ApiError: 429, all bodies together are too large; these are not counted.
        """
        limit = 2 * self._service.config.max_body_bytes
        if self.n_held + n_bytes > limit:
            self._service.metrics.refused.labels("bodies").inc()
            raise ApiError(
                429,
                f"{self.n_held} bytes of large requests are being read and the limit is {limit}; "
                f"come back in a moment",
                "queue_full",
                retry_after_s=1,
            )
        self.n_held += n_bytes


class IncomingBody:
    """A request's body, looked at while it comes."""

    def __init__(self, bodies: Bodies, scope: Scope, receive: Receive, headers: Headers) -> None:
        self._bodies = bodies
        self._scope = scope
        self._receive = receive
        self._n = 0
        self._n_held = 0
        self._waited_s = 0.0
        self._is_whole = False
        self._is_told = False
        self._shape = None if scope["path"] == _IMPORT else _ValueCount()
        self._headers = headers
        self._unpacking: Unpacking | None = None
        self._unpacked: Iterator[bytes] = iter(())
        self.kept: bytes | None = None
        """The beginning of what came, where the log is to have it."""

    def check(self) -> None:
        """Refuse a body that says that it is too large, or packed as nobody here unpacks it.

        Raises:
            ApiError: 413 or 400, it is; 415, it is packed so; 429, all bodies together are.
        """
        self._unpacking = unpacking_of(self._headers.get("content-encoding"))
        length = self._headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise ApiError(400, "Content-Length is no number", "invalid_request")
        self._bodies.refuse_long(self._scope, int(length))
        self._count(int(length))

    async def receive(self) -> Message:
        """Take the next piece, unpacked.

        Raises:
            ApiError: 413 or 400, the body is too large or has too many values; 400, it is not
                packed as it says; 408, it does not come; 429, there are too many others.
        """
        if self._unpacking is not None:
            try:
                piece = next(self._unpacked, None)
                if piece is None and not self._is_whole:
                    message = await self._incoming()
                    if message["type"] != "http.request":
                        return message
                    packed = message.get("body", b"")
                    self._unpacked = self._unpacking.pieces(packed, is_last=self._is_whole)
                    piece = next(self._unpacked, b"")
                if piece is not None:
                    self._take(piece)
                    return {"type": "http.request", "body": piece, "more_body": True}
            except ApiError as refused:
                raise self._refusal(refused) from None
            if not self._is_told:
                self._is_told = True
                return {"type": "http.request", "body": b"", "more_body": False}
        if self._is_whole:
            return await self._receive()
        message = await self._incoming()
        if message["type"] == "http.request":
            try:
                self._take(message.get("body", b""))
            except ApiError as refused:
                raise self._refusal(refused) from None
        return message

    async def _incoming(self) -> Message:
        """Take the next piece as it comes.

        Raises:
            ApiError: 408, it does not come.
        """
        left_s = BODY_S + self._n / BODY_RATE - self._waited_s
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, BODY_S)):
                message = await self._receive()
        except TimeoutError:
            self._is_whole = True  # there is no rest to wait for
            said = f"the body stopped coming for {BODY_S:g} s, or came in drops; send it again"
            raise self._refusal(ApiError(408, said, "body_too_slow")) from None
        self._waited_s += time.monotonic() - began
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
        return message

    async def drain(self) -> None:
        """Take what is left of the body, and leave it: an answer may come before it was read.

        A connection that is closed with bytes unread loses the answer. There is an end to it.
        """
        if "expect" in self._headers:
            return  # the client waits for a word before it sends
        n = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._is_whole and n < _DRAIN_BYTES:
                    async with asyncio.timeout(_DRAIN_SILENT_S):
                        message = await self._receive()
                    n += len(message.get("body", b""))
                    self._is_whole = not message.get("more_body", False)

    def release(self) -> None:
        """Count the body no longer: what its answer needs is counted elsewhere. May be repeated."""
        self._bodies.n_held -= self._n_held
        self._n_held = 0

    def _take(self, piece: bytes) -> None:
        self._n += len(piece)
        if self.kept is not None:
            self.kept += piece[: MOST_LOGGED_BYTES - len(self.kept)]
            text = self.kept.decode("utf-8", "replace")
            self._scope["kvcellar.notes"]["body"] = text
        try:
            self._bodies.refuse_long(self._scope, self._n)
        except ApiError:
            n_packed = self._n if self._unpacking is None else self._unpacking.n_packed
            if self._n > _MOST_PACKED * n_packed:
                raise ApiError(
                    413,
                    f"{n_packed} bytes of the body unpack to more than {self._n}, which is no "
                    f"request; send it as it is",
                    "request_body_too_large_after_decoding",
                ) from None
            raise
        self._count(self._n)
        if self._shape is not None:
            self._shape.take(piece)

    def _count(self, n_bytes: int) -> None:
        if self._shape is not None and n_bytes > max(_LARGE_BYTES, self._n_held):
            self._bodies.hold(n_bytes - self._n_held)
            self._n_held = n_bytes

    def _refusal(self, error: ApiError) -> ApiError:
        """Put a refusal where the framework's reader finds it, which says 400 for everything."""
        self._scope["kvcellar.refusal"] = error
        return error


class _ValueCount:
    """Counter of the values in a JSON text, piece by piece and without reading it."""

    def __init__(self) -> None:
        self._is_inside = False
        self._rest = b""
        self.n_values = 0
        self.n_containers = 0

    def take(self, piece: bytes) -> None:
        """Count the values of the next piece.

        Raises:
            ApiError: 413, there are too many.
        """
        piece = self._rest + piece
        n_slashes = len(piece) - len(piece.rstrip(b"\\"))
        cut = len(piece) - n_slashes % 2  # what is escaped comes with the next piece
        self._rest = piece[cut:]
        bare = piece[:cut].replace(rb"\\", b"").replace(rb"\"", b"")
        parts = bare.translate(None, _NOT_STRUCTURE).split(b'"')
        outside = b"".join(parts[self._is_inside :: 2])
        self._is_inside ^= not len(parts) % 2
        self.n_containers += outside.count(b"[") + outside.count(b"{")
        self.n_values += len(outside)
        for n, most, what in (
            (self.n_values, MOST_VALUES, "values"),
            (self.n_containers, MOST_CONTAINERS, "objects and lists"),
        ):
            if n > most:
                raise ApiError(
                    413,
                    f"the body has more than {most} {what}; send fewer at a time",
                    "body_too_large",
                )


# From bytes to a request --------------------------------------------------------------------------


class BodyRoute(APIRoute):
    """A route whose body, where it is long, is read in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler, with another way to read JSON."""
        handler = super().get_route_handler()
        field = self.body_field
        kind: Any = None if field is None else field.field_info.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

        async def handle(request: Request) -> Response:
            scope = request.scope
            names = {name for name, _ in scope["headers"]}
            is_ollamas = scope["path"].startswith("/api/")  # who reads JSON whatever it is called
            if is_ollamas or b"content-type" not in names:
                kept = [one for one in scope["headers"] if one[0] != b"content-type"]
                scope["headers"] = [*kept, (b"content-type", b"application/json")]
            return await handler(_JsonRequest(scope, request.receive, model))

        return handle


class _JsonRequest(Request):
    """Reads a long body into the route's model, which the framework then takes as it is."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """Read the body.

        Raises:
            JSONDecodeError: it is no JSON.
            ApiError: 400, it is JSON that no request is; what is said is in the scope, too.
            RequestValidationError: it is no such request; the same.
        """
        body = await self.body()
        model = self._model
        try:
            if model is None or len(body) <= SHORT_BYTES:
                return await super().json()
            work = service_of(self).agents.work
            return await work.run(len(body), lambda: model.model_validate(json.loads(body)))
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            wrong = RequestValidationError(found)
            self.scope["kvcellar.refusal"] = what_is_wrong(wrong)
            raise wrong from error
        except json.JSONDecodeError:  # the framework says where
            raise
        except (KVCellarError, RecursionError, ValueError) as error:
            refusal = _not_read(error)
            self.scope["kvcellar.refusal"] = refusal
            raise refusal from error


def _not_read(error: Exception) -> ApiError:
    """Why a body that is JSON, or nearly, cannot be read."""
    if isinstance(error, KVCellarError):
        return as_api_error(error)
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply; send it flatter", "invalid_request")
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is no UTF-8; send JSON as UTF-8", "invalid_request")
    return ApiError(400, f"the body cannot be read: {error}", "invalid_request")


_FIELD = re.compile(r"[a-z_][a-z0-9_]*|\d+")
_TYPES = ("bool", "dict", "float", "int", "list", "none", "str")
"""Names that pydantic gives to branches of a union, of those that look like a field's."""


def what_is_wrong(error: RequestValidationError) -> ApiError:
    """Say the first few fields that are not as they should be; never what was sent in them."""
    found: dict[str, list[str]] = {}
    for problem in error.errors():
        if problem["type"] == "json_invalid":
            at, why = problem["loc"][-1], problem.get("ctx", {}).get("error", problem["msg"])
            message = f"the body is no JSON: {why}, at character {at}"
            return ApiError(400, message, "invalid_request")
        said = found.setdefault(_field_of(problem["loc"]), [])
        if problem["msg"] not in said:
            said.append(problem["msg"])
    lines = [f"{where or 'the body'}: {', or '.join(said)}" for where, said in found.items()]
    if len(lines) > 3:
        lines[3:] = [f"and {len(lines) - 3} more"]
    first = next(iter(found), "")
    return ApiError(400, "; ".join(lines), "invalid_request", param=first or None)


def _field_of(loc: Sequence[int | str]) -> str:
    """Name the field of a problem by its way from the body.

    Where a field may be of several types, pydantic puts the type that it tried behind it.
    """
    parts = [str(part) for part in loc if part != "body"]
    return ".".join(part for part in parts if _FIELD.fullmatch(part) and part not in _TYPES)

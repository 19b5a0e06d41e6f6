"""Gateway in front of the replicas: takes requests whole, and hands each to one that suits it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kvcellar.agents import salted_id
from kvcellar.deploy.reading import PROMPTS, HttpRequest
from kvcellar.deploy.replica import HEADER
from kvcellar.deploy.routing import ReplicaHoldings, Wanted
from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError, error_response
from kvcellar.server.front.bodies import BODY_S
from kvcellar.server.front.encodings import unpacking_of
from kvcellar.server.front.entrance import Entrance
from kvcellar.server.state.isolation import GUEST, salt_for
from kvcellar.server.stream.streams import disconnected, ended

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
_MORE = ("root_path", "headers", "client", "server", GUEST)
"""Keys of a request's ASGI scope that a gateway sends to a replica."""

_NAMED = re.compile(r"/v1/(?:agents|responses|conversations)/([^/]+)")
_IMPORT = "/v1/agents/import"
_LOOKING = "looking"
"""Keeps the requests together that are for nobody, such as those of the page."""


class Replicas(Protocol):
    """Way to the replicas: each call goes to one of them, chosen by what is wanted."""

    async def read(self, asked: HttpRequest) -> Wanted:
        """Return what a request wants."""
        ...

    async def prepare(self, asked: HttpRequest, wanted: Wanted) -> None:
        """Have the prompt of a request read by a replica that only reads.

        Raises:
            ReplicaLostError: the replica has died.
        """
        ...

    def answer(self, asked: HttpRequest, wanted: Wanted) -> AsyncGenerator[list[Message], None]:
        """Yield what a replica sends; leaving the iteration ends it there.

        Raises:
            ReplicaLostError: the replica has died.
        """
        ...


class ReplicaLostError(Exception):
    """A replica has died while it answered."""


class Gateway:
    """An ASGI application that answers nothing by itself."""

    def __init__(
        self,
        config: ServerConfig,
        replicas: Replicas,
        holdings: ReplicaHoldings,
        prefill_tokens: int | None = None,
    ) -> None:
        """Stand before replicas.

        Args:
            config: theirs.
            replicas: the way to them.
            holdings: what they hold, as far as that is known here.
            prefill_tokens: as ``RoutingPolicy`` has it; None: no replica only reads.
        """
        self._prefill_tokens = prefill_tokens
        self._config = config
        self._replicas = replicas
        self._holdings = holdings
        self._entrance = Entrance(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        body: bytes | None = b""
        try:
            self._entrance.check(scope, Headers(scope=scope))
            body = await self._body(scope, receive)
        except TimeoutError:
            slow = ApiError(408, "the body did not come; send it faster", "request_too_slow")
            await error_response(slow, Request(scope))(scope, _nothing, send)
            return
        except ApiError:
            pass  # a replica refuses it, in the right words, and counts it
        if body is None:
            return
        asked = HttpRequest({key: scope[key] for key in (*_KEPT, *_MORE) if key in scope}, body)
        await self._pass_on(asked, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Take a body; of one that is too large what shows that; None: the client has left.

        Raises:
            TimeoutError: it has stopped to come.
        """
        config, taken = self._config, bytearray()
        is_import = scope["path"] == _IMPORT
        limit = config.max_import_bytes if is_import else config.max_body_bytes
        said = Headers(scope=scope).get("content-length", "0")
        if not said.isdecimal() or int(said) > limit:
            return b""  # which the headers say, too
        while len(taken) <= limit:
            async with asyncio.timeout(BODY_S):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            taken += message.get("body", b"")
            if not message.get("more_body"):
                break
        plain = unpacked(bytes(taken), Headers(scope=scope).get("content-encoding"), limit)
        dropped = [b"content-length", b"transfer-encoding"]
        if plain is not None:
            taken = plain
            dropped.append(b"content-encoding")
        length = (b"content-length", str(len(taken)).encode())
        rest = [(name, value) for name, value in scope["headers"] if name not in dropped]
        scope["headers"] = [*rest, length]
        return bytes(taken)

    async def _pass_on(self, asked: HttpRequest, receive: Receive, send: Send) -> None:
        """Have a replica answer, for as long as the client is there."""
        gone = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._answer(asked, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await ended(gone, work)

    async def _answer(self, asked: HttpRequest, send: Send) -> None:
        has_begun = False
        try:
            wanted = await self._wanted(asked)
            await self._prepare(asked, wanted)
            async with contextlib.aclosing(self._replicas.answer(asked, wanted)) as batches:
                async for batch in batches:
                    for message in batch:
                        has_begun = True
                        await send(message)
        except ReplicaLostError:
            if has_begun:
                raise  # the connection ends in the middle of the answer: its client sees that
            lost = ApiError(
                503,
                "the replica that was to answer has died, and nothing was answered; ask again: "
                "another one goes on from what is stored",
                "replica_lost",
                retry_after_s=1,
            )
            await error_response(lost, Request(asked.scope))(asked.scope, _nothing, send)

    async def _prepare(self, asked: HttpRequest, wanted: Wanted) -> None:
        """Have a prompt read elsewhere, of which so much is new that it would disturb answers."""
        least = self._prefill_tokens
        if least is None or wanted.n_tokens < least:
            return
        held = self._holdings.matched(wanted.hashes)
        if wanted.n_tokens - max(held.values(), default=0) >= least:
            with contextlib.suppress(ReplicaLostError):  # whoever answers reads it, too
                await self._replicas.prepare(asked, wanted)

    async def _wanted(self, asked: HttpRequest) -> Wanted:
        """Find out what decides where a request goes; read its prompt where that may matter."""
        path, headers = asked.scope["path"], Headers(scope=asked.scope)
        named = headers.get(HEADER.decode())
        if named:
            return Wanted(replica=named)
        agent = self._named_agent(asked.scope, headers)
        if path not in PROMPTS or asked.scope["method"] != "POST":
            return Wanted(agent or ("" if path.startswith("/v1/embed") else _LOOKING))
        is_known = self._holdings.holder(agent) and b"cache_salt" not in asked.body
        is_only = len(self._holdings.replicas) == 1
        if self._prefill_tokens is None and (is_known or is_only):
            return Wanted(agent)
        return await self._replicas.read(asked)

    def _named_agent(self, scope: Mapping[str, Any], headers: Headers) -> str:
        """Return the agent that a request names outside of its body; empty: none."""
        name = headers.get("x-agent-id", "")
        found = _NAMED.match(scope["path"])
        if found is not None and scope["path"] != _IMPORT:
            name = unquote(found[1])
        with contextlib.suppress(ApiError):
            return salted_id(name, salt_for(Request(dict(scope)))) if name else ""
        return ""


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def unpacked(packed: bytes, encoding: str | None, limit: int) -> bytearray | None:
    """Return a body as it was before it was packed; None where it was not, or a replica refuses it.

    Args:
        packed: all of it.
        encoding: as its headers say.
        limit: bytes that a body may have.
    """
    plain = bytearray()
    with contextlib.suppress(ApiError):
        unpacking = unpacking_of(encoding)
        for piece in unpacking.pieces(packed, is_last=True) if unpacking is not None else ():
            plain += piece
            if len(plain) > limit:
                return None
        return None if unpacking is None else plain
    return None

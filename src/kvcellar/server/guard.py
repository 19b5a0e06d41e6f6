"""Guard that every request passes before a route sees it: who calls, from where, and how much.

A server on this machine is within reach of every web page that is open in a browser here. So a
request has to name this server as its host, and must not come from a page of another origin.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcellar.server.bodies import Bodies, IncomingBody
from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError, as_api_error, error_response
from kvcellar.server.metrics import Metrics
from kvcellar.server.origins import Origins
from kvcellar.server.salts import GUEST, guest_of

log = logging.getLogger("kvcellar.server")

MOST_HEADER_BYTES = 32 << 10

_OPEN = ("/health", "/ready")
"""Paths that need no key: they say nothing of what is computed."""

_PAGE = "/viewer/"
"""The page itself; what it shows needs the key."""

_OWNERS = ("/metrics", "/v1/cache", "/events", "/slots")
"""Paths that show what everybody does."""

_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """Checks, limits, request ids, logs and counts around an application."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, metrics: Metrics, bodies: Bodies
    ) -> None:
        """Around ``app``."""
        self._app = app
        self._bodies = bodies
        self._config = config
        self._metrics = metrics
        self._hosts = _LOCAL_NAMES | {name.lower() for name in config.allowed_hosts}
        self._takes_addresses = config.host.lower() not in _LOCAL_NAMES
        self._origins = Origins(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, answer, log and count one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["kvcellar.request_id"] = request_id
        scope["kvcellar.notes"] = {}
        status = 499
        body = IncomingBody(self._bodies, scope, receive, headers)

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                await body.drain()
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                self._origins.mark(MutableHeaders(scope=message), headers)
                body.release()
            await send(message)

        request = Request(scope, receive)
        error: Exception | None = None
        try:
            self._check(scope, headers)
            if self._origins.is_preflight(scope["method"], headers):
                allowed = Response(status_code=204, headers=self._origins.preflight(headers))
                await allowed(scope, receive, send_noting)
            else:
                body.check()
                if self._config.logs_text:
                    body.kept = b""
                await self._app(scope, body.receive, send_noting)
        except ApiError as refused:
            if status == 499:
                await error_response(refused, request)(scope, receive, send_noting)
        except Exception as failed:
            error = failed
            if status == 499:
                await error_response(as_api_error(failed), request)(scope, receive, send_noting)
        finally:
            body.release()
        if scope.get("kvcellar.is_gone"):
            self._metrics.gone.inc()
            status = 499
        self._note(scope, status, time.perf_counter() - started, error)

    # Who, from where ---------------------------------------------------------------------------

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Refuse who must not call.

        Raises:
            ApiError: 403 for a host or origin, 401 for a key.
        """
        path = scope["path"]
        n_bytes = sum(len(name) + len(value) for name, value in headers.raw)
        if n_bytes > MOST_HEADER_BYTES:
            raise ApiError(
                431,
                f"the headers have {n_bytes} bytes and the limit is {MOST_HEADER_BYTES}; send less",
                "headers_too_large",
            )
        self._check_host(headers)
        self._check_origin(scope["method"], headers)
        if self._config.api_key is None or path in (*_OPEN, "/") or path.startswith(_PAGE):
            return
        if self._origins.is_preflight(scope["method"], headers):  # browsers send no key with it
            return
        given = headers.get("authorization", "")
        given = given[7:] if given.lower().startswith("bearer ") else headers.get("x-api-key", "")
        keys = [self._config.api_key, *self._config.guest_keys]
        brought = given.strip().encode()
        matching = [key for key in keys if secrets.compare_digest(brought, key.encode())]
        if not matching:
            raise ApiError(
                401,
                "this server wants its API key"
                + (", and the one that came is another" if given else "")
                + "; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                "invalid_api_key",
            )
        if matching != keys[:1]:
            scope[GUEST] = guest_of(matching[0])
            if path in _OWNERS:
                raise ApiError(
                    403, f"{path} shows what all do, and only the owner's key does", "owner_only"
                )

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if _is_host(host) else None
        if name is not None and (name in self._hosts or (self._takes_addresses and _is_ip(name))):
            return
        raise ApiError(
            403,
            f"this server is not called {host[:80]!r}; use one of "
            f"{', '.join(sorted(self._hosts))}, or start it with --allow-host",
            "host_not_allowed",
        )

    def _check_origin(self, method: str, headers: Headers) -> None:
        is_followed = headers.get("sec-fetch-mode") == "navigate" and "origin" not in headers
        if is_followed and method in ("GET", "HEAD"):
            return  # somebody followed a link to the page; nothing is driven by that
        if self._origins.allow(headers) and not (is_followed and "sec-fetch-site" not in headers):
            return  # a form whose browser does not say of which site may be of any
        origin = headers.get("origin") or "another site"
        raise ApiError(
            403,
            f"a page of {origin[:80]!r} must not call this server; start it with --allow-origin "
            f"if it should",
            "origin_not_allowed",
        )

    # What happened -----------------------------------------------------------------------------

    def _note(self, scope: Scope, status: int, seconds: float, error: Exception | None) -> None:
        """Count it, and write one line of JSON."""
        route = scope.get("route")
        name = getattr(route, "path", None) or ("viewer" if scope["path"] in _PAGE else "other")
        method = scope["method"] if name != "other" else "other"
        self._metrics.requests.labels(method, name, str(status)).inc()
        self._metrics.seconds.labels(name).observe(seconds)
        line: dict[str, Any] = {
            "request_id": scope["kvcellar.request_id"],
            "method": scope["method"],
            "route": name,
            "status": status,
            "seconds": round(seconds, 4),
            **scope["kvcellar.notes"],
        }
        # Whoever looks every second whether it lives is not worth a line.
        is_dull = scope["path"] in _OPEN or scope["path"].startswith(_PAGE)
        level = logging.DEBUG if is_dull else logging.INFO
        if error is not None:
            line["error"] = type(error).__name__
            level = logging.ERROR
        log.log(level, json.dumps(line), exc_info=error)


def _is_host(text: str) -> bool:
    return bool(re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", text))


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

"""Guard that every request passes before a route sees it: checked, limited, logged and counted."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError, as_api_error, error_response
from kvcellar.server.front.bodies import Bodies, IncomingBody
from kvcellar.server.front.entrance import OPEN, PAGE, Entrance
from kvcellar.server.state.metrics import Metrics

log = logging.getLogger("kvcellar.server")

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
        self._entrance = Entrance(config)
        self._origins = self._entrance.origins

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
            self._entrance.check(scope, headers)
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

    # What happened -----------------------------------------------------------------------------

    def _note(self, scope: Scope, status: int, seconds: float, error: Exception | None) -> None:
        """Count it, and write one line of JSON."""
        route = scope.get("route")
        name = getattr(route, "path", None) or ("viewer" if scope["path"] in PAGE else "other")
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
        is_dull = scope["path"] in OPEN or scope["path"].startswith(PAGE)
        level = logging.DEBUG if is_dull else logging.INFO
        if error is not None:
            line["error"] = type(error).__name__
            level = logging.ERROR
        log.log(level, json.dumps(line), exc_info=error)

"""The application: routes, what goes wrong in them, and the guard in front. Start here."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcellar.errors import KVCellarError
from kvcellar.server.errors import ApiError, ClientGone, as_api_error, error_response
from kvcellar.server.front.bodies import Bodies, what_is_wrong
from kvcellar.server.front.guard import Guard
from kvcellar.server.look.events import Watch
from kvcellar.server.routes import (
    agents,
    anthropic,
    completions,
    embeddings,
    folder,
    infill,
    lmstudio,
    lookup,
    observe,
    ollama,
    openai,
    pictures,
    responses,
    viewer,
)
from kvcellar.server.state.service import Service
from kvcellar.version import __version__

_ROUTES = (
    openai,
    completions,
    responses,
    anthropic,
    ollama,
    lmstudio,
    lookup,
    infill,
    embeddings,
    agents,
    pictures,
    folder,
    observe,
    viewer,
)

_STATUSES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed"}


def create_app(service: Service) -> ASGIApp:
    """Create the server as one ASGI application; the service stays the caller's to close."""
    return Guard(_Heads(create_api(service)), service.config, service.metrics, Bodies(service))


class _Heads:
    """Answers HEAD wherever GET is answered: the same status and headers, and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_over = False

        async def send_head(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_over:  # a stream ends with its head too: nobody waits for more
                is_over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        inner = {**scope, "method": "GET"}
        await self._app(inner, receive, send_head)
        for key, value in inner.items():
            if key not in ("method", "kvcellar.is_gone"):
                scope[key] = value


def create_api(service: Service) -> FastAPI:
    """Create the routes alone."""
    app = FastAPI(
        title="kvcellar",
        version=__version__,
        summary="Local models whose KV outlives the request: agents that fork, go back and sleep.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.watch = Watch(service)
    for module in _ROUTES:
        app.include_router(module.router)

    @app.exception_handler(KVCellarError)
    async def refused(request: Request, error: KVCellarError) -> Response:
        return error_response(as_api_error(error), request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and "json" not in kind:
            message = f"the body is of type {kind[:60]!r}; send JSON as application/json"
            refusal = ApiError(415, message, "unsupported_media_type")
            return error_response(refusal, request)
        return error_response(what_is_wrong(error), request)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        known = request.scope.get("kvcellar.refusal")
        if known is not None:
            return error_response(known, request)
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        if error.status_code == 404:
            message += "; /openapi.json has all routes"
        refusal = ApiError(error.status_code, message, _STATUSES.get(error.status_code))
        response = error_response(refusal, request)
        response.headers.update(dict(error.headers or {}))
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        request.scope["kvcellar.is_gone"] = True
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request)

    return app

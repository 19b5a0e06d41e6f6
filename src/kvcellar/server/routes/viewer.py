"""The page that shows what is in the cache, and what it is told."""

from __future__ import annotations

import asyncio
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.server.events import SnapshotFrames, Watch
from kvcellar.server.replies import sse
from kvcellar.server.streams import Stream

router = APIRouter()

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Send the page."""
    return await _file("index.html")


@router.get("/viewer.css", include_in_schema=False)
async def style() -> Response:
    """Send the page's styles."""
    return await _file("viewer.css")


@router.get("/viewer.js", include_in_schema=False)
async def script() -> Response:
    """Send the page's program."""
    return await _file("viewer.js")


@router.get("/favicon.svg", include_in_schema=False)
async def icon() -> Response:
    """Send the page's icon."""
    return await _file("favicon.svg")


@router.get("/events", tags=["Observability"], response_model=None)
async def events(request: Request) -> Response:
    """Server-sent events: what ``/v1/cache`` says, whenever it has changed."""
    watch: Watch = request.app.state.watch
    return await sse(request, Stream.of(watch.snapshots()), SnapshotFrames(request))


async def _file(name: str) -> Response:
    data = await asyncio.to_thread(files("kvcellar.server").joinpath("viewer", name).read_bytes)
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _POLICY}
    return Response(data, media_type=_FILES[name], headers=headers)

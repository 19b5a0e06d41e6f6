"""The page that shows what is in the cache, and what it is told."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.errors import ApiError
from kvcellar.server.look.events import SnapshotFrames, Watch
from kvcellar.server.stream.replies import sse
from kvcellar.server.stream.streams import MergedStream

router = APIRouter()

_FOLDER = "viewer"
_SETTINGS = "sampler-settings.js"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Send the page."""
    return await _file("index.html")


@router.get("/viewer/{name:path}", include_in_schema=False)
async def part(name: str) -> Response:
    """Send one of the page's files: a program, its styles, its icon."""
    if name == _SETTINGS:
        return _answer(name, sampler_script().encode())
    if name not in await asyncio.to_thread(_names):
        raise ApiError(404, f"the page has no file {name[:200]!r}", "not_found")
    return await _file(name)


@router.get("/events", tags=["Observability"], response_model=None)
async def events(request: Request) -> Response:
    """Server-sent events: what ``/v1/cache`` says, whenever it has changed."""
    watch: Watch = request.app.state.watch
    return await sse(request, MergedStream.of(watch.snapshots()), SnapshotFrames(request))


@functools.cache
def _names() -> frozenset[str]:
    """Return the names of the page's files, below its folder."""
    folder = files("kvcellar.server").joinpath(_FOLDER)
    own = {one.name for one in folder.iterdir() if one.is_file()}
    vendor = {f"vendor/{one.name}" for one in folder.joinpath("vendor").iterdir()}
    return frozenset(name for name in own | vendor if Path(name).suffix in _TYPES)


async def _file(name: str) -> Response:
    data = await asyncio.to_thread(files("kvcellar.server").joinpath(_FOLDER, name).read_bytes)
    return _answer(name, data)


def sampler_script() -> str:
    """Return the program that tells the page the settings of sampling: names and ranges."""
    told = []
    for name, setting in SAMPLER_SETTINGS.items():
        least, most = setting.asked or (setting.least, setting.most)
        is_open = setting.is_above and least not in setting.means
        limits = {"min": least + 0.1 if is_open else least, "max": most}
        form: dict[str, Any] = {key: at for key, at in limits.items() if math.isfinite(at)}
        form["step"] = 1 if setting.is_whole else "any"
        told.append([name, name.replace("_", " ").capitalize(), form])
    return f"export const SETTINGS = {json.dumps(told)};\n"


def _answer(name: str, data: bytes) -> Response:
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _POLICY}
    return Response(data, media_type=_TYPES[Path(name).suffix], headers=headers)

"""Verbs for the commands of this machine that have read the server's token in the store's folder.

They are no protocol for others: a command asks only a server of its own version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.engine.mailbox import Mailbox
from kvcellar.errors import KVCellarError
from kvcellar.server.answer.answer_facts import note
from kvcellar.server.commands.verbs import ANSWERING, VERBS, Tell
from kvcellar.server.errors import ApiError, as_api_error, error_body
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.front.entrance import FOLDER_OWNER
from kvcellar.server.state.service import Service, service_of
from kvcellar.server.stream.replies import Frames, sse
from kvcellar.server.stream.streams import MergedStream, ended

router = APIRouter(prefix="/folder", route_class=BodyRoute, include_in_schema=False)


@router.post("/{verb}", response_model=None)
async def ask(request: Request, verb: str) -> Response:
    """Do what a command asks: lines of JSON, the last with ``value`` or ``error``."""
    if not request.scope.get(FOLDER_OWNER):
        raise ApiError(
            403,
            "this is for commands of this machine, which bring the token that the server has "
            "written into its store's folder",
            "owner_only",
        )
    if verb not in VERBS and verb != "fits":
        raise ApiError(404, f"there is no verb {verb[:40]!r}", "not_found")
    given = await request.json()
    return await sse(request, MergedStream.of(_events(request, verb, given)), Lines(request))


async def _events(
    request: Request, verb: str, given: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Run a verb in a task of its own, and yield what it tells and what comes of it."""
    service, loop = service_of(request), asyncio.get_running_loop()
    told: Mailbox[dict[str, Any]] = Mailbox()

    def tell(event: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(told.put, event)

    async def run() -> None:
        try:
            value = await _done(service, verb, given, tell)
        except KVCellarError as error:
            note(request, error=type(error).__name__)
            tell({"error": type(error).__name__, "message": str(error)})
        except Exception as error:
            failed = as_api_error(error)
            note(request, error=type(error).__name__)
            tell({"error": "EngineClosedError", "message": str(failed)})
        else:
            tell({"value": value})

    task = asyncio.create_task(run())
    try:
        while True:
            event = await told.get()
            yield event
            if "value" in event or "error" in event:
                return
    finally:
        await ended(task)


async def _done(service: Service, verb: str, given: dict[str, Any], tell: Tell) -> Any:
    if verb == "fits":
        return await _fits(service, **given)
    if verb not in ANSWERING:
        return await VERBS[verb](service.agents, tell, **given)
    with service.admitted():
        return await VERBS[verb](
            service.agents,
            tell,
            **given,
            on_start=service.check_context,
            deadline_s=service.config.wait_s,
            dialect=service.config.dialect,
        )


async def _fits(
    service: Service,
    *,
    model: str | None,
    agent_id: str | None,
    is_made: bool,
    loading: dict[str, Any],
) -> dict[str, Any]:
    """Say whether this server does for a command what it would do by itself.

    Args:
        service: of the server.
        model: what the command calls it; None: the agent's own, where an agent is named, and the
            server's default of a new one or without any.
        agent_id: of an agent that speaks; None: of none.
        is_made: it is made where there is none of that name.
        loading: options that were given to the command, by the names they have there.

    Returns:
        ``model``: what the registry calls it; ``lacks``: why the command has to load it by itself,
        empty where it does not.
    """
    if model is None and agent_id is not None:
        known = [one for one in await service.agents.directory.listed() if one.agent_id == agent_id]
        model = known[-1].model if known else service.models.default if is_made else None
    elif model is None:
        model = service.models.default
    offered, lacks = service.models.offered, ""
    if model is not None and model not in offered.values():
        if model in offered and not Path(model).exists():
            model = offered[model]
        else:
            lacks = f"does not serve {model} (but {', '.join(offered)})"
    own = service.models.loading
    other = {name: value for name, value in loading.items() if own.get(name) != value}
    if other and not lacks:
        named = ", ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in sorted(other.items())
        )
        lacks = f"was started without {named}"
    return {"model": model, "lacks": lacks}


class Lines(Frames[dict[str, Any]]):
    """Lines of JSON, one for each thing that a verb tells; an empty one says that it is alive."""

    media_type: ClassVar[str] = "application/x-ndjson"
    ping: bytes = b"\n"

    async def of(self, number: int, item: dict[str, Any]) -> bytes:
        """Write the next line."""
        return to_json(item) + b"\n"

    def failed(self, error: Exception) -> bytes:
        """Write an error that comes too late to be a status."""
        said = error_body(as_api_error(error), self._request)["error"]["message"]
        return to_json({"error": "EngineClosedError", "message": said}) + b"\n"

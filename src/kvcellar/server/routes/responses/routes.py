"""The routes of OpenAI's responses: make one, and get, list, cancel or delete what is stored."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import salted_id
from kvcellar.errors import UnknownAgentError
from kvcellar.server.answer.answer_facts import answer_headers, ignored_of
from kvcellar.server.answer.chat import answer, whole
from kvcellar.server.answer.parsing import READS_AGENT
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.responses import compacting, conversations
from kvcellar.server.routes.responses.pages import Limit, Order, page_of
from kvcellar.server.routes.responses.parsing import question_of, stored_response, unknown_response
from kvcellar.server.routes.responses.value import PREFIX, ResponseValue, keep, sent_item
from kvcellar.server.routes.responses.writing import ResponseFrames
from kvcellar.server.schemas.responses import ResponseRequest
from kvcellar.server.state.isolation import salt_for
from kvcellar.server.state.service import new_id, service_of
from kvcellar.server.stream.replies import sse
from kvcellar.server.stream.streams import MergedStream, until_gone

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
router.include_router(conversations.router)
router.include_router(compacting.router)


@router.post("/v1/responses", response_model=None, dependencies=[READS_AGENT])
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer; with ``previous_response_id`` in a conversation that the server knows."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    name, now = service.models.public(path), int(time.time())
    value = ResponseValue(new_id(PREFIX), now, body, name, service.signer)
    question = await question_of(request, value)
    if body.stream:
        frames = ResponseFrames(request, value)
        return await sse(
            request, MergedStream.of(answer(service, question)), frames, ignored_of(body)
        )
    ((end, _),) = await until_gone(request, whole(service, [question]))
    value.finish(end)
    value.note(request)
    headers = {**answer_headers(end), **ignored_of(body)}
    return JSONResponse(await keep(service, value), headers=headers)


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> Response:
    """Return a response that was stored, as it was."""
    if stream or starting_after is not None:
        raise ApiError(
            400,
            "a stored response comes whole and is not streamed again; leave stream and "
            "starting_after out",
            "unsupported_field",
            param="stream",
        )
    stored = await stored_response(service_of(request), response_id, salt_for(request))
    return JSONResponse(stored.response)


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: str | None = None,
) -> Response:
    """List the conversation that a stored response answered, as it was sent."""
    stored = await stored_response(service_of(request), response_id, salt_for(request))
    items = list(stored.items)
    instructions = stored.response.get("instructions")
    if instructions:
        part = {"type": "input_text", "text": instructions}
        said = {"role": "system", "content": [part]}
        items.insert(0, sent_item(said, f"{response_id[len(PREFIX) :]}instructions"))
    return JSONResponse(page_of(items, limit, order, after))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse: a response that is stored has ended, since none runs in the background."""
    await stored_response(service_of(request), response_id, salt_for(request))
    raise ApiError(
        400,
        f"response {response_id!r} has ended; to end one that runs, close its connection",
        "not_in_background",
    )


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a response and what only it needs; what went on from it stays."""
    service = service_of(request)
    if re.fullmatch(PREFIX + "[0-9a-f]{32}", response_id) is None:  # nor an agent of such a name
        raise unknown_response(response_id)
    salt, stored = salt_for(request), await service.responses.get(response_id)
    if stored is not None and stored.salt != salt:
        raise unknown_response(response_id)
    is_found = await service.responses.delete(response_id)
    try:  # as the API promises
        await service.agents.lifecycle.delete(salted_id(response_id, salt), is_final=True)
    except UnknownAgentError:
        if not is_found:
            raise unknown_response(response_id) from None
    return {"id": response_id, "object": "response", "deleted": True}

"""The routes of OpenAI's responses that answer nothing: count a conversation, and sum it up."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import salted_id
from kvcellar.server.answer.answer_facts import answer_headers, extra_of, ignored_of
from kvcellar.server.answer.chat import read_prompt, whole
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.parsing import READS_AGENT
from kvcellar.server.answer.tools import ToolChoice
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.routes.responses.parsing import question_of
from kvcellar.server.routes.responses.value import PREFIX, ResponseValue, usage_of
from kvcellar.server.schemas.responses import InputRequest
from kvcellar.server.state.service import new_id, service_of
from kvcellar.server.stream.streams import until_gone

router = APIRouter(route_class=BodyRoute)

_ASK = (
    "Sum up this conversation, so that it can go on from your summary alone. Say what was asked, "
    "what was done and found, what was decided, and what is still to do; keep names, numbers and "
    "paths as they are. Write the summary and nothing else."
)
_SUMMED_UP = "What was said before, summed up:\n\n"
_KEPT = ("user", "system", "developer")
"""Whose messages stay as they are."""


@router.post("/v1/responses/input_tokens", response_model=None, dependencies=[READS_AGENT])
async def count_input_tokens(request: Request, body: InputRequest) -> Response:
    """Count the tokens that a response would read, with the conversation that it goes on from."""
    _, question = await _asked(request, body)
    n = len(await read_prompt(service_of(request), question))
    said = {"object": "response.input_tokens", "input_tokens": n}
    return JSONResponse(said, headers=ignored_of(body))


@router.post("/v1/responses/compact", response_model=None, dependencies=[READS_AGENT])
async def compact(request: Request, body: InputRequest) -> Response:
    """Have the model sum a conversation up; what comes is an input that it goes on from.

    Raises:
        ApiError: 502, the model said nothing.
    """
    service = service_of(request)
    value, question = await _asked(request, body)
    if question.whose.name is not None and body.conversation_id is None:
        message = "the history of a named agent is not summed up; fork it, or send the conversation"
        raise ApiError(400, message, "unsupported_field", param="agent_id")
    messages = [*question.messages, {"role": "user", "content": _ASK}]
    own_id = salted_id(value.response_id, value.salt)  # nobody's conversation has the summary
    whose = replace(question.whose, name=None, may_create=False, own_id=own_id)
    question = replace(
        question, messages=messages, choice=ToolChoice("none"), form=None, whose=whose
    )
    ((end, _),) = await until_gone(request, whole(service, [question]))
    value.end = end
    value.note(request)
    if not end.text.strip():
        raise ApiError(502, "the model summed nothing up; ask again", "no_summary")
    kept = [
        item
        for item in value.items()
        if item.get("type") == "message" and item.get("role") in _KEPT
    ]
    summary: dict[str, Any] = {
        "id": f"cmp_{value.key}",
        "type": "compaction",
        "encrypted_content": service.signer.seal(_SUMMED_UP + end.text.strip()),
    }
    said = {
        "id": value.response_id,
        "object": "response.compaction",
        "created_at": value.created,
        "output": [*kept, summary],
        "usage": usage_of(end),
        "kvcellar": extra_of(end, body),
    }
    return JSONResponse(said, headers={**answer_headers(end), **ignored_of(body)})


async def _asked(request: Request, body: InputRequest) -> tuple[ResponseValue, Question]:
    """Return the conversation of a request, as a response that has not begun and what it reads.

    Raises:
        ApiError: 400, there is none.
    """
    service = service_of(request)
    name = service.models.public(service.models.resolve(body.model))
    value = ResponseValue(new_id(PREFIX), int(time.time()), body, name, service.signer)
    question = await question_of(request, value)
    if not question.messages:
        message = "there is no conversation; give input, previous_response_id or conversation"
        raise ApiError(400, message, "invalid_request", param="input")
    return value, question

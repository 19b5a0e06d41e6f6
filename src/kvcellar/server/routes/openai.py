"""OpenAI's models and chat completions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.engine.generate import GeneratedToken
from kvcellar.server.asking import (
    READS_AGENT,
    agent_facts,
    answer_headers,
    extra_of,
    ignored_of,
    note,
    notes_of,
    plain_messages,
    predictions,
    sampling_of,
    service_of,
    tell_agent,
    tool_choice_of,
    whose_of,
)
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.chat import (
    Ask,
    CallEvent,
    ChatEvent,
    Ended,
    Started,
    TextEvent,
    answer,
    merged,
    whole,
)
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import form_of
from kvcellar.server.logprobs import ChatLogprobs
from kvcellar.server.replies import sse
from kvcellar.server.schemas.openai import ChatRequest
from kvcellar.server.service import Service, new_id
from kvcellar.server.streams import Stream, frame, until_gone
from kvcellar.server.tools import Toolbox

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are offered, for clients of OpenAI's and of Anthropic's."""
    service = service_of(request)
    data = [await _model(service, name) for name in service.models.offered]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return {"object": "list", "data": data, **ids}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    return await _model(service, service.models.public(service.models.resolve(name)))


async def _model(service: Service, name: str) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.models.created_s))
    path = service.models.resolve(name)
    context, trained = await asyncio.to_thread(service.models.context, path) or (None, None)
    return {
        "id": name,
        "object": "model",
        "created": service.models.created_s,
        "owned_by": "kvcellar",
        "type": "model",
        "display_name": name,
        "created_at": created,
        # The usable context, by the names that clients of others look for.
        "context_length": context,
        "max_model_len": context,
        "max_input_tokens": context,
        "meta": {"n_ctx": context, "n_ctx_train": trained},
    }


@router.post("/v1/chat/completions", response_model=None, dependencies=[READS_AGENT])
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """An answer in a conversation; of as many as ``n`` that share what came before."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    asks = [_ask(service, request, body, i) for i in range(body.n or 1)]
    if asks[0].whose.name is not None and len(asks) > 1:
        raise ApiError(
            400, "an agent gives one answer in a turn; leave n out, or fork the agent", param="n"
        )
    if len(asks) + service.n_active > service.config.max_requests:
        with service.admitted(len(asks)):  # all of them or none
            pass
    sources = [lambda ask=ask: answer(service, ask) for ask in asks]
    head = {
        "id": new_id("chatcmpl-"),
        "created": int(time.time()),
        "model": service.models.public(path),
        "system_fingerprint": "kvcellar",
    }
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        frames = Stream(_frames(request, merged(sources), head, body, wants_usage))
        return await sse(request, frames, headers=ignored_of(body))

    async def all_of_them() -> list[tuple[Ended, list[GeneratedToken]]]:
        kept: list[list[ChatEvent]] = [[] for _ in asks]
        async with contextlib.aclosing(merged(sources)) as events:
            async for index, event in events:
                kept[index].append(event)
        return [await whole(_again(events)) for events in kept]

    found = await until_gone(request, all_of_them())
    host = service.models.registry.host(path)
    choices = [
        {
            "index": i,
            "message": _message(end),
            "logprobs": ChatLogprobs(host).of(tokens) if body.logprobs else None,
            "finish_reason": end.reason,
        }
        for i, (end, tokens) in enumerate(found)
    ]
    ends = [end for end, _ in found]
    usage = _usage(ends)
    note(request, agent=ends[0].agent_id, **_facts(usage), **notes_of(ends[0].usage))
    return JSONResponse(
        {
            **head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "kvcellar": extra_of(ends[0], body),
        },
        headers={**answer_headers(ends[0]), **ignored_of(body)},
    )


async def _again(events: Sequence[ChatEvent]) -> AsyncGenerator[ChatEvent, None]:
    for event in events:
        yield event


def _ask(service: Service, request: Request, body: ChatRequest, index: int) -> Ask:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs come with logprobs: true, which is not there", param="top_logprobs"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if None is not body.max_tokens != body.max_completion_tokens is not None:
        raise ApiError(
            400,
            f"max_tokens is {body.max_tokens} and max_completion_tokens, its newer name, "
            f"{body.max_completion_tokens}; give one of them",
            param="max_tokens",
        )
    most = body.max_completion_tokens or body.max_tokens or service.config.max_tokens
    return Ask(
        messages=plain_messages(body.messages),
        model=body.model,
        params=sampling_of(body, max_tokens=most, logprobs=logprobs, index=index),
        tools=_tools(body),
        choice=tool_choice_of(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        form=form_of(body),
        whose=whose_of(request, body.agent_id, body.session_id, body.prompt_cache_key),
    )


def _tools(body: ChatRequest) -> Toolbox:
    tools = Toolbox()
    for tool in body.tools or ():
        if tool.function is not None and tool.type == "function":
            given = tool.function
            tools.add(given.name, given.description, given.parameters, is_strict=bool(given.strict))
        else:
            tools.leave_out(tool.custom.name if tool.custom else None, tool.type)
    return tools


# As one object -----------------------------------------------------------------------------------


def _message(end: Ended) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
    if end.calls:
        message["content"] = end.text or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in end.calls
        ]
    return message


def _usage(ends: Sequence[Ended]) -> dict[str, Any]:
    """Of all choices: the prompt once, what was sampled for each."""
    prompt = ends[0].usage.prompt_tokens
    completion = sum(end.usage.completion_tokens for end in ends)
    cached = min(end.usage.cached_tokens for end in ends) if len(ends) == 1 else None
    if cached is None:
        cached = ends[0].usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            **predictions(end.usage for end in ends),
        },
    }


def _facts(usage: dict[str, Any]) -> dict[str, Any]:
    """Of a usage, what the log says."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


# As a stream -------------------------------------------------------------------------------------


async def _frames(
    request: Request,
    events: AsyncGenerator[tuple[int, ChatEvent], None],
    head: dict[str, Any],
    body: ChatRequest,
    wants_usage: bool,
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": "chat.completion.chunk"}
    more = {"usage": None} if wants_usage else {}
    service = service_of(request)
    ends: dict[int, Ended] = {}
    said: dict[str, Any] = {}
    logprobs_of: dict[int, ChatLogprobs] = {}

    def chunk(index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, **fields}
        return frame({**head, "choices": [choice], **more, **said})

    async with contextlib.aclosing(events):
        async for index, event in events:
            if isinstance(event, Started):
                if not index:
                    tell_agent(request, event)
                said = {} if event.notice is None else {"kvcellar": agent_facts(event)}
                yield chunk(index, {"role": "assistant", "content": ""})
                said = {}
            elif isinstance(event, TextEvent):
                logprobs = None
                if event.token is not None and event.token.logprob is not None:
                    if index not in logprobs_of:
                        path = service.models.resolve(head["model"])
                        logprobs_of[index] = ChatLogprobs(service.models.registry.host(path))
                    logprobs = logprobs_of[index].of([event.token])
                if event.text or logprobs:
                    yield chunk(index, {"content": event.text}, logprobs=logprobs)
            elif isinstance(event, CallEvent):
                yield chunk(index, {"tool_calls": [_call_delta(event)]})
            else:
                ends[index] = event
                yield chunk(index, {}, finish_reason=event.reason)
    usage = _usage([ends[i] for i in range(body.n or 1)])
    note(request, agent=ends[0].agent_id, **_facts(usage), **notes_of(ends[0].usage))
    if wants_usage:
        extra = extra_of(ends[0], body)
        yield frame({**head, "choices": [], "usage": usage, "kvcellar": extra})
    yield frame("[DONE]")


def _call_delta(event: CallEvent) -> dict[str, Any]:
    if not event.text:
        return {
            "index": event.index,
            "id": event.call.call_id,
            "type": "function",
            "function": {"name": event.call.name, "arguments": ""},
        }
    return {"index": event.index, "function": {"arguments": event.text}}

"""OpenAI's responses. A stored response is an agent, and what goes on from it is a fork of that.

So a conversation can be taken up at any of its responses, as often as one likes, also after a
restart, and nothing is read again. The response itself, and what it answered, is a document of the
store, which is durable before anybody is told that it is stored.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.agents import n_system_of
from kvcellar.engine import SamplingParams
from kvcellar.errors import AgentError, StoreError, UnknownAgentError
from kvcellar.server.asking import (
    READS_AGENT,
    agent_facts,
    extra_of,
    ignored_of,
    note,
    predictions,
    sampling_of,
    service_of,
    tell_agent,
    text_of,
    tool_choice_of,
    whose_of,
)
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.calls import is_whole, read_arguments, without_tools
from kvcellar.server.chat import Ask, CallEvent, ChatEvent, Ended, Started, TextEvent, answer
from kvcellar.server.errors import ApiError, as_api_error
from kvcellar.server.forms import Form
from kvcellar.server.replies import sse
from kvcellar.server.schemas.openai import NamedTool
from kvcellar.server.schemas.responses import Item, OtherItem, ResponseRequest, read_items
from kvcellar.server.service import Service, as_mapping, new_id
from kvcellar.server.stored import StoredResponse
from kvcellar.server.streams import Stream, frame, until_gone
from kvcellar.server.tools import Toolbox, told

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

PREFIX = "resp_"
MOST_ITEMS = 100
"""Items of a conversation that one page can have."""

_INSTRUCTIONS = "instructions"
"""Marks the system message that belongs to one response alone."""


@dataclass(slots=True)
class _Draft:
    """A response on its way."""

    response_id: str
    created: int
    body: ResponseRequest
    model: str
    before: list[dict[str, Any]] = field(default_factory=list)
    added: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    status: str = "in_progress"
    extra: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    params: SamplingParams | None = None
    end: Ended | None = None

    def sampled(self, name: str, asked: float | None) -> float | None:
        """A setting as it was used; before the end, as it was asked for."""
        return asked if self.params is None else getattr(self.params, name)

    @property
    def is_stored(self) -> bool:
        """Whether it is to be stored, as far as it is known; what has failed is not."""
        return self.body.store is not False and self.status != "failed"

    def items(self) -> list[dict[str, Any]]:
        """The conversation that it answers, as it was sent."""
        body, key = self.body, self.response_id[len(PREFIX) :]
        if isinstance(body.input, str):
            part = {"type": "input_text", "text": body.input}
            given: list[dict[str, Any]] = [{"role": "user", "content": [part]}]
        else:
            given = [item.model_dump(exclude_none=True) for item in body.input]
        return [*self.before, *(_sent(item, f"{key}i{i}") for i, item in enumerate(given))]

    def as_json(self) -> dict[str, Any]:
        """The response as it is now."""
        body = self.body
        is_cut = self.status == "incomplete"
        choice = body.tool_choice or "auto"
        text_format = as_mapping(body.text.format) if body.text and body.text.format else None
        if text_format and body.text and body.text.format and body.text.format.json_schema:
            text_format["schema"] = text_format.pop("json_schema")
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": False,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self.is_stored,
            "temperature": self.sampled("temperature", body.temperature),
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": as_mapping(choice) if isinstance(choice, NamedTool) else choice,
            "tools": [as_mapping(tool) for tool in body.tools or ()],
            "top_p": self.sampled("top_p", body.top_p),
            "truncation": "disabled",
            "usage": self.usage,
            "metadata": body.metadata or {},
            "kvcellar": self.extra,
        }


@router.post("/v1/responses", response_model=None, dependencies=[READS_AGENT])
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """An answer; with ``previous_response_id`` in a conversation that the server knows."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    draft = _Draft(new_id(PREFIX), int(time.time()), body, service.models.public(path))
    events = _events(service, request, draft)
    if body.stream:
        frames = Stream(_frames(request, draft, events))
        return await sse(request, frames, error_event="error", headers=ignored_of(body))

    async def to_the_end() -> None:
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Ended):
                    _finish(draft, event)

    await until_gone(request, to_the_end())
    _note(request, draft)
    headers = {**request.scope.get("kvcellar.headers", {}), **ignored_of(body)}
    return JSONResponse(await _keep(service, draft), headers=headers)


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A response that was stored, as it was."""
    if stream or starting_after is not None:
        raise ApiError(
            400,
            "a stored response comes whole and is not streamed again; leave stream and "
            "starting_after out",
            "unsupported_field",
            param="stream",
        )
    return JSONResponse((await _stored(service_of(request), response_id)).response)


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The conversation that a stored response answered, as it was sent."""
    stored = await _stored(service_of(request), response_id)
    items = list(stored.items)
    instructions = stored.response.get("instructions")
    if instructions:
        part = {"type": "input_text", "text": instructions}
        said = {"role": "system", "content": [part]}
        items.insert(0, _sent(said, f"{response_id[len(PREFIX) :]}instructions"))
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(
                400, f"there is no item {after[:80]!r} in this conversation", param="after"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    has_more = len(items) > limit
    return JSONResponse({"object": "list", "data": page, "has_more": has_more, **ends})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse: a response that is stored has ended, since none runs in the background."""
    await _stored(service_of(request), response_id)
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
        raise _unknown(response_id)
    is_found = await service.responses.delete(response_id)
    try:
        await service.agents.lifecycle.delete(response_id, is_final=True)  # as the API promises
    except UnknownAgentError:
        if not is_found:
            raise _unknown(response_id) from None
    return {"id": response_id, "object": "response", "deleted": True}


# In ----------------------------------------------------------------------------------------------


async def _events(
    service: Service, request: Request, draft: _Draft
) -> AsyncGenerator[ChatEvent, None]:
    """The answer's events. A response that is not stored, or not finished, leaves no agent."""
    body = draft.body
    before: list[dict[str, Any]] = []
    is_stored = body.store is not False
    whose = whose_of(request, body.agent_id, body.session_id, body.prompt_cache_key)
    if whose.name is not None and body.previous_response_id is not None:
        raise ApiError(
            400, "give previous_response_id or an agent, not both", param="previous_response_id"
        )
    previous = None
    if body.previous_response_id is not None:
        previous = await _stored(service, body.previous_response_id)
        draft.before = [*previous.items, *previous.response["output"]]
        _add_items(before, read_items(draft.before))
        draft.added = previous.added
        n_system = n_system_of(before)
        before[n_system:n_system] = previous.added
    if is_stored and whose.name is None:
        whose = replace(whose, own_id=draft.response_id)
        await _begin(service, draft.response_id, previous, service.models.resolve(body.model))
    ask = replace(_ask(service, draft, before), whose=whose)
    is_done = False
    try:
        async with contextlib.aclosing(answer(service, ask)) as events:
            async for event in events:
                is_done |= isinstance(event, Ended)
                if isinstance(event, Started):
                    tell_agent(request, event)
                    draft.extra = agent_facts(event)
                yield event
    finally:
        if whose.own_id is not None and not is_done:
            with contextlib.suppress(UnknownAgentError):
                await service.agents.lifecycle.forget(whose.own_id)


def _ask(service: Service, draft: _Draft, before: list[dict[str, Any]]) -> Ask:
    body = draft.body
    messages = list(before)
    if body.instructions is not None:
        said = {"role": "system", "content": body.instructions, "name": _INSTRUCTIONS}
        messages.insert(0, said)
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        _add_items(messages, body.input)
    if any("logprobs" in name for name in body.include or ()):
        raise ApiError(
            400,
            "include asks for log probabilities, which come on /v1/chat/completions alone",
            "unsupported_field",
            param="include",
        )
    form = None
    wanted = body.text.format if body.text else None
    if wanted is not None and wanted.type == "json_object":
        form = Form("schema", wanted.json_schema or {"type": "object"}, "text.format")
    elif wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "text.format json_schema comes without a schema", param="text")
        form = Form("schema", wanted.json_schema, "text.format", wanted.strict is not False)
    most = body.max_output_tokens or service.config.max_tokens
    return Ask(
        messages=messages,
        model=body.model,
        params=sampling_of(body, max_tokens=most),
        tools=_tools(body),
        choice=tool_choice_of(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        form=form,
    )


def _tools(body: ResponseRequest) -> Toolbox:
    tools = Toolbox()
    for tool in body.tools or ():
        if tool.type == "function" and tool.name is not None:
            tools.add(tool.name, tool.description, tool.parameters, is_strict=bool(tool.strict))
        else:
            tools.leave_out(tool.name, tool.type)
    return tools


def _add_items(messages: list[dict[str, Any]], items: list[Item | OtherItem]) -> None:
    """Items as chat templates take them: calls join the answer that they are part of."""
    for item in items:
        if isinstance(item, OtherItem):
            _add_told(messages, item)
        elif item.type == "function_call":
            call = {
                "id": item.call_id or "",
                "type": "function",
                "function": {
                    "name": item.name or "",
                    "arguments": read_arguments(item.arguments or "{}"),
                },
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {
                **messages[-1],
                "tool_calls": [*messages[-1].get("tool_calls", []), call],
            }
        elif item.type == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "content": text_of(item.output, "input"),
                    "tool_call_id": item.call_id or "",
                }
            )
        elif item.type in (None, "message") and item.role is not None:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content, "input")})
        elif item.type != "reasoning":
            raise ApiError(
                400,
                f"an input item of type {str(item.type)[:40]!r} came without what it needs; this "
                f"server takes messages, function_call and function_call_output",
                "unsupported_content",
                param="input",
            )


def _add_told(messages: list[dict[str, Any]], item: OtherItem) -> None:
    """What a tool that is not run here did belongs to the answer; what came of it does not."""
    text = told(item.type, item.model_extra or {})
    if item.type.endswith(("_output", "_response", "_result")):
        messages.append({"role": "user", "content": text})
    elif messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        before = messages[-1]["content"]
        messages[-1] = {**messages[-1], "content": f"{before}\n{text}" if before else text}
    else:
        messages.append({"role": "assistant", "content": text})


async def _begin(
    service: Service, agent_id: str, previous: StoredResponse | None, model: str
) -> None:
    """Make the agent of a response: where the one before ended, or afresh where that is gone."""
    if previous is not None:
        with contextlib.suppress(UnknownAgentError, AgentError):
            position = previous.n_tokens
            await service.agents.lifecycle.fork(
                previous.agent_id, agent_id, position=position, is_passing=True
            )
            return
    await service.agents.lifecycle.create(agent_id, model=model, is_passing=True)


async def _stored(service: Service, response_id: str) -> StoredResponse:
    """A stored response.

    Raises:
        ApiError: 404, none of that id is.
    """
    found = None
    if response_id.startswith(PREFIX):
        found = await service.responses.get(response_id)
    if found is None:
        raise _unknown(response_id)
    return found


def _sent(item: dict[str, Any], key: str) -> dict[str, Any]:
    """An item as it was sent, with the fields that every listed item has."""
    if "type" not in item:
        item = {"type": "message", **item}
    kind = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": part, "text": content}]}
    return {"id": f"{kind.get(item['type'], 'item')}_{key}", "status": "completed", **item}


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"response {response_id[:80]!r} is not stored here; it was made with store false, deleted, "
        f"or by another server",
        "response_not_found",
        param="previous_response_id",
    )


# Out ---------------------------------------------------------------------------------------------


async def _keep(service: Service, draft: _Draft) -> dict[str, Any]:
    """Store a response that is to be stored, before anybody is told that it is."""
    value, end = draft.as_json(), draft.end
    if end is None or not draft.is_stored:
        return value
    n_tokens = end.usage.prompt_tokens + end.usage.completion_tokens
    added = [*draft.added, *without_tools(end.added)]
    stored = StoredResponse(value, draft.items(), end.agent_id, n_tokens, added)
    try:
        await service.responses.keep(draft.response_id, stored)
    except StoreError as error:
        notes = [*value["kvcellar"]["notes"], f"it could not be stored: {error}"]
        value |= {"store": False, "kvcellar": {**value["kvcellar"], "notes": notes}}
    return value


def _finish(draft: _Draft, end: Ended) -> None:
    """Take the end of the answer into the response."""
    draft.end = end
    draft.output = []
    is_cut = end.reason == "length"
    if end.text or not end.calls:
        status = _status(is_cut and not end.calls)
        draft.output.append(_text_item(draft, 0, end.text, status))
    for call in end.calls:
        status = _status(end.is_inside_call and call is end.calls[-1])
        draft.output.append(_call_item(call.call_id, call.name, call.arguments, status))
    usage = end.usage
    draft.usage = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, **predictions([usage])},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    draft.status = _status(is_cut)
    draft.params = end.params
    draft.extra = extra_of(end, draft.body)


def _status(is_cut: bool) -> str:
    return "incomplete" if is_cut else "completed"


def _note(request: Request, draft: _Draft) -> None:
    if draft.usage is not None and draft.extra is not None:
        note(
            request,
            agent=draft.extra["agent_id"],
            prompt_tokens=draft.usage["input_tokens"],
            cached_tokens=draft.usage["input_tokens_details"]["cached_tokens"],
            completion_tokens=draft.usage["output_tokens"],
            first_token_s=draft.extra["first_token_s"],
            **({"notes": draft.extra["notes"]} if draft.extra["notes"] else {}),
        )


def _text_item(draft: _Draft, index: int, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {
        "id": f"msg_{draft.response_id[len(PREFIX) :]}{index}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


async def _frames(
    request: Request, draft: _Draft, events: AsyncGenerator[ChatEvent, None]
) -> AsyncGenerator[bytes, None]:
    """Every event has a number; items open and close one after the other."""

    def said(kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": draft.number, **fields}
        draft.number += 1
        return frame(value, kind)

    writer = _Items(draft, said)
    try:
        async with contextlib.aclosing(_said_of(request, draft, events, writer, said)) as bodies:
            async for body in bodies:
                yield body
    except Exception as error:
        if not draft.number:  # it can still be a status
            raise
        for body in writer.close(is_cut=True):
            yield body
        refusal = as_api_error(error)
        draft.output, draft.status = writer.items, "failed"
        draft.error = {"code": refusal.code or "server_error", "message": str(refusal)}
        yield said("response.failed", response=draft.as_json())


async def _said_of(
    request: Request,
    draft: _Draft,
    events: AsyncGenerator[ChatEvent, None],
    writer: _Items,
    said: Callable[..., bytes],
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Started):
                yield said("response.created", response=draft.as_json())
                yield said("response.in_progress", response=draft.as_json())
            elif isinstance(event, TextEvent):
                for body in writer.text(event.text):
                    yield body
            elif isinstance(event, CallEvent):
                for body in writer.call(event):
                    yield body
            else:
                if not writer.is_begun:
                    for body in writer.begin_text():
                        yield body
                for body in writer.close(event.reason == "length"):
                    yield body
                done = writer.items
                _finish(draft, event)
                draft.output = done
                _note(request, draft)
                value = await _keep(service_of(request), draft)
                yield said(f"response.{draft.status}", response=value)


@dataclass(slots=True)
class _Items:
    """Output items as they are written."""

    draft: _Draft
    said: Callable[..., bytes]
    items: list[dict[str, Any]] = field(default_factory=list)
    _text: str = ""
    _call: CallEvent | None = None
    _is_open: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether there is an item."""
        return bool(self.items) or self._is_open

    def text(self, text: str) -> list[bytes]:
        """A piece of text."""
        if not text:
            return []
        bodies = self.begin_text() if not self._is_open or self._call is not None else []
        self._text += text
        place = self._place()
        delta = {"content_index": 0, "delta": text, "logprobs": []}
        return [*bodies, self.said("response.output_text.delta", **place, **delta)]

    def begin_text(self) -> list[bytes]:
        """An item for text."""
        bodies = self.close()
        self._is_open, self._call, self._text = True, None, ""
        item = _text_item(self.draft, len(self.items), None, "in_progress")
        place = self._place()
        return [
            *bodies,
            self.said("response.output_item.added", output_index=len(self.items), item=item),
            self.said("response.content_part.added", **place, content_index=0, part=_part("")),
        ]

    def call(self, event: CallEvent) -> list[bytes]:
        """A piece of a call."""
        bodies = []
        if self._call is None or self._call.index != event.index:
            bodies = self.close()
            self._is_open, self._call = True, event
            item = _call_item(event.call.call_id, event.call.name, "", "in_progress")
            bodies.append(
                self.said("response.output_item.added", output_index=len(self.items), item=item)
            )
        if event.text:
            kind = "response.function_call_arguments.delta"
            bodies.append(self.said(kind, **self._place(), delta=event.text))
        return bodies

    def close(self, is_cut: bool = False) -> list[bytes]:
        """The end of the item that is open, if one is; ``is_cut`` where the answer has more."""
        if not self._is_open:
            return []
        place, index = self._place(), len(self.items)
        self._is_open = False
        if self._call is not None:
            call = self._call.call
            is_cut = not is_whole(call)
            item = _call_item(call.call_id, call.name, call.arguments, _status(is_cut))
            kind = "response.function_call_arguments.done"
            done = self.said(kind, **place, name=call.name, arguments=call.arguments)
            bodies = [] if is_cut else [done]
        else:
            item = _text_item(self.draft, index, self._text, _status(is_cut))
            at = {**place, "content_index": 0}
            bodies = [
                self.said("response.output_text.done", **at, text=self._text, logprobs=[]),
                self.said("response.content_part.done", **at, part=_part(self._text)),
            ]
        self.items.append(item)
        self._call = None
        return [*bodies, self.said("response.output_item.done", output_index=index, item=item)]

    def _place(self) -> dict[str, Any]:
        index = len(self.items)
        item_id = f"msg_{self.draft.response_id[len(PREFIX) :]}{index}"
        if self._call is not None:
            item_id = f"fc_{self._call.call.call_id}"
        return {"item_id": item_id, "output_index": index}

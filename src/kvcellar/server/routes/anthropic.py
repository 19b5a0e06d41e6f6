"""Anthropic's messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.engine import SamplingParams
from kvcellar.errors import PromptError
from kvcellar.server.asking import (
    READS_AGENT,
    agent_facts,
    answer_headers,
    extra_of,
    ignored_of,
    note,
    notes_of,
    predictions,
    service_of,
    tell_agent,
    unset_in,
    whose_of,
)
from kvcellar.server.bodies import BodyRoute
from kvcellar.server.chat import (
    Ask,
    CallEvent,
    ChatEvent,
    Ended,
    Pin,
    Started,
    TextEvent,
    answer,
    count_tokens,
    whole,
)
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import Form
from kvcellar.server.replies import sse
from kvcellar.server.schemas.anthropic import Block, CacheControl, CountRequest, MessagesRequest
from kvcellar.server.service import new_id
from kvcellar.server.streams import Stream, frame, until_gone
from kvcellar.server.tools import Toolbox, ToolChoice, told
from kvcellar.valid import valid_json

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)

_TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SKIPPED = ("thinking", "redacted_thinking")
_READ = ("text", "tool_use", "tool_result", "image", "document", *_SKIPPED)
"""Blocks that mean something to this server; what tools of Anthropic's did is told as text."""


@router.post("/v1/messages/count_tokens", dependencies=[READS_AGENT])
async def count(request: Request, body: CountRequest) -> dict[str, int]:
    """The tokens that a turn would have as its prompt, an agent's history with them."""
    service = service_of(request)
    messages, _ = _messages(body)
    ask = Ask(
        messages,
        SamplingParams(),
        model=body.model,
        tools=_tools(body),
        whose=whose_of(request, body.agent_id),
    )
    return {"input_tokens": await count_tokens(service, ask)}


@router.post("/v1/messages", response_model=None, dependencies=[READS_AGENT])
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """An answer in a conversation."""
    service = service_of(request)
    messages, pins = _messages(body)
    if body.cache_control is not None:
        pins.append(Pin(len(messages), _TTL_S[body.cache_control.ttl]))
    choice = body.tool_choice
    wanted = body.output_format or (body.output_config.format if body.output_config else None)
    ask = Ask(
        messages=messages,
        model=body.model,
        params=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=body.seed,
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            unset=unset_in(body),
        ),
        tools=_tools(body),
        choice=_choice(body),
        is_parallel=not (choice and choice.disable_parallel_tool_use),
        form=Form("schema", wanted.json_schema, "output_config") if wanted else None,
        whose=whose_of(
            request,
            body.agent_id,
            body.session_id,
            body.metadata.user_id if body.metadata else None,
        ),
        pins=pins,
    )
    message_id = new_id("msg_")
    if body.stream:
        frames = Stream(_frames(request, body, answer(service, ask), message_id))
        ping = frame({"type": "ping"}, "ping")
        return await sse(request, frames, ping=ping, error_event="error", headers=ignored_of(body))
    end, _ = await until_gone(request, whole(answer(service, ask)))
    usage = _usage(end)
    note(request, agent=end.agent_id, **usage, **notes_of(end.usage))
    return JSONResponse(
        {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": end.model,
            "content": _content(end),
            "stop_reason": _stop_reason(end),
            "stop_sequence": end.stop_text,
            "usage": usage,
            "kvcellar": extra_of(end, body),
        },
        headers={**answer_headers(end), **ignored_of(body)},
    )


# What comes --------------------------------------------------------------------------------------


def _choice(body: MessagesRequest) -> ToolChoice:
    if body.tool_choice is None:
        return ToolChoice()
    if body.tool_choice.type == "tool":
        if body.tool_choice.name is None:
            raise ApiError(400, "tool_choice of type tool names no tool", param="tool_choice.name")
        return ToolChoice("required", (body.tool_choice.name,))
    return ToolChoice(_CHOICES[body.tool_choice.type])


def _tools(body: CountRequest) -> Toolbox:
    """Tools as OpenAI has them, which is how chat templates do."""
    tools = Toolbox()
    for tool in body.tools or ():
        if tool.is_function and tool.name is not None:
            is_strict = bool(tool.strict)
            tools.add(tool.name, tool.description, tool.input_schema, is_strict=is_strict)
        else:
            tools.leave_out(tool.name, tool.type or "custom")
    return tools


def _messages(body: CountRequest) -> tuple[list[dict[str, Any]], list[Pin]]:
    """Messages as chat templates take them, and the wishes to keep what comes before some."""
    messages: list[dict[str, Any]] = []
    pins: list[Pin] = []

    def wish(control: CacheControl | None) -> None:
        if control is not None:
            pins.append(Pin(len(messages), _TTL_S[control.ttl]))

    if body.system:
        blocks = [Block(type="text", text=body.system)] if isinstance(body.system, str) else []
        blocks = blocks or list(body.system)  # type: ignore[arg-type]
        text = "\n".join(_text(block) for block in blocks)
        messages.append({"role": "system", "content": text})
        for block in blocks:
            wish(block.cache_control)
    for tool in body.tools or ():
        if body.system:
            wish(tool.cache_control)
    for message in body.messages:
        content = message.content
        given = [Block(type="text", text=content)] if isinstance(content, str) else content
        messages.extend(_of_assistant(given) if message.role == "assistant" else _of_user(given))
        if message.role == "system":
            messages[-1]["role"] = "system"
        for block in given:
            wish(block.cache_control)
    return messages, pins


def _of_user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Results of tools first, each a message, then what somebody says."""
    results = [
        {
            "role": "tool",
            "content": _result(block),
            "tool_call_id": block.tool_use_id or "",
        }
        for block in blocks
        if block.type == "tool_result"
    ]
    said = [block for block in blocks if block.type != "tool_result"]
    if said or not results:
        return [*results, {"role": "user", "content": "\n".join(_text(block) for block in said)}]
    return results


def _of_assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts = [_text(b) for b in blocks if b.type not in ("tool_use", *_SKIPPED)]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    calls = [
        {
            "id": block.id or "",
            "type": "function",
            "function": {"name": block.name or "", "arguments": block.input or {}},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _result(block: Block) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    if isinstance(block.content, dict):
        return told(block.type, block.content)
    return "\n".join(_text(part) for part in block.content)


def _text(block: Block) -> str:
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type in _READ:
        raise ApiError(
            400,
            f"a content block of type {block.type[:40]!r} came where this server takes text",
            "unsupported_content",
            param="messages",
        )
    return told(block.type, block.model_dump(exclude_none=True))


# What goes ---------------------------------------------------------------------------------------


def _usage(end: Ended) -> dict[str, int]:
    """Tokens that were read from the cache, put into it on request, and all others; guesses."""
    return {
        **_counts(end.usage.prompt_tokens, end.usage.cached_tokens, end.pinned_tokens),
        "output_tokens": end.usage.completion_tokens,
        **predictions([end.usage]),
    }


def _counts(n_prompt: int, n_cached: int, n_pinned: int) -> dict[str, int]:
    created = max(0, n_pinned - n_cached)
    return {
        "input_tokens": n_prompt - n_cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": n_cached,
    }


def _stop_reason(end: Ended) -> str:
    if end.stop_text is not None:
        return "stop_sequence"
    if end.cause in ("cache_full", "context_full"):
        return "model_context_window_exceeded"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[end.reason]


def _content(end: Ended) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if end.text or not end.calls:
        blocks.append({"type": "text", "text": end.text, "citations": None})
    for call in end.calls:
        value = _input(call.arguments)
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; where the answer ended inside them, as far as they came."""
    try:
        value = valid_json(from_json(arguments, allow_partial="trailing-strings"))
    except (ValueError, PromptError):
        return {}
    return value if isinstance(value, dict) else {}


async def _frames(
    request: Request,
    body: MessagesRequest,
    events: AsyncGenerator[ChatEvent, None],
    message_id: str,
) -> AsyncGenerator[bytes, None]:
    """In the order that clients count on: start, blocks one after the other, delta, stop."""

    def said(kind: str, **fields: Any) -> bytes:
        return frame({"type": kind, **fields}, kind)

    index, is_open, in_call = -1, False, -1

    def closing() -> list[bytes]:
        return [said("content_block_stop", index=index)] if is_open else []

    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Started):
                counts = _counts(event.prompt_tokens, event.cached_tokens, event.pinned_tokens)
                message: dict[str, Any] = {
                    "id": message_id,
                    "type": "message",
                    "role": "assistant",
                    "model": event.model,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": {**counts, "output_tokens": 1},
                }
                tell_agent(request, event)
                if event.notice is not None:
                    message["kvcellar"] = agent_facts(event)
                yield said("message_start", message=message)
            elif isinstance(event, TextEvent):
                if not event.text:
                    continue
                if not is_open or in_call >= 0:
                    for piece in closing():
                        yield piece
                    index, is_open, in_call = index + 1, True, -1
                    block: dict[str, Any] = {"type": "text", "text": ""}
                    yield said("content_block_start", index=index, content_block=block)
                delta = {"type": "text_delta", "text": event.text}
                yield said("content_block_delta", index=index, delta=delta)
            elif isinstance(event, CallEvent):
                if event.index != in_call:
                    for piece in closing():
                        yield piece
                    index, is_open, in_call = index + 1, True, event.index
                    call = event.call
                    block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
                    yield said("content_block_start", index=index, content_block=block)
                if event.text:
                    delta = {"type": "input_json_delta", "partial_json": event.text}
                    yield said("content_block_delta", index=index, delta=delta)
            else:
                for piece in closing():
                    yield piece
                usage = _usage(event)
                note(request, agent=event.agent_id, **usage, **notes_of(event.usage))
                ending = {"stop_reason": _stop_reason(event), "stop_sequence": event.stop_text}
                extra = extra_of(event, body)
                yield said("message_delta", delta=ending, usage=usage, kvcellar=extra)
                yield said("message_stop")

"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.dialects import CallPart, Part, TextPart
from kvcellar.engine import SamplingParams
from kvcellar.errors import PromptError
from kvcellar.grammar.form import ResponseFormat
from kvcellar.pictures.placed_text import PicturedText, joined
from kvcellar.server.answer.answer_facts import (
    AnswerFrames,
    agent_facts,
    answer_headers,
    extra_of,
    ignored_of,
    note,
    notes_of,
    predictions,
)
from kvcellar.server.answer.chat import answer, read_prompt, whole
from kvcellar.server.answer.dialogue import (
    ChatEvent,
    Ended,
    PartEvent,
    PinWish,
    Question,
    Started,
)
from kvcellar.server.answer.media import MEDIA, PICTURES, THOUGHT, LeftOut
from kvcellar.server.answer.parsing import READS_AGENT, whose_of
from kvcellar.server.answer.pictures import SentPicture, take_pictures
from kvcellar.server.answer.thinking import Thinking
from kvcellar.server.answer.threads import PREFIX, Thread, thread_of
from kvcellar.server.answer.tools import Toolbox, ToolChoice, told
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.schemas.anthropic import (
    CacheControl,
    ContentBlock,
    CountRequest,
    MessagesRequest,
    Source,
)
from kvcellar.server.schemas.sampler import unset_in, values_in
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.service import Service, new_id, service_of
from kvcellar.server.state.signing import Signer
from kvcellar.server.stream.replies import frame, sse
from kvcellar.server.stream.streams import MergedStream, until_gone
from kvcellar.valid import valid_json

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)

_TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")
_SEARCH = "tool_search_tool"
_READ = ("text", "tool_use", "tool_result", *_THOUGHTS)
"""Blocks that mean something to this server; what tools of Anthropic's did is told as text."""


@router.post("/v1/messages/count_tokens", dependencies=[READS_AGENT])
async def count(request: Request, body: CountRequest) -> dict[str, int]:
    """Count the tokens that a turn would have as its prompt, an agent's history with them."""
    service = service_of(request)
    whose = whose_of(request, body.agent_id, salt=body.cache_salt)
    thread = await thread_of(service, body, whose.salt)
    left_out = await take_pictures(request, body.model, _pictures(body), whose.salt)
    tools = _tools(body)
    question = Question(
        _messages(service, body, tools, left_out, thread)[0],
        SamplingParams(),
        model=body.model,
        tools=tools,
        thinking=_thinking(body),
        whose=whose,
    )
    return {"input_tokens": len(await read_prompt(service, question))}


@router.post("/v1/messages", response_model=None, dependencies=[READS_AGENT])
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer in a conversation, or in a thread, of which the server has the rest."""
    service = service_of(request)
    whose = whose_of(
        request,
        body.agent_id,
        body.session_id,
        body.metadata.user_id if body.metadata else None,
        salt=body.cache_salt,
    )
    thread = await thread_of(service, body, whose.salt)
    left_out = await take_pictures(request, body.model, _pictures(body), whose.salt, body)
    question = _question(service, body, whose, thread, left_out)
    message_id = new_id(PREFIX)
    if body.stream:
        frames = MessageFrames(request, body, message_id, thread)
        return await sse(
            request, MergedStream.of(answer(service, question)), frames, ignored_of(body)
        )
    ((end, _),) = await until_gone(request, whole(service, [question]))
    message = await _ended(request, body, message_id, thread, end)
    return JSONResponse(message, headers={**answer_headers(end), **ignored_of(body)})


# What comes --------------------------------------------------------------------------------------


def _question(
    service: Service,
    body: MessagesRequest,
    whose: Whose,
    thread: Thread | None,
    left_out: LeftOut,
) -> Question:
    tools = _tools(body)
    messages, pins = _messages(service, body, tools, left_out, thread)
    if body.cache_control is not None:
        pins.append(PinWish(len(messages), _TTL_S[body.cache_control.ttl]))
    choice = body.tool_choice
    wanted = body.output_format or (body.output_config.format if body.output_config else None)
    return Question(
        messages=messages,
        model=body.model,
        params=SamplingParams(
            **values_in(body),
            seed=body.seed,
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            unset=unset_in(body),
        ),
        tools=tools,
        choice=_choice(body),
        is_parallel=not (choice and choice.disable_parallel_tool_use),
        form=ResponseFormat("schema", wanted.json_schema, "output_config") if wanted else None,
        thinking=_thinking(body),
        whose=whose,
        pins=pins,
        left_out=left_out,
    )


def _thinking(body: CountRequest) -> Thinking:
    switch, config = body.thinking, body.output_config
    return Thinking(
        body.chat_template_kwargs or {},
        None if switch is None else switch.type != "disabled",
        config.effort if config else None,
        switch.budget_tokens if switch and switch.type == "enabled" else None,
    )


def _is_omitted(body: CountRequest) -> bool:
    """Return true if what the model thinks is not to be shown."""
    return body.thinking is not None and body.thinking.display == "omitted"


def _choice(body: MessagesRequest) -> ToolChoice:
    if body.tool_choice is None:
        return ToolChoice()
    if body.tool_choice.type == "tool":
        if body.tool_choice.name is None:
            raise ApiError(400, "tool_choice of type tool names no tool", param="tool_choice.name")
        return ToolChoice("required", (body.tool_choice.name,))
    return ToolChoice(_CHOICES[body.tool_choice.type])


def _tools(body: CountRequest) -> Toolbox:
    """Tools as OpenAI has them, which is how chat templates do.

    Deferred ones wait for a result that refers to them, as the client's own search gives it. A
    search that is Anthropic's to run never will, so beside one nothing is deferred.
    """
    tools = Toolbox()
    is_searched = any((tool.type or "").startswith(_SEARCH) for tool in body.tools or ())
    for tool in body.tools or ():
        if tool.is_function and tool.name is not None:
            tools.add(
                tool.name,
                tool.description,
                tool.input_schema,
                is_strict=bool(tool.strict),
                is_deferred=bool(tool.defer_loading) and not is_searched,
            )
        else:
            tools.leave_out(tool.name, tool.type or "custom")
    return tools


def _messages(
    service: Service,
    body: CountRequest,
    tools: Toolbox,
    left_out: LeftOut,
    thread: Thread | None,
) -> tuple[list[dict[str, Any]], list[PinWish]]:
    """Messages as chat templates take them, and the wishes to keep what comes before some."""
    messages: list[dict[str, Any]] = []
    pins: list[PinWish] = []

    def wish(control: CacheControl | None) -> None:
        if control is not None:
            pins.append(PinWish(len(messages), _TTL_S[control.ttl]))

    if body.system:
        blocks = (
            [ContentBlock(type="text", text=body.system)] if isinstance(body.system, str) else []
        )
        blocks = blocks or list(body.system)  # type: ignore[arg-type]
        messages.append({"role": "system", **_joined(blocks, left_out).fields()})
        for block in blocks:
            wish(block.cache_control)
    for tool in body.tools or ():
        if body.system:
            wish(tool.cache_control)
    messages += thread.added if thread is not None else ()
    for message in body.messages:
        content = message.content
        given = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            reasoning = _reasoning(service.signer, given, left_out)
            messages.append(_of_assistant(given, reasoning, left_out))
        else:
            messages.extend(_of_user(given, tools, left_out))
        if message.role == "system":
            messages[-1]["role"] = "system"
        for block in given:
            wish(block.cache_control)
    return messages, pins


def _pictures(body: CountRequest) -> Iterator[SentPicture]:
    """Yield the pictures of a request, those in results of tools and in documents with them."""
    system = [] if body.system is None or isinstance(body.system, str) else [body.system]
    said = [one.content for one in body.messages if not isinstance(one.content, str)]
    for blocks in (*system, *said):
        yield from _pictures_in(blocks)


def _pictures_in(blocks: Sequence[ContentBlock]) -> Iterator[SentPicture]:
    for block in blocks:
        source = block.source
        if block.type in PICTURES:
            given = source if isinstance(source, Source) else Source(type=None)

            def put(link: str, block: ContentBlock = block) -> None:
                block.source = Source(type="url", url=link)

            yield SentPicture(given.picture, "messages", put)
        elif isinstance(source, Source) and isinstance(source.content, list):
            yield from _pictures_in(source.content)
        if isinstance(block.content, list):
            yield from _pictures_in(block.content)


def _reasoning(signer: Signer, blocks: Sequence[ContentBlock], left_out: LeftOut) -> str:
    """Return what blocks of thinking say, as far as this server signed them as they are."""
    said = ""
    for block in blocks:
        if block.type in _THOUGHTS:
            text, signature = block.thinking or "", block.signature or ""
            found = text if signer.has_signed(text, signature) else signer.opened(signature)
            left_out[THOUGHT] += found is None
            said += found or ""
    return said


def _of_user(
    blocks: Sequence[ContentBlock], tools: Toolbox, left_out: LeftOut
) -> list[dict[str, Any]]:
    """Results of tools first, each a message, then what somebody says."""
    results = [
        {
            "role": "tool",
            **_result(block, tools, left_out).fields(),
            "tool_call_id": block.tool_use_id or "",
        }
        for block in blocks
        if block.type == "tool_result"
    ]
    said = [block for block in blocks if block.type != "tool_result"]
    if said or not results:
        return [*results, {"role": "user", **_joined(said, left_out).fields()}]
    return results


def _of_assistant(
    blocks: Sequence[ContentBlock], reasoning: str, left_out: LeftOut
) -> dict[str, Any]:
    texts = [_text(b, left_out) for b in blocks if b.type not in ("tool_use", *_THOUGHTS)]
    message: dict[str, Any] = {"role": "assistant", **joined(texts, "").fields()}
    if reasoning:
        message["reasoning_content"] = reasoning
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
    return message


def _result(block: ContentBlock, tools: Toolbox, left_out: LeftOut) -> PicturedText:
    if block.content is None or isinstance(block.content, str):
        return PicturedText(block.content or "")
    if isinstance(block.content, dict):
        return PicturedText(told(block.type, block.content))
    return joined(
        PicturedText(tools.refer(part.tool_name or ""))
        if part.type == "tool_reference"
        else _text(part, left_out)
        for part in block.content
    )


def _joined(blocks: Sequence[ContentBlock], left_out: LeftOut) -> PicturedText:
    return joined(_text(block, left_out) for block in blocks)


def _text(block: ContentBlock, left_out: LeftOut) -> PicturedText:
    if block.type == "text" and block.text is not None:
        return PicturedText(block.text)
    if block.type == "document" and isinstance(block.source, Source) and block.source.is_text:
        title = [PicturedText(f"{block.title}:")] if block.title else []
        inside = block.source.content
        texts = inside if isinstance(inside, list) else [block.source.data or inside or ""]
        said = (
            _text(t, left_out) if isinstance(t, ContentBlock) else PicturedText(t) for t in texts
        )
        return joined([*title, *said])
    if block.type in MEDIA:
        link = block.source.url if isinstance(block.source, Source) else None
        shown, _ = left_out.shown(block.type, link, block.title)
        return joined([shown, *([PicturedText(block.text)] if block.text else [])])
    if block.type in _READ:
        raise ApiError(
            400,
            f"a content block of type {block.type[:40]!r} came where this server takes text",
            "unsupported_content",
            param="messages",
        )
    return PicturedText(told(block.type, block.model_dump(exclude_none=True)))


# What goes ---------------------------------------------------------------------------------------


async def _ended(
    request: Request, body: MessagesRequest, message_id: str, thread: Thread | None, end: Ended
) -> dict[str, Any]:
    """Return an answer as its client is told; in a thread it is on disk before that."""
    service, usage = service_of(request), _usage(end)
    note(request, agent=end.agent_id, **usage, **notes_of(end.usage))
    extra = extra_of(end, body)
    message = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": end.model,
        "content": _content(end, service.signer, _is_omitted(body)),
        "stop_reason": _stop_reason(end),
        "stop_sequence": end.stop_text,
        "usage": usage,
        "kvcellar": extra,
    }
    if thread is not None:
        extra["notes"] += await thread.keep(service, body, message, end)
    return message


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


def _content(end: Ended, signer: Signer, is_omitted: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if end.reasoning:
        signature = _signature(signer, end.reasoning, is_omitted)
        said = "" if is_omitted else end.reasoning
        blocks.append({"type": "thinking", "thinking": said, "signature": signature})
    if end.text or not (end.calls or end.reasoning):
        blocks.append({"type": "text", "text": end.text, "citations": None})
    for call in end.calls:
        value = _input(call.arguments)
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
    return blocks


def _signature(signer: Signer, reasoning: str, is_omitted: bool) -> str:
    """Return the signature of a block of thinking; it has all of it where the block is empty."""
    return signer.seal(reasoning) if is_omitted else signer.sign(reasoning)


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; where the answer ended inside them, as far as they came."""
    try:
        value = valid_json(from_json(arguments, allow_partial="trailing-strings"))
    except (ValueError, PromptError):
        return {}
    return value if isinstance(value, dict) else {}


class MessageFrames(AnswerFrames):
    """Events in the order that clients count on: start, blocks one after the other, delta, stop."""

    ping = frame({"type": "ping"}, "ping")
    error_event = "error"

    def __init__(
        self, request: Request, body: MessagesRequest, message_id: str, thread: Thread | None
    ) -> None:
        """Write one message, which has no block yet."""
        super().__init__(request)
        self._body = body
        self._message_id = message_id
        self._thread = thread
        self._index = -1
        self._open: str | int = ""
        """The open block: ``text``, ``thinking``, or the number of a call."""
        self._thought = ""
        """All text of the open block of thinking."""

    async def of(self, number: int, item: ChatEvent) -> bytes:
        """Write the next event."""
        if isinstance(item, PartEvent):
            return self._part(item.part)
        return self._start(item) if isinstance(item, Started) else await self._end(item)

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallPart):
            return self._called(part)
        if not part.text:
            return b""
        return self._text(part.text) if isinstance(part, TextPart) else self._think(part.text)

    def _start(self, event: Started) -> bytes:
        counts = _counts(event.prompt_tokens, event.cached_tokens, event.pinned_tokens)
        message: dict[str, Any] = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": event.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**counts, "output_tokens": 1},
        }
        if event.notice is not None:
            message["kvcellar"] = agent_facts(event)
        return _said("message_start", message=message)

    def _text(self, text: str) -> bytes:
        begun = b""
        if self._open != "text":
            begun = self._begin({"type": "text", "text": ""}, "text")
        return begun + self._delta({"type": "text_delta", "text": text})

    def _think(self, text: str) -> bytes:
        begun = b""
        if self._open != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            begun, self._thought = self._begin(block, "thinking"), ""
        self._thought += text
        if _is_omitted(self._body):
            return begun
        return begun + self._delta({"type": "thinking_delta", "thinking": text})

    def _called(self, part: CallPart) -> bytes:
        begun, call = b"", part.call
        if part.index != self._open:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            begun = self._begin(block, part.index)
        if not part.text:
            return begun
        return begun + self._delta({"type": "input_json_delta", "partial_json": part.text})

    async def _end(self, event: Ended) -> bytes:
        message = await _ended(self._request, self._body, self._message_id, self._thread, event)
        ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        facts = {name: message[name] for name in ("usage", "kvcellar")}
        delta = _said("message_delta", delta=ending, **facts)
        said = b"" if self._index >= 0 else self._begin({"type": "text", "text": ""}, "text")
        return said + self._close() + delta + _said("message_stop")

    def _begin(self, block: dict[str, Any], what: str | int) -> bytes:
        """Begin a block, behind the one that is open, if one is."""
        closed = self._close()
        self._index, self._open = self._index + 1, what
        return closed + _said("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _said("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        signed = b""
        if self._open == "thinking":
            signer = service_of(self._request).signer
            signature = _signature(signer, self._thought, _is_omitted(self._body))
            signed = self._delta({"type": "signature_delta", "signature": signature})
        if self._index < 0:
            return b""
        return signed + _said("content_block_stop", index=self._index)


def _said(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, kind)

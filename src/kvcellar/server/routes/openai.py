"""OpenAI's models and chat completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcellar.dialects import CallPart, Part, ReasoningPart, TextPart, dialect_for
from kvcellar.engine import GeneratedToken
from kvcellar.server.answer.answer_facts import (
    AnswerFrames,
    agent_facts,
    answer_headers,
    call_delta,
    calls_of,
    extra_of,
    ignored_of,
    note,
    notes_of,
    predictions,
)
from kvcellar.server.answer.chat import answer, read_prompt, whole
from kvcellar.server.answer.completions import score_prompt
from kvcellar.server.answer.dialogue import (
    ChatEvent,
    Ended,
    PartEvent,
    Question,
    Started,
)
from kvcellar.server.answer.logprobs import ChatLogprobs, prompt_logprobs
from kvcellar.server.answer.media import LeftOut
from kvcellar.server.answer.parsing import (
    READS_AGENT,
    chat_pictures,
    check_continued,
    most_of,
    plain_messages,
    refuse_streamed_scores,
    sampling_of,
    tool_choice_of,
    whose_of,
)
from kvcellar.server.answer.pictures import take_pictures
from kvcellar.server.answer.response_format import form_of
from kvcellar.server.answer.thinking import Thinking, only_one
from kvcellar.server.answer.tools import Toolbox
from kvcellar.server.errors import ApiError
from kvcellar.server.front.bodies import BodyRoute
from kvcellar.server.schemas.openai import ChatRequest, FunctionTool
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.service import Service, new_id, service_of
from kvcellar.server.stream.replies import frame, sse
from kvcellar.server.stream.streams import MergedStream, until_gone

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the models that are offered, for clients of OpenAI's and of Anthropic's."""
    service = service_of(request)
    data = [await _model(service, name) for name in service.models.offered]
    data += [_vectors_of(service, name) for name in service.models.embedding_models]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return {"object": "list", "data": data, **ids}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one model."""
    service = service_of(request)
    if name in service.models.embedding_models:
        return _vectors_of(service, name)
    return await _model(service, service.models.public(service.models.resolve(name)))


def _vectors_of(service: Service, name: str) -> dict[str, Any]:
    """Describe a model that makes vectors alone."""
    context = service.models.embedding_models[name].context
    return _described(service, name, context, context)


async def _model(service: Service, name: str) -> dict[str, Any]:
    path = service.models.resolve(name)
    context, trained = await asyncio.to_thread(service.models.context, path) or (None, None)
    found = _described(service, name, context, trained)
    host = service.models.registry.host(path)
    if host is not None:  # before, nobody has read its template
        found["meta"]["dialect"] = dialect_for(host.tokenizer, service.config.dialect).name
    return found


def _described(
    service: Service, name: str, context: int | None, trained: int | None
) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.models.created_s))
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
        "parent": service.models.parent(name),  # of an adapter, as vLLM says it
    }


@router.post("/v1/chat/completions", response_model=None, dependencies=[READS_AGENT])
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer in a conversation, ``n`` times; the answers share what came before."""
    service = service_of(request)
    path = service.models.resolve(body.model)
    whose = whose_of(
        request, body.agent_id, body.session_id, body.prompt_cache_key, salt=body.cache_salt
    )
    pictures = chat_pictures(body.messages)
    read = await take_pictures(request, body.model, pictures, whose.salt, body)
    questions = [_question(service, body, i, whose, read) for i in range(body.n or 1)]
    if questions[0].whose.name is not None and len(questions) > 1:
        raise ApiError(
            400, "an agent gives one answer in a turn; leave n out, or fork the agent", param="n"
        )
    if len(questions) + service.n_active > service.config.max_requests:
        with service.admitted(len(questions)):  # all of them or none
            pass
    head = {
        "id": new_id("chatcmpl-"),
        "created": int(time.time()),
        "model": service.models.public(path),
        "system_fingerprint": "kvcellar",
    }
    refuse_streamed_scores(body)
    if body.stream:
        events = MergedStream.of(*(answer(service, question) for question in questions))
        return await sse(request, events, ChatFrames(request, body, head), ignored_of(body))
    scored = None
    if body.prompt_logprobs is not None:
        work = _scored(service, path, questions[0], body.prompt_logprobs)
        scored = await until_gone(request, work)
    found = await until_gone(request, whole(service, questions))
    host = service.models.registry.host(path)
    choices = [
        {
            "index": i,
            "message": _message(end, _shows_reasoning(body)),
            "logprobs": ChatLogprobs(host).of(tokens) if body.logprobs else None,
            "finish_reason": end.reason,
        }
        for i, (end, tokens) in enumerate(found)
    ]
    first, usage = found[0][0], _usage([end for end, _ in found])
    note(request, agent=first.agent_id, **_facts(usage), **notes_of(first.usage))
    value: dict[str, Any] = {"object": "chat.completion", "choices": choices, "usage": usage}
    if scored is not None:
        value["prompt_logprobs"] = scored
    return JSONResponse(
        {**head, **value, "kvcellar": extra_of(first, body)},
        headers={**answer_headers(first), **ignored_of(body)},
    )


def _question(
    service: Service, body: ChatRequest, index: int, whose: Whose, read: LeftOut
) -> Question:
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
    most = most_of(service, body.max_completion_tokens, body.max_tokens)
    left_out = read.anew()
    messages = plain_messages(body.messages, left_out)
    check_continued(messages, body.continue_final_message, body.add_generation_prompt)
    return Question(
        messages=messages,
        model=body.model,
        params=sampling_of(body, max_tokens=most, logprobs=logprobs, index=index),
        tools=tools_of(body.tools),
        choice=tool_choice_of(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        form=form_of(body),
        thinking=_thinking(body),
        whose=whose,
        left_out=left_out,
    )


def _thinking(body: ChatRequest) -> Thinking:
    """Return how much the model thinks, from the fields of all servers that have one for it.

    Raises:
        ApiError: 400, two of them contradict each other.
    """
    switch, wish = body.thinking, body.reasoning
    is_on = None if switch is None or switch.type == "auto" else switch.type != "disabled"
    return Thinking(
        body.chat_template_kwargs or {},
        only_one(
            enable_thinking=body.enable_thinking,
            thinking=is_on,
            **{"reasoning.enabled": wish and wish.enabled},
        ),
        only_one(
            reasoning_effort=body.reasoning_effort, **{"reasoning.effort": wish and wish.effort}
        ),
        only_one(
            thinking_budget=body.thinking_budget,
            thinking_token_budget=body.thinking_token_budget,
            **{
                "thinking.budget_tokens": switch and switch.budget_tokens,
                "reasoning.max_tokens": wish and wish.max_tokens,
            },
        ),
    )


def _shows_reasoning(body: ChatRequest) -> bool:
    """Return true if the client wants what the model thinks."""
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)


def tools_of(given: Sequence[FunctionTool] | None) -> Toolbox:
    """Return the tools of a request as the model is told them."""
    tools = Toolbox()
    for tool in given or ():
        if tool.function is not None and tool.type == "function":
            one = tool.function
            tools.add(one.name, one.description, one.parameters, is_strict=bool(one.strict))
        else:
            tools.leave_out(tool.custom.name if tool.custom else None, tool.type)
    return tools


async def _scored(
    service: Service, path: str, question: Question, n: int
) -> list[dict[str, Any] | None]:
    """Score the prompt of a question, all of which is computed for it.

    Raises:
        ApiError: 400, it is an agent's.
    """
    if question.whose.name is not None:
        raise ApiError(
            400,
            "log probabilities of a prompt are of a prompt alone; leave the agent out",
            "unsupported_field",
            param="prompt_logprobs",
        )
    tokens = [int(i) for i in (await read_prompt(service, question))[:]]
    async with service.models.registry.use(path) as own:
        host = own.isolated(question.whose.salt)
        scores = await score_prompt(service, host, tokens, n)
        return prompt_logprobs(host, tokens, scores, n)


# As one object -----------------------------------------------------------------------------------


def _message(end: Ended, shows_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
    if end.reasoning and shows_reasoning:
        message |= _thought(end.reasoning)
    if end.calls:
        message["content"] = end.text or None
        message["tool_calls"] = calls_of(end.calls)
    return message


def _thought(text: str) -> dict[str, str]:
    """Return reasoning by both of the names that clients look for: DeepSeek's, and OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}


def _usage(ends: Sequence[Ended]) -> dict[str, Any]:
    """Count the tokens of all choices: the prompt once, what was sampled for each."""
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
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            "audio_tokens": 0,
            **predictions(end.usage for end in ends),
        },
    }


def _facts(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a usage that the log has."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


# As a stream -------------------------------------------------------------------------------------


class ChatFrames(AnswerFrames):
    """Chunks of chat completions; several choices may come by turns."""

    def __init__(self, request: Request, body: ChatRequest, head: Mapping[str, Any]) -> None:
        """Write chunks that begin with ``head``."""
        super().__init__(request)
        self._body = body
        self._head = {**head, "object": "chat.completion.chunk"}
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._more = {"usage": None} if self._has_usage else {}
        self._ends: dict[int, Ended] = {}
        self._notices: dict[int, str | None] = {}
        self._logprobs: dict[int, ChatLogprobs] = {}
        self._shows_reasoning = _shows_reasoning(body)

    async def of(self, number: int, item: ChatEvent) -> bytes:
        """Write the next event of a choice."""
        if isinstance(item, PartEvent):
            return self._part(number, item.part, item.token)
        if isinstance(item, Started):
            self._notices[number] = item.notice
            said = {} if item.notice is None else {"kvcellar": agent_facts(item)}
            return self._chunk(number, {"role": "assistant", "content": ""}, said)
        self._ends[number] = item
        is_new = item.notice not in (None, self._notices.get(number))
        said = {"kvcellar": agent_facts(item)} if is_new else {}
        return self._chunk(number, {}, said, finish_reason=item.reason)

    def end(self) -> bytes:
        """Write the usage of all choices, where it is wanted, and that nothing follows."""
        ends = [self._ends[i] for i in range(self._body.n or 1)]
        usage, first = _usage(ends), ends[0]
        note(self._request, agent=first.agent_id, **_facts(usage), **notes_of(first.usage))
        if not self._has_usage:
            return frame("[DONE]")
        extra = extra_of(first, self._body)
        value = {**self._head, "choices": [], "usage": usage, "kvcellar": extra}
        return frame(value) + frame("[DONE]")

    def _part(self, number: int, part: Part, token: GeneratedToken | None) -> bytes:
        if isinstance(part, CallPart):
            return self._chunk(number, {"tool_calls": [call_delta(part)]})
        if isinstance(part, ReasoningPart) and not self._shows_reasoning:
            return b""
        logprobs = None
        if token is not None and token.logprob is not None:
            if number not in self._logprobs:
                models = service_of(self._request).models
                host = models.registry.host(models.resolve(self._head["model"]))
                self._logprobs[number] = ChatLogprobs(host)
            logprobs = self._logprobs[number].of([token])
        if not part.text and logprobs is None:
            return b""
        is_said = isinstance(part, TextPart)
        delta = {"content": part.text} if is_said else _thought(part.text)
        return self._chunk(number, delta, logprobs=logprobs)

    def _chunk(
        self, number: int, delta: dict[str, Any], said: Mapping[str, Any] | None = None, **of: Any
    ) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": None, **of}
        return frame({**self._head, "choices": [choice], **self._more, **(said or {})})

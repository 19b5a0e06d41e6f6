"""From a request of Ollama's to a ``Question``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from kvcellar.engine import SamplingParams
from kvcellar.grammar.form import ResponseFormat
from kvcellar.pictures.placed_text import PicturedText, joined
from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.media import LeftOut
from kvcellar.server.answer.parsing import sampling_of, whose_of
from kvcellar.server.answer.pictures import SentPicture, take_pictures
from kvcellar.server.answer.thinking import Thinking
from kvcellar.server.answer.tools import Toolbox
from kvcellar.server.errors import ApiError
from kvcellar.server.routes.ollama.models import path_of
from kvcellar.server.schemas.ollama import (
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from kvcellar.server.schemas.openai import CompletionRequest, SamplingFields
from kvcellar.server.state.service import Service, service_of


async def chat_question(request: Request, body: OllamaChatRequest) -> Question:
    """Return what a chat asks.

    Raises:
        ApiError: what is asked for cannot be had.
    """
    tools = Toolbox()
    for tool in body.tools or ():
        if tool.type in (None, "function"):
            given = tool.function
            tools.add(given.name, given.description, given.parameters)
        else:
            tools.leave_out(tool.function.name, tool.type or "")
    left_out = await _pictures(request, body, body.messages)
    return _question(request, body, _plain(body.messages, left_out), tools, left_out)


async def prompt_question(request: Request, body: OllamaGenerateRequest) -> Question:
    """Return what a prompt asks that goes through the model's chat template.

    Raises:
        ApiError: what is asked for cannot be had.
    """
    left_out = await _pictures(request, body, [body])
    prompt = _with_pictures(body.prompt or "", body.images, left_out)
    said: list[dict[str, Any]] = [{"role": "user", **prompt.fields()}]
    if body.system:
        said.insert(0, {"role": "system", "content": body.system})
    return _question(request, body, said, Toolbox(), left_out)


async def raw_completion(
    service: Service, path: str, body: OllamaGenerateRequest
) -> CompletionRequest:
    """Return the completion of a prompt that goes through no template, or has something behind it.

    Raises:
        ApiError: 400, what is asked for cannot be had.
    """
    for name in ("system", "images", "logprobs"):
        if getattr(body, name):
            raise ApiError(
                400,
                f"{name} is not honoured in a prompt that goes through no chat template",
                "unsupported_field",
                param=name,
            )
    options, form = body.options or Options.model_validate({}), _form(body)
    async with service.models.registry.use(path) as host:
        most = most_tokens(service, options) or host.context
    return CompletionRequest.model_validate(
        {
            **fields_of(options).model_dump(exclude_none=True),
            "prompt": body.prompt,
            "suffix": body.suffix,
            "max_tokens": most,
            "json_schema": None if form is None else form.value,
        }
    )


def _question(
    request: Request,
    body: OllamaBody,
    messages: Sequence[dict[str, Any]],
    tools: Toolbox,
    left_out: LeftOut,
) -> Question:
    service = service_of(request)
    return Question(
        messages=messages,
        model=service.models.public(path_of(service, body.model)),
        params=params_of(service, body),
        tools=tools,
        form=_form(body),
        thinking=_thinking(body),
        whose=whose_of(request, body.agent_id),
        left_out=left_out,
    )


def _thinking(body: OllamaBody) -> Thinking:
    if isinstance(body.think, str):
        return Thinking(effort=body.think)
    return Thinking(is_wanted=body.think)


def fields_of(options: Options) -> SamplingFields:
    """Return settings of sampling by their names here."""
    said = options.model_dump(exclude={"num_predict"}, exclude_none=True)
    if options.seed == -1:
        del said["seed"]
    if said.get("top_p") == 0:
        del said["top_p"]
    for name, setting in SAMPLER_SETTINGS.items():
        for other in setting.names:
            if value := said.pop(other, None):
                said[name] = value
    return SamplingFields.model_validate(said)


def most_tokens(service: Service, options: Options) -> int | None:
    """Return how many tokens an answer may have; None: as many as the context has room for."""
    wanted = options.num_predict
    if wanted is None:
        return service.config.max_tokens
    return wanted if wanted > 0 else None


def params_of(service: Service, body: OllamaBody) -> SamplingParams:
    """Return how to sample the answer to a request.

    Raises:
        ApiError: 400, likeliest tokens are asked for without log probabilities.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs come with logprobs: true, which is not there", param="top_logprobs"
        )
    options = body.options or Options.model_validate({})
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = most_tokens(service, options)
    return sampling_of(fields_of(options), max_tokens=most, logprobs=logprobs)


def _form(body: OllamaBody) -> ResponseFormat | None:
    if not body.format:
        return None
    schema = {"type": "object"} if body.format == "json" else body.format
    return ResponseFormat("schema", schema, "format")


def _plain(messages: Sequence[OllamaMessage], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return messages as chat templates take them."""
    return [_message(message, number, left_out) for number, message in enumerate(messages)]


async def _pictures(
    request: Request, body: OllamaBody, those: Sequence[OllamaMessage | OllamaGenerateRequest]
) -> LeftOut:
    """Read the pictures of messages, which have links in their places then.

    Raises:
        ApiError: 400, one cannot be read.
    """
    service = service_of(request)
    sent = [
        SentPicture(source, "images", partial(images.__setitem__, i))
        for images in (one.images or [] for one in those)
        for i, source in enumerate(images)
    ]
    model = service.models.public(path_of(service, body.model))
    return await take_pictures(request, model, sent, whose_of(request, body.agent_id).salt, body)


def _with_pictures(text: str, images: Sequence[str] | None, left_out: LeftOut) -> PicturedText:
    """Return a text behind its pictures; with a line behind it for each that is not read."""
    shown = [left_out.shown("image", image) for image in images or ()]
    read = [picture for picture, is_line in shown if not is_line]
    lines = [line for line, is_line in shown if is_line]
    return sum(read, PicturedText()) + joined([*([PicturedText(text)] if text else []), *lines])


def _message(message: OllamaMessage, number: int, left_out: LeftOut) -> dict[str, Any]:
    content = _with_pictures(message.content or "", message.images, left_out)
    plain: dict[str, Any] = {"role": message.role, **content.fields()}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or f"c{number:05}{i:03}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain

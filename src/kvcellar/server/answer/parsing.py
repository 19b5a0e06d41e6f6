"""Parses the fields that the protocols have in common: agent, sampling, messages, tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends, Header
from starlette.requests import Request

from kvcellar.agents import ModelHost
from kvcellar.dialects.messages import read_arguments
from kvcellar.engine import SamplingParams
from kvcellar.models.text.prompts import begun_of
from kvcellar.pictures.placed_text import PicturedText, joined
from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.answer.media import MEDIA, PICTURES, LeftOut, join_parts
from kvcellar.server.answer.pictures import SentPicture
from kvcellar.server.answer.tools import ToolChoice, told
from kvcellar.server.errors import ApiError
from kvcellar.server.schemas.openai import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    NamedTool,
    SamplingFields,
)
from kvcellar.server.schemas.sampler import unset_in, values_in
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.isolation import own_id, salt_for
from kvcellar.server.state.service import Service

_TOLD = ("max_tokens", *SAMPLER_SETTINGS, "seed")
_SEEDS = 1 << 63

_SESSION_HEADERS = (
    "x-session-affinity",
    "x-opencode-session",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
)
"""What OpenCode, Claude Code and Codex call their conversations in."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class PartLike(Protocol):
    """A piece of a message's content, in any protocol of OpenAI's."""

    type: str
    text: str | None
    refusal: str | None

    @property
    def filename(self) -> str | None:
        """The name of a file."""
        ...

    @property
    def picture(self) -> str | None:
        """Source of a picture."""
        ...


async def agent_headers(
    request: Request,
    x_agent_id: Annotated[
        str | None,
        Header(
            description="The agent whose turn it is. It has to be there, and its history is never "
            "replaced: what does not continue it is put behind it or answered by a branch, and "
            "the answer says so."
        ),
    ] = None,
    x_agent_create: Annotated[
        bool | None, Header(description="Make the agent of that name where there is none.")
    ] = None,
    x_session_id: Annotated[
        str | None,
        Header(description="What the client calls its conversation: a hint where to look."),
    ] = None,
    x_cache_salt: Annotated[
        str | None, Header(description="Nothing is shared with requests of another salt.")
    ] = None,
) -> None:
    """Read the headers that say whom a request is for; a dependency of the routes that do.

    It is how these headers come into ``/openapi.json``.
    """
    sessions = (x_session_id, *(request.headers.get(name) for name in _SESSION_HEADERS))
    session = next((one for one in sessions if one), None)
    request.scope["kvcellar.whose"] = Whose(x_agent_id or None, bool(x_agent_create), session)


READS_AGENT = Depends(agent_headers)
"""Of a route that asks ``whose_of``."""


def whose_of(
    request: Request, name: str | None, *sessions: str | None, salt: str | None = None
) -> Whose:
    """Find out whom a request is for, from its headers and its body.

    Args:
        request: its route depends on ``READS_AGENT``.
        name: of an agent, in the body.
        sessions: what the body calls the conversation, in the fields that a protocol has for it.
        salt: ``cache_salt`` in the body.

    Raises:
        ApiError: 400, header and body name two agents, or have two salts.
    """
    said: Whose = request.scope["kvcellar.whose"]
    if name and said.name and name != said.name:
        raise ApiError(
            400,
            f"the request names two agents: {said.name[:128]!r} as a header and {name!r} in its "
            f"body",
            "two_agents",
            param="agent_id",
        )
    session = next((one for one in (said.session, *sessions) if one), None)
    own = salt_for(request, salt)
    wanted = said.name or name
    known_as = own_id(wanted, own) if wanted else None
    return replace(said, name=known_as, session=session, salt=own)


def sampling_of(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    index: int = 0,
) -> SamplingParams:
    """Return how to sample the answer with number ``index``.

    What a client leaves out is the model's own default, and where it has none as with OpenAI.

    Raises:
        ConfigError: a value that cannot work.
    """
    bias = {int(key): value for key, value in (fields.logit_bias or {}).items()}
    stop = fields.stop or ()
    seed = None if fields.seed is None else (fields.seed + index) % _SEEDS
    return SamplingParams(
        **values_in(fields),
        logit_bias=bias,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        logprobs=logprobs,
        unset=unset_in(fields),
    )


def sampling_told(service: Service, host: ModelHost) -> dict[str, dict[str, Any]]:
    """Return per setting what goes where a client sets nothing, and whether the model wants it so.

    ``by`` is ``model`` or ``server``; a seed of None is another one for each answer.
    """
    asked = sampling_of(SamplingFields.model_validate({}), max_tokens=service.config.max_tokens)
    goes = asked.for_model(host.sampling)
    return {
        name: {"value": getattr(goes, name), "by": "model" if name in host.sampling else "server"}
        for name in _TOLD
    }


def most_of(service: Service, *wanted: int | None) -> int | None:
    """Return how many tokens an answer may have: the first limit that is given, or the server's.

    -1 is none but the end of the context, as with other local servers: None.
    """
    most = next((one for one in wanted if one is not None), service.config.max_tokens)
    return None if most < 0 else most


def refuse_streamed_scores(body: ChatRequest | CompletionRequest) -> None:
    """Refuse log probabilities of a prompt in a stream, which has no place for them.

    Raises:
        ApiError: 400, they are wanted.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(
            400,
            "prompt_logprobs come in an answer that is not streamed; leave stream out",
            "unsupported_field",
            param="prompt_logprobs",
        )


def plain_messages(messages: Sequence[ChatMessage], left_out: LeftOut) -> list[dict[str, Any]]:
    """Messages of OpenAI's as chat templates take them.

    Args:
        messages: as they were sent.
        left_out: counts what is no text.

    Raises:
        ApiError: 400, a message has a part of a type that nobody here knows.
    """
    of_text = {  # calls of tools that take text, which are no functions
        call.id: call.custom.name
        for message in messages
        for call in message.tool_calls or ()
        if call.custom is not None
    }
    return [_plain(message, of_text, left_out) for message in messages]


def _plain(
    message: ChatMessage, of_text: Mapping[str | None, str], left_out: LeftOut
) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    said = text_of(message.said, "messages", left_out)
    if role == "tool" and message.tool_call_id in of_text:
        output = {"name": of_text[message.tool_call_id], "output": said.text}
        text = PicturedText(told("custom_tool_call_output", output))
        return {"role": "user", **(text + said.pictures_alone()).fields()}
    calls = [_call(call.function, call.id) for call in message.tool_calls or () if call.function]
    if message.function_call is not None and not calls:
        calls = [_call(message.function_call, None)]
    others = [call.custom for call in message.tool_calls or () if call.custom is not None]
    said_too = [PicturedText(told("custom_tool_call", call.model_dump())) for call in others]
    said = joined([*([said] if said else []), *said_too])
    plain: dict[str, Any] = {"role": role, **said.fields()}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if calls:
        plain["tool_calls"] = calls
    if message.thought and role == "assistant":
        plain["reasoning_content"] = message.thought
    return plain


def _call(call: FunctionCall, call_id: str | None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call_id or "", "type": "function", "function": function}


def chat_pictures(
    messages: Sequence[ChatMessage], param: str = "messages"
) -> Iterator[SentPicture]:
    """Yield the pictures of messages of OpenAI's."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type in PICTURES:
                wish = "image_url.detail" if part.detail not in (None, "auto") else None
                yield SentPicture(part.picture, param, partial(setattr, part, "image_url"), wish)


def text_of(
    content: str | Sequence[PartLike] | None, param: str, left_out: LeftOut | None = None
) -> PicturedText:
    """Join the text of a message, or of the parts it comes in, with the pictures that are read.

    Args:
        content: of the message.
        param: the field of the request that has it.
        left_out: has the pictures, and counts others, sounds and files, which become a line each.

    Raises:
        ApiError: 400, a part is of a type that nobody here knows, whatever text it has beside.
    """
    if content is None or isinstance(content, str):
        return PicturedText(content or "")
    left_out = LeftOut() if left_out is None else left_out
    return join_parts([_text_of(part, param, left_out) for part in content])


def _text_of(part: PartLike, param: str, left_out: LeftOut) -> tuple[PicturedText, bool]:
    if part.type in MEDIA:
        said, is_line = left_out.shown(part.type, part.picture, part.filename)
        text = PicturedText(f"\n{part.text}" if is_line and part.text else part.text or "")
        return said + text, is_line
    spelt = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS or spelt is None:
        raise ApiError(
            400,
            f"a message has a part of type {part.type[:40]!r}"
            + (" without text" if part.type in _TEXT_PARTS else "")
            + "; this server takes parts of type "
            + ", ".join(_TEXT_PARTS),
            "unsupported_content",
            param=param,
        )
    return PicturedText(spelt), False


def _arguments(value: str | Mapping[str, Any] | None) -> Any:
    return read_arguments(value) if isinstance(value, str) else dict(value or {})


def check_continued(
    messages: Sequence[Mapping[str, Any]], is_continued: bool | None, is_opened: bool | None
) -> None:
    """Make sure that what a request says of its last message is so.

    Args:
        messages: the conversation; an answer that it ends with is gone on with.
        is_continued: ``continue_final_message``.
        is_opened: ``add_generation_prompt``.

    Raises:
        ApiError: 400, it asks for an answer behind an answer, or to go on with what is none.
    """
    has_begun = begun_of(messages) is not None
    if is_continued and not has_begun:
        said = "continue_final_message is true, and the last message is no answer without calls"
    elif is_continued is False and has_begun:
        said = "continue_final_message is false, and the last message is an answer"
    elif is_opened is False and not has_begun:
        said = "add_generation_prompt is false, and the last message is no answer without calls"
    elif is_opened and is_continued:
        said = "continue_final_message and add_generation_prompt are both true"
    else:
        return
    raise ApiError(
        400,
        f"{said}; an answer at the end of the messages is gone on with, and behind anything else "
        f"a new one is given: leave both fields out",
        "unsupported_field",
        param=said.partition(" ")[0],
    )


def tool_choice_of(choice: str | NamedTool | None) -> ToolChoice:
    """Return which tools may be called, as OpenAI's requests say it."""
    if choice is None or isinstance(choice, str):
        return ToolChoice(choice or "auto")
    if choice.type != "allowed_tools":
        return ToolChoice("required", (choice.called,))
    inside = choice.allowed_tools
    tools = inside.tools if inside else choice.tools or []
    mode = inside.mode if inside else choice.mode or "auto"
    return ToolChoice(mode, tuple(tool.called for tool in tools))

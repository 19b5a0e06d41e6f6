"""From a request of OpenAI's responses, and what it goes on from, to a ``Question``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from kvcellar.agents import n_system_of, salted_id
from kvcellar.dialects.messages import read_arguments
from kvcellar.grammar.form import ResponseFormat
from kvcellar.pictures.placed_text import PicturedText, joined, of_message
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.media import THOUGHT, LeftOut
from kvcellar.server.answer.parsing import most_of, sampling_of, text_of, tool_choice_of, whose_of
from kvcellar.server.answer.pictures import SentPicture, take_pictures
from kvcellar.server.answer.thinking import Thinking
from kvcellar.server.answer.tools import Toolbox, told
from kvcellar.server.errors import ApiError
from kvcellar.server.routes.responses.conversations import stored_conversation
from kvcellar.server.routes.responses.pictures import SCREENS, pictures_of_items, pictures_of_other
from kvcellar.server.routes.responses.references import sent_items
from kvcellar.server.routes.responses.value import PREFIX, ResponseValue
from kvcellar.server.schemas.responses import Item, OtherItem, ResponseRequest, read_items
from kvcellar.server.state.conversations import Whose
from kvcellar.server.state.service import Service, service_of
from kvcellar.server.state.signing import Signer
from kvcellar.server.state.stored import StoredResponse

_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Items that stand for others, by what they seal."""

_INSTRUCTIONS = "instructions"
"""Marks the system message that belongs to one response alone."""


async def question_of(request: Request, value: ResponseValue) -> Question:
    """Return what a response is to answer; ``value`` takes the conversation before it.

    Raises:
        ApiError: the response before it is not stored, or what is asked cannot be had.
    """
    service, body = service_of(request), value.body
    whose = whose_of(
        request, body.agent_id, body.session_id, body.prompt_cache_key, salt=body.cache_salt
    )
    value.salt = whose.salt
    if not isinstance(body.input, str):
        body.input = await sent_items(service, body.input, whose.salt)
    if whose.name is not None and body.previous_response_id is not None:
        raise ApiError(
            400, "give previous_response_id or an agent, not both", param="previous_response_id"
        )
    before: list[dict[str, Any]] = []
    if body.conversation_id is not None:
        whose = await _in_conversation(service, value, whose)
        left_out = await _add_known(request, value, before)
        return _question(service, body, before, whose, left_out)
    previous = None
    if body.previous_response_id is not None:
        previous = await stored_response(service, body.previous_response_id, whose.salt)
        value.before = [*previous.items, *previous.response["output"]]
        value.added = previous.added
    left_out = await _add_known(request, value, before)
    if previous is not None:
        n_system = n_system_of(before)
        before[n_system:n_system] = previous.added
    if body.store is not False and whose.name is None:
        after = None
        if previous is not None:
            after = salted_id(previous.agent_id, whose.salt), previous.n_tokens
        whose = replace(whose, own_id=salted_id(value.response_id, whose.salt), after=after)
    return _question(service, body, before, whose, left_out)


async def _add_known(
    request: Request, value: ResponseValue, messages: list[dict[str, Any]]
) -> LeftOut:
    """Add the items before those of the request, once the pictures of all of them are read.

    Raises:
        ApiError: 400, one of the pictures cannot be.
    """
    body, known = value.body, read_items(value.before)
    sent = [] if isinstance(body.input, str) else body.input
    if any(pictures_of_items(known)):  # which are links from now on, but not in what is stored
        value.before = copy.deepcopy(value.before)
        known = read_items(value.before)
    pictures = [*pictures_of_items(known, value.before), *pictures_of_items(sent)]
    left_out = await take_pictures(request, body.model, pictures, value.salt, body)
    _add_items(messages, known, service_of(request).signer, left_out)
    return left_out


async def _in_conversation(service: Service, value: ResponseValue, whose: Whose) -> Whose:
    """Return whose turn a response in a conversation is; ``value`` takes the items before it.

    Raises:
        ApiError: there is no such conversation, or something else is named to go on from.
    """
    body, conversation_id = value.body, value.body.conversation_id or ""
    if body.previous_response_id is not None or whose.name is not None:
        raise ApiError(
            400,
            "give one of conversation, previous_response_id and an agent",
            param="conversation",
        )
    stored = await stored_conversation(service, conversation_id, whose.salt)
    value.before = stored.items
    return replace(whose, name=salted_id(conversation_id, whose.salt), may_create=True)


async def stored_response(service: Service, response_id: str, salt: str) -> StoredResponse:
    """Return a stored response.

    Raises:
        ApiError: 404, none of that id is, for those who share a salt.
    """
    found = None
    if response_id.startswith(PREFIX):
        found = await service.responses.get(response_id)
    if found is None or found.salt != salt:
        raise unknown_response(response_id)
    return found


def unknown_response(response_id: str) -> ApiError:
    """Return a refusal: no response of that id is stored here."""
    return ApiError(
        404,
        f"response {response_id[:80]!r} is not stored here; it was made with store false, deleted, "
        f"or by another server",
        "response_not_found",
        param="previous_response_id",
    )


def _question(
    service: Service,
    body: ResponseRequest,
    before: list[dict[str, Any]],
    whose: Whose,
    left_out: LeftOut,
) -> Question:
    if any("logprobs" in name for name in body.include or ()):
        raise ApiError(
            400,
            "include asks for log probabilities, which come on /v1/chat/completions alone",
            "unsupported_field",
            param="include",
        )
    messages, wish = list(before), body.reasoning
    if body.instructions is not None:
        said = {"role": "system", "content": body.instructions, "name": _INSTRUCTIONS}
        messages.insert(0, said)
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        _add_items(messages, body.input, service.signer, left_out)
    most = most_of(service, body.max_output_tokens)
    return Question(
        messages=messages,
        model=body.model,
        params=sampling_of(body, max_tokens=most),
        tools=_tools(body),
        choice=tool_choice_of(body.tool_choice),
        is_parallel=body.parallel_tool_calls is not False,
        form=_form(body),
        thinking=Thinking(body.chat_template_kwargs or {}, effort=wish.effort if wish else None),
        whose=whose,
        left_out=left_out,
    )


def _form(body: ResponseRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return None
    if wanted.type == "json_object":
        return ResponseFormat("schema", wanted.json_schema or {"type": "object"}, "text.format")
    if wanted.json_schema is None:
        raise ApiError(400, "text.format json_schema comes without a schema", param="text")
    return ResponseFormat("schema", wanted.json_schema, "text.format", wanted.strict is not False)


def _tools(body: ResponseRequest) -> Toolbox:
    tools = Toolbox()
    for tool in body.tools or ():
        if tool.type == "function" and tool.name is not None:
            tools.add(tool.name, tool.description, tool.parameters, is_strict=bool(tool.strict))
        else:
            tools.leave_out(tool.name, tool.type)
    return tools


def _add_items(
    messages: list[dict[str, Any]],
    items: list[Item | OtherItem],
    signer: Signer,
    left_out: LeftOut,
) -> None:
    """Add items as chat templates take them: calls join the answer that they are part of."""
    for item in items:
        if isinstance(item, OtherItem) and item.type in _COMPACTIONS:
            _add_message(messages, "user", PicturedText(_summary_of(item, signer)))
        elif isinstance(item, OtherItem) and item.type != "compaction_trigger":
            _add_told(messages, item, left_out)
        elif isinstance(item, OtherItem):
            raise ApiError(
                400,
                "compaction_trigger is not honoured: POST /v1/responses/compact sums up",
                "unsupported_content",
                param="input",
            )
        elif item.type == "function_call":
            _add_call(messages, item)
        elif item.type == "function_call_output":
            output, call_id = text_of(item.output, "input", left_out), item.call_id or ""
            messages.append({"role": "tool", **output.fields(), "tool_call_id": call_id})
        elif item.type in (None, "message") and item.role is not None:
            role = "system" if item.role == "developer" else item.role
            _add_message(messages, role, text_of(item.content, "input", left_out))
        elif item.type == "reasoning":
            reasoning = _reasoning_of(item, signer)
            left_out[THOUGHT] += reasoning is None
            if reasoning:
                _add_reasoning(messages, reasoning)
        else:
            raise ApiError(
                400,
                f"an input item of type {str(item.type)[:40]!r} came without what it needs; this "
                f"server takes messages, function_call and function_call_output",
                "unsupported_content",
                param="input",
            )


def _summary_of(item: OtherItem, signer: Signer) -> str:
    """Return what an item says that stands for a conversation's earlier items.

    Raises:
        ApiError: 400, it is sealed, and not by this server.
    """
    found = signer.opened(str((item.model_extra or {}).get("encrypted_content") or ""))
    if found is None:
        raise ApiError(
            400,
            f"an item of type {item.type} has a part of the conversation, and another server "
            f"sealed it; send the items that it stands for",
            "unsupported_content",
            param="input",
        )
    return found


def _reasoning_of(item: Item, signer: Signer) -> str | None:
    """Return what an item of reasoning says; None where it is encrypted, and not by this server."""
    if item.encrypted_content:
        found = signer.opened(item.encrypted_content)
        if found is not None or not item.content:
            return found
    if isinstance(item.content, str):
        return item.content
    return "".join(part.text or "" for part in item.content or ())


def _add_message(messages: list[dict[str, Any]], role: str, said: PicturedText) -> None:
    """Add a message: an answer joins the reasoning that came before it."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and not (last["content"] or last.get("tool_calls"))
    if role == "assistant" and is_open and last.get("reasoning_content"):
        messages[-1] = {**last, **said.fields()}
    else:
        messages.append({"role": role, **said.fields()})


def _add_reasoning(messages: list[dict[str, Any]], reasoning: str) -> None:
    """Add reasoning to the answer that it is part of, or begin one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    before = messages[-1].get("reasoning_content", "")
    messages[-1] = {**messages[-1], "reasoning_content": before + reasoning}


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    arguments = read_arguments(item.arguments or "{}")
    function = {"name": item.name or "", "arguments": arguments}
    call = {"id": item.call_id or "", "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = [*messages[-1].get("tool_calls", []), call]
    messages[-1] = {**messages[-1], "tool_calls": calls}


def _add_told(messages: list[dict[str, Any]], item: OtherItem, left_out: LeftOut) -> None:
    """Add what a tool that is not run here did, to the answer, or what came of it, behind it."""
    fields = item.model_extra or {}
    links = [_link_of(one) for one in pictures_of_other(fields.get("output"))]
    read = [left_out.shown("input_image", link)[0] for link in links if link in left_out.pictures]
    said = PicturedText(told(item.type, _without_screens(fields) if read else fields))
    if item.type.endswith(("_output", "_response", "_result")):
        messages.append({"role": "user", **sum(read, said).fields()})
    elif messages and messages[-1]["role"] == "assistant":
        before = messages[-1]
        both = joined([*([of_message(before)] if before["content"] else []), said])
        messages[-1] = {**before, **both.fields()}
    else:
        messages.append({"role": "assistant", **said.fields()})


def _link_of(sent: SentPicture) -> str:
    return sent.source or ""


def _without_screens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tool said without its pictures, which are shown beside it."""
    output = fields.get("output")
    if isinstance(output, list):
        kept = [
            one for one in output if not isinstance(one, dict) or one.get("type") not in SCREENS
        ]
        return {**fields, "output": kept or None}
    return {**fields, "output": None}

"""Answers and calls as messages, and conversations for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.errors import PromptError
from kvcellar.server.dialects.parser import CALL_BEGIN, CALL_END
from kvcellar.server.dialects.parts import Call
from kvcellar.valid import read_json, valid_json

_TOOLS_HEAD = "You can call these functions:"
_TOOLS_TAIL = (
    "To call one, write its name and arguments as JSON, and nothing behind it:\n"
    f'{CALL_BEGIN}\n{{"name": "...", "arguments": {{...}}}}{CALL_END}'
)


def as_message(text: str, calls: Sequence[Call], reasoning: str = "") -> dict[str, Any]:
    """Make an answer the message that a client sends back, with arguments as objects."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
            }
            for call in calls
        ]
    return message


def read_arguments(text: str) -> Any:
    """Arguments as templates want them: an object where the text is one."""
    try:
        return valid_json(read_json(text))
    except (ValueError, RecursionError, PromptError):
        return text


def say_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message for a template that knows no calls: they become text, always the same way."""
    if not message.get("tool_calls"):
        return {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
    parts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        inside = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        parts.append(f"{CALL_BEGIN}\n{json.dumps(inside, ensure_ascii=False)}{CALL_END}")
    kept = {k: message[k] for k in ("role", "reasoning_content") if k in message}
    return {**kept, "content": "\n".join(parts)}


def say_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Write a conversation for a template that knows no tools: a system message ends with them."""
    listed = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    said = "\n".join([_TOOLS_HEAD, *listed, _TOOLS_TAIL])
    first = dict(messages[0]) if messages else {}
    if first.get("role") == "system":
        before = _without_tools(str(first["content"]))  # said once is enough
        first["content"] = f"{before}\n\n{said}" if before else said
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": said}, *map(dict, messages)]


def without_tools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as it was before ``say_tools``: without what nobody said in it."""
    found = [dict(message) for message in messages]
    if found and found[0].get("role") == "system":
        content = str(found[0].get("content"))
        before = _without_tools(content)
        if before != content:
            found[0]["content"] = before
            if not before:
                del found[0]
    return found


def _without_tools(text: str) -> str:
    """Return a system message without the end that ``say_tools`` wrote, if it wrote one."""
    if not text.endswith(_TOOLS_TAIL):
        return text
    before, found, _ = text.rpartition(f"\n\n{_TOOLS_HEAD}\n")
    if found:
        return before
    return "" if text.startswith(_TOOLS_HEAD) else text

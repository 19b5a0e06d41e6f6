"""Answers and calls as messages, and conversations for templates that know no tools."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcellar.dialects.argument_rules import filled
from kvcellar.dialects.dialect import (
    BareArguments,
    CallForm,
    Dialect,
    JsonArguments,
    PythonArguments,
    ReasoningMarks,
    TaggedArguments,
)
from kvcellar.dialects.formats import ALL, HERMES
from kvcellar.dialects.parser import AnswerParser
from kvcellar.dialects.parts import Call
from kvcellar.errors import PromptError
from kvcellar.valid import read_json, valid_json

_TOOLS_HEAD = "You can call these functions:"


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


def write_calls(dialect: Dialect, calls: Sequence[tuple[str, Any]]) -> str:
    """Write calls as a model of the dialect does.

    Args:
        dialect: of them.
        calls: name of the tool, and arguments: an object, or a text that stands for itself.
    """
    form = dialect.calls or HERMES.calls
    assert form is not None
    written = [
        filled(form.heads[0], name, i) + _arguments(form, value) + filled(form.tail, name, i)
        for i, (name, value) in enumerate(calls)
    ]
    if form.between is not None:
        return form.begin + form.between.join(written) + form.end
    return form.apart.join(f"{form.begin}{one}{form.end}" for one in written)


def _arguments(form: CallForm, value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    how = form.arguments
    if isinstance(how, TaggedArguments):
        return "".join(
            how.opening.replace("$key", key).replace("$string", _json(isinstance(one, str)))
            + (one if isinstance(one, str) else _tagged(one, how))
            + how.closing
            for key, one in value.items()
        )
    if isinstance(how, PythonArguments):
        return ", ".join(f"{key}={_python(one)}" for key, one in value.items())
    if isinstance(how, BareArguments):
        return ",".join(f"{key}:{_bare(one, how.quote)}" for key, one in value.items())
    return _json(value)


def _tagged(value: Any, how: TaggedArguments) -> str:
    is_word = how.has_words and (value is None or isinstance(value, bool))
    return repr(value) if is_word else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_json(key)}: {_python(one)}' for key, one in value.items())}}}"
    return _json(value) if isinstance(value, str) else repr(value)


def _bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_bare(one, quote) for one in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_bare(one, quote)}' for key, one in value.items())}}}"
    return _json(value)


def say_calls(message: Mapping[str, Any], dialect: Dialect = HERMES) -> dict[str, Any]:
    """Write a message for a template that knows no calls: they become text, always the same way."""
    if not message.get("tool_calls"):
        return {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
    parts = [message["content"]] if message.get("content") else []
    calls = [call["function"] for call in message["tool_calls"]]
    parts.append(write_calls(dialect, [(one["name"], one["arguments"]) for one in calls]))
    kept = {k: message[k] for k in ("role", "reasoning_content") if k in message}
    return {**kept, "content": "\n".join(parts)}


def say_reasoning(message: Mapping[str, Any], marks: ReasoningMarks) -> dict[str, Any]:
    """Write a message for a template that reads no reasoning apart: its text begins with it."""
    said = dict(message)
    reasoning = said.pop("reasoning_content", None)
    if reasoning:
        said["content"] = f"{marks.begin}\n{reasoning}\n{marks.end}\n\n{said['content']}"
    return said


def say_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    dialect: Dialect = HERMES,
) -> list[dict[str, Any]]:
    """Write a conversation for a template that knows no tools: a system message ends with them."""
    listed = (_json(tool["function"]) for tool in tools)
    said = "\n".join([_TOOLS_HEAD, *listed, _tools_tail(dialect)])
    first = dict(messages[0]) if messages else {}
    if first.get("role") == "system":
        before = _without_tools(str(first["content"]))  # said once is enough
        first["content"] = f"{before}\n\n{said}" if before else said
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": said}, *map(dict, messages)]


def _tools_tail(dialect: Dialect) -> str:
    """Say how a call is written, with an example."""
    form = dialect.calls or HERMES.calls
    assert form is not None
    how, value = "as JSON", "{...}"
    if not isinstance(form.arguments, JsonArguments):
        how, value = "like this", "..."
        if isinstance(form.arguments, TaggedArguments):
            opening = form.arguments.opening.replace("$string", "true").replace("$key", "...")
            value = f"{opening}...{form.arguments.closing}"
    example = write_calls(dialect, [("...", value)])
    return f"To call one, write its name and arguments {how}, and nothing behind it:\n{example}"


def apart(
    messages: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return a conversation with thoughts and calls of its answers apart from their text.

    Arguments of calls are JSON in a text, as clients have them. What ``say_tools`` wrote is left
    out.

    Args:
        messages: as a history has them: an answer may be in one text, as the model said it.
        dialect: that the model speaks.
        tools: definitions of what may be called; those that a system message tells are known
            without. Where there are none, what looks like a call is text.
    """
    tools = tools or tools_said(messages)
    spelt = replace(dialect, tokens=())  # a history has marks as they are spelt
    found = []
    for number, message in enumerate(messages):
        said = dict(message)
        if said.get("role") == "assistant":
            said = {**said, **_apart(said, spelt, tools, number)}
        found.append(said)
    return without_tools(found)


def _apart(
    message: Mapping[str, Any], dialect: Dialect, tools: Sequence[Mapping[str, Any]], number: int
) -> dict[str, Any]:
    """Return fields of an answer that were in its text, and its calls with arguments as texts."""
    calls, text = message.get("tool_calls"), message.get("content")
    if calls:
        return {"tool_calls": [_with_text(call) for call in calls]}
    if not isinstance(text, str):
        return {}
    digest = hashlib.sha256(f"{number}:{text}".encode(errors="replace")).hexdigest()
    marks, has_thought = dialect.reasoning, bool(message.get("reasoning_content"))
    if has_thought:
        dialect = replace(dialect, reasoning=None)
    before = text.partition(marks.end)[0] if marks is not None and marks.end in text else None
    is_open = before is not None and marks is not None and marks.begin.strip() not in before
    parser = AnswerParser(
        dialect, f"c{digest[:7]}", is_open and not has_thought, bool(tools), tools=tools
    )
    parser.push(text)
    parser.flush()
    if parser.trouble or not (parser.calls or parser.reasoning):
        return {}
    said = as_message(parser.text, parser.calls, parser.reasoning)
    if parser.calls:
        said["tool_calls"] = [_with_text(call) for call in said["tool_calls"]]
    return said


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are a text."""
    function = dict(call.get("function") or {})
    if not isinstance(function.get("arguments", ""), str):
        function["arguments"] = _json(function["arguments"])
    return {**call, "function": function}


def tools_said(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the definitions of tools that ``say_tools`` told in a system message; else none."""
    first = messages[0] if messages else {}
    text = str(first.get("content")) if first.get("role") == "system" else ""
    tail = next((end for end in map(_tools_tail, ALL) if text.endswith(end)), None)
    if tail is None:
        return []
    listed = text.removesuffix(tail).rpartition(f"{_TOOLS_HEAD}\n")[2]
    found = (read_arguments(line) for line in listed.splitlines())
    return [{"type": "function", "function": one} for one in found if isinstance(one, dict)]


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
    if not any(text.endswith(_tools_tail(dialect)) for dialect in ALL):
        return text
    before, found, _ = text.rpartition(f"\n\n{_TOOLS_HEAD}\n")
    if found:
        return before
    return "" if text.startswith(_TOOLS_HEAD) else text

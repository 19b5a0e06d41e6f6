"""Calls of tools inside an answer's text: how they are written, and how they are read as they come.

The way is that of Hermes and Qwen: ``<tool_call>`` around one JSON object with name and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.errors import PromptError
from kvcellar.valid import read_json, valid_json

CALL_BEGIN = "<tool_call>"
CALL_END = "\n</tool_call>"

THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"

_END = CALL_END.strip()
_BRACE = re.compile(r"\A\s*\}?\s*")
"""What closes the object around the arguments."""
_TOOLS_HEAD = "You can call these functions:"
_TOOLS_TAIL = (
    "To call one, write its name and arguments as JSON, and nothing behind it:\n"
    f'{CALL_BEGIN}\n{{"name": "...", "arguments": {{...}}}}{CALL_END}'
)
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def call_head(name: str) -> str:
    """Write the beginning of a call, up to its arguments."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '


@dataclass(slots=True)
class Call:
    """One call.

    Attributes:
        call_id: what the result will refer to.
        name: of the tool.
        arguments: JSON, as the model wrote it.
    """

    call_id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text that is in no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call's arguments; the first piece of a call is empty."""

    index: int
    call: Call
    text: str


Part = TextPart | CallPart


@dataclass(slots=True)
class CallParser:
    """Reads an answer piece by piece: text, and calls. However it is cut, it means the same.

    What may be the beginning of a call is held back; what turns out to be none comes as text.
    Spaces and line ends with nothing but calls and the answer's ends around them are no text; nor
    is a line end right before a call, since templates write one there themselves. A call inside
    ``<think>`` and ``</think>`` is a thought, which is text.

    Attributes:
        call_ids: how the ids of the calls begin.
        is_in_thought: whether what comes next is inside ``<think>``; true at the beginning where
            the prompt ends with the mark.
        is_forced: whether there is nothing but calls: the beginning of one that was cut is no text.
        text: all text so far that is in no call.
        calls: all calls so far.
    """

    call_ids: str
    is_in_thought: bool = False
    is_forced: bool = False
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    _held: str = ""
    _spaces: str = ""
    """Spaces behind a call, or at the beginning, that are text where text follows."""
    _has_said: bool = False
    """Whether there was text since the last call."""
    _state: str = "text"
    _depth: int = 0
    _is_in_string: bool = False
    _is_escaped: bool = False

    def push(self, piece: str) -> list[Part]:
        """Take the next piece of the answer, and return what is certain with it."""
        self._held += piece
        parts: list[Part] = []
        while self._held and self._next(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """Return the rest, at the end of the answer."""
        parts: list[Part] = []
        if self.is_forced:
            self._drop_begun()
        if self._state == "text":
            self._say(self._held, parts)
        elif self._state == "head":
            self._take_whole(self._held, "", parts)
        elif self._state == "tail":
            rest = self._held[: len(self._held) - _overlap(self._held, _END)]
            self._say(_BRACE.sub("", rest, count=1), parts)
        self._held, self._state = "", "text"
        if self._spaces and not self.calls:
            self.text += self._spaces
            parts.append(TextPart(self._spaces))
        self._spaces = ""
        return parts

    def _drop_begun(self) -> None:
        """Leave out a call of which not even the name has come."""
        if self._state == "text":
            self._held = self._held[: len(self._held) - _overlap(self._held, CALL_BEGIN)]
        elif self._state == "head" and _whole(self._held) is None:
            self._held, self._state = "", "text"

    def _next(self, parts: list[Part]) -> bool:
        """Go on by one step; false where more text is needed."""
        return {"text": self._in_text, "head": self._in_head, "arguments": self._in_arguments}.get(
            self._state, self._in_tail
        )(parts)

    def _in_text(self, parts: list[Part]) -> bool:
        marks = (THOUGHT_END,) if self.is_in_thought else (CALL_BEGIN, THOUGHT_BEGIN)
        at, mark = _first(self._held, marks)
        if mark is None:
            held_back = marks if self.is_in_thought else (*marks, f"\n{CALL_BEGIN}")
            n = len(self._held) - max(_overlap(self._held, mark) for mark in held_back)
            sure, self._held = self._held[:n], self._held[n:]
            self._say(sure, parts)
            return False
        if mark == CALL_BEGIN:
            self._say(self._held[:at].removesuffix("\n"), parts)
            self._state = "head"
        else:
            self._say(self._held[: at + len(mark)], parts)
            self.is_in_thought = mark == THOUGHT_BEGIN
        self._held = self._held[at + len(mark) :]
        return True

    def _in_head(self, parts: list[Part]) -> bool:
        at = self._held.find(_END)
        found = _HEAD.match(self._held)
        if found and (at < 0 or found.end() <= at):
            name = _name(found[1])
            if name is not None:
                self._begin(name, parts)
                self._held = self._held[found.end() :]
                self._state, self._depth = "arguments", 0
                self._is_in_string = self._is_escaped = False
                return True
        if at < 0:
            return False
        inside, self._held = self._held[:at], self._held[at + len(_END) :]
        self._state = "text"
        self._take_whole(inside, _END, parts)
        return True

    def _in_arguments(self, parts: list[Part]) -> bool:
        for i, char in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._held[: i + 1], parts)
                    self._held, self._state = self._held[i + 1 :], "tail"
                    return True
        self._argue(self._held, parts)
        self._held = ""
        return False

    def _in_tail(self, parts: list[Part]) -> bool:
        """Behind the arguments: the object's end, and the call's, or the next call."""
        at, mark = _first(self._held, (_END, CALL_BEGIN))
        if mark is None:
            return False
        if mark == CALL_BEGIN:
            self._say(_BRACE.sub("", self._held[:at], count=1), parts)
        self._held = self._held[at + (len(mark) if mark == _END else 0) :]
        self._state = "text"
        return True

    def _take_whole(self, inside: str, end: str, parts: list[Part]) -> None:
        """Take what stands between the marks as a call, or as text where it is none."""
        call = _whole(inside)
        if call is None:
            self._say(CALL_BEGIN + inside + end, parts)
        else:
            self._begin(call[0], parts)
            self._argue(call[1], parts)

    def _begin(self, name: str, parts: list[Part]) -> None:
        self._spaces, self._has_said = "", False
        self.calls.append(Call(f"{self.call_ids}{len(self.calls)}", name))
        parts.append(CallPart(len(self.calls) - 1, self.calls[-1], ""))

    def _argue(self, text: str, parts: list[Part]) -> None:
        if text:
            self.calls[-1].arguments += text
            parts.append(CallPart(len(self.calls) - 1, self.calls[-1], text))

    def _say(self, text: str, parts: list[Part]) -> None:
        if not self._has_said:
            text = self._spaces + text
            if not text.strip():
                self._spaces = text
                return
            self._spaces, self._has_said = "", True
        if text:
            self.text += text
            parts.append(TextPart(text))


def is_whole(call: Call) -> bool:
    """Return whether a call's arguments are JSON to their end; else the answer ended inside it."""
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return True


def as_message(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Make an answer the message that a client sends back, with arguments as objects."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
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
    return {"role": message["role"], "content": "\n".join(parts)}


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


def _first(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    """Find the first of some marks in a text: its place and the mark; -1 and None for none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, None))


def _name(text: str) -> str | None:
    """Read the name of a tool as JSON writes it; None where it is none."""
    try:
        name = json.loads(text)
        name.encode()
    except ValueError:
        return None
    return str(name)


def _whole(inside: str) -> tuple[str, str] | None:
    """Name and arguments of a call in another order than ours; None where it is none."""
    try:
        value = json.loads(inside)
        name = _name(json.dumps(value["name"]))
        arguments = value.get("arguments", value.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if name is None or not isinstance(value["name"], str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments)


def _overlap(text: str, mark: str) -> int:
    """Return how much of a text's end may be the beginning of a mark."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:n]):
            return n
    return 0

"""Reads an answer as it comes: its reasoning, its text, and its calls of tools.

The way is that of Hermes and Qwen: ``<tool_call>`` around one JSON object with name and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcellar.server.dialects.dialect import Dialect
from kvcellar.server.dialects.parts import Call, CallPart, Part, ReasoningPart, TextPart

CALL_BEGIN = "<tool_call>"
CALL_END = "\n</tool_call>"

_END = CALL_END.strip()
_BRACE = re.compile(r"\A\s*\}?\s*")
"""What closes the object around the arguments."""
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def call_head(name: str) -> str:
    """Write the beginning of a call, up to its arguments."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '


@dataclass(slots=True)
class AnswerParser:
    """Reads an answer piece by piece: parts of it. However it is cut, it means the same.

    What may be the beginning of a call is held back; what turns out to be none comes as text.
    Spaces and line ends with nothing but calls and the answer's ends around them are no text; nor
    is a line end right before a call, since templates write one there themselves. Reasoning comes
    without the marks and spaces around it, and a call inside of it is none; line ends behind it are
    no text.

    Attributes:
        dialect: that the answer is in.
        call_ids: how the ids of the calls begin.
        is_in_reasoning: whether what comes next is reasoning; true at the beginning where the
            prompt ends with the mark.
        reads_calls: whether calls are looked for; else they are text.
        is_forced: whether there is nothing but calls: the beginning of one that was cut is no text.
        text: all text so far that is in no call and no reasoning.
        reasoning: all reasoning so far.
        calls: all calls so far.
    """

    dialect: Dialect
    call_ids: str
    is_in_reasoning: bool = False
    reads_calls: bool = True
    is_forced: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    _held: str = ""
    _spaces: str = ""
    """Spaces behind a call, or at the beginning, that are text where text follows."""
    _has_said: bool = False
    """Whether there was text since the last call or reasoning."""
    _is_behind_reasoning: bool = False
    """Whether nothing but spaces came since reasoning, whose line ends are no text."""
    _has_thought: bool = False
    """Whether there was more than spaces since reasoning began."""
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
        if self.is_in_reasoning:
            self._think(self._held, parts)
            self._spaces = ""
        elif self._state == "text":
            self._say(self._held, parts)
        elif self._state == "head":
            self._take_whole(self._held, "", parts)
        elif self._state == "tail":
            rest = self._held[: len(self._held) - _overlap(self._held, _END)]
            self._say(_BRACE.sub("", rest, count=1), parts)
        self._held, self._state = "", "text"
        if self._spaces and not (self.calls or self._is_behind_reasoning):
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
        if self.is_in_reasoning:
            return self._in_reasoning(parts)
        marks = [CALL_BEGIN] if self.reads_calls else []
        begin = self.dialect.reasoning.begin if self.dialect.reasoning else None
        if begin and not (self.text or self._has_said):
            marks.append(begin)
        at, mark = _first(self._held, marks)
        if mark is None or (mark == begin and self._held[:at].strip()):
            held_back = [*marks, f"\n{CALL_BEGIN}"] if self.reads_calls else marks
            n_held = max((_overlap(self._held, mark) for mark in held_back), default=0)
            n = len(self._held) - n_held if mark is None else at + len(mark)
            sure, self._held = self._held[:n], self._held[n:]
            self._say(sure, parts)
            return mark is not None
        if mark == CALL_BEGIN:
            self._say(self._held[:at].removesuffix("\n"), parts)
            self._state = "head"
        else:
            self.is_in_reasoning, self._spaces = True, ""
        self._held = self._held[at + len(mark) :]
        return True

    def _in_reasoning(self, parts: list[Part]) -> bool:
        assert self.dialect.reasoning is not None
        end = self.dialect.reasoning.end
        at = self._held.find(end)
        n = at if at >= 0 else len(self._held) - _overlap(self._held, end)
        self._think(self._held[:n], parts)
        self._held = self._held[n:]
        if at < 0:
            return False
        self._held = self._held[len(end) :]
        self.is_in_reasoning = self._has_thought = self._has_said = False
        self._spaces, self._is_behind_reasoning = "", True
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

    def _think(self, text: str, parts: list[Part]) -> None:
        """Take reasoning without the spaces around it."""
        text = self._spaces + text
        text = text if self._has_thought else text.lstrip()
        sure = text.rstrip()
        self._spaces = text[len(sure) :]
        if sure:
            self._has_thought = True
            self.reasoning += sure
            parts.append(ReasoningPart(sure))

    def _say(self, text: str, parts: list[Part]) -> None:
        if not self._has_said:
            text = self._spaces + text
            if not text.strip():
                self._spaces = text
                return
            text = text.lstrip("\n") if self._is_behind_reasoning else text
            self._spaces, self._has_said, self._is_behind_reasoning = "", True, False
        if text:
            self.text += text
            parts.append(TextPart(text))


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

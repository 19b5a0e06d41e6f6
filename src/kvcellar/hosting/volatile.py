"""Text that clients put in front and change from request to request, although nothing changed.

The model reads what a client sent, unless a rule says otherwise. Each rule has a name, by which it
is switched on, and reports what it changed. One alone is on by default: a header line of a client
that is known, which is known to carry no meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcellar.valid import read_json

RULES = {
    "billing-header": "the line `x-anthropic-billing-header: ...` with which Claude Code begins a "
    "system message is left out",
    "header": "lines such as `x-...-header: ...` with which a system message begins are left out",
    "date": "today's date or time in the system message stays what it was when the agent began",
    "reasoning": "an answer that comes back without what the model thought has that again",
    "tool-order": "tool definitions are sorted by name, and their keys too",
}
"""Name of each rule -> what it does."""

DEFAULT_RULES = ("billing-header",)
"""The rules that apply where nobody chose."""

_HEADERS = {
    "billing-header": re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)"),
    "header": re.compile(r"\A(?:\s*x-[\w-]*header\s*:[^\n]*(?:\n|\Z))+", re.IGNORECASE),
}
_DATE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?\b"
    r"|\b(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,? )?"
    r"(?:\d{1,2} )?(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December) (?:\d{1,2},? )?\d{4}\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2})?(?: ?[AP]M)?\b",
)
_ABOUT_NOW = re.compile(
    r"^.*\b(?:today|date|now|current|time|clock)\b.*$", re.IGNORECASE | re.MULTILINE
)
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

_REASONING = ("reasoning_content", "reasoning", "thinking")

_SHOWN = 200
"""Characters of a text that a report shows."""


@dataclass(frozen=True, slots=True)
class RuleChange:
    """Change that a rule made to the messages of a turn.

    Attributes:
        rule: one of ``RULES``.
        message: number of the message, from 0; None for the definitions of tools.
        before: the text that was sent, around what was changed; at most 200 characters.
        after: the same as the model reads it.
    """

    rule: str
    message: int | None
    before: str
    after: str

    def as_json(self) -> dict[str, Any]:
        """Return the change as JSON, for answers."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ruled:
    """A conversation behind the rules.

    Attributes:
        messages: as the model reads them.
        tools: definitions of tools, likewise; None where there are none.
        changes: what differs from what was sent.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    changes: tuple[RuleChange, ...]


def apply_rules(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    rules: Collection[str],
    known: Sequence[Mapping[str, Any]] = (),
) -> Ruled:
    """Make what the model reads of a conversation that was sent.

    Args:
        messages: the conversation.
        tools: definitions of its tools.
        rules: names of the rules that apply.
        known: messages of the history that it continues, whose date stays, and whose reasoning.
    """
    changes: list[RuleChange] = []
    read = [dict(message) for message in messages]
    for i, message in enumerate(read):
        if message.get("role") != "system" or not isinstance(message.get("content"), str):
            continue
        for rule, pattern in _HEADERS.items():
            content = message["content"]
            if rule in rules and pattern.match(content):
                message["content"] = pattern.sub("", content)
                changes.append(_change(rule, i, content, message["content"]))
    if "date" in rules and read and known and known[0].get("role") == "system":
        content, before = read[0].get("content"), known[0].get("content")
        is_same = match_key(read[0], rules) == match_key(known[0], rules)
        if is_same and isinstance(content, str) and isinstance(before, str) and content != before:
            read[0]["content"] = before
            changes.append(_change("date", 0, content, before))
    if "reasoning" in rules:
        changes += _give_back_reasoning(read, known, rules)
    listed, moved = in_order(tools or (), rules)
    return Ruled(read, listed or None, (*changes, *moved))


def in_order(
    tools: Sequence[Mapping[str, Any]], rules: Collection[str]
) -> tuple[list[dict[str, Any]], list[RuleChange]]:
    """Return definitions of tools in the order in which the model reads them, and what changed."""
    listed = [dict(tool) for tool in tools]
    if "tool-order" not in rules or not listed:
        return listed, []
    ordered = [json.loads(json.dumps(tool, sort_keys=True)) for tool in listed]
    ordered.sort(key=lambda tool: (_tool_name(tool), json.dumps(tool, sort_keys=True)))
    sent, now = (json.dumps(list(t), ensure_ascii=False) for t in (listed, ordered))
    return ordered, [_change("tool-order", None, sent, now)] if sent != now else []


def _give_back_reasoning(
    read: Sequence[dict[str, Any]], known: Sequence[Mapping[str, Any]], rules: Collection[str]
) -> Iterator[RuleChange]:
    """Put into answers what the model thought before them, as far as they continue a history."""
    for i, (message, before) in enumerate(zip(read, known, strict=False)):
        if match_key(message, rules) != match_key(before, rules):
            return
        thought = before.get("reasoning_content")
        if thought and not any(message.get(name) for name in _REASONING):
            message["reasoning_content"] = thought
            yield _change("reasoning", i, "", thought)


def match_key(message: Mapping[str, Any], rules: Collection[str]) -> str:
    """Return a text that is the same for two messages where one stands for the other.

    It finds a place in a history; what the model reads is what was sent. An answer is found also
    where it comes back trimmed, without its reasoning, with the keys of its tool calls in another
    order, or without their ids; with the rule ``date``, a system message also with another date.
    """
    role = message.get("role")
    content = _text_of(message.get("content"))
    if role == "assistant":
        content = _THOUGHTS.sub("", content).strip()
    if role == "system" and "date" in rules:
        content = _ABOUT_NOW.sub(lambda line: _DATE.sub("<date>", line[0]), content)
    rest = {
        key: _canonical(value) if role == "assistant" else value
        for key, value in message.items()
        if key not in ("role", "content", *_REASONING) and value
    }
    return json.dumps([role, content, rest], sort_keys=True, ensure_ascii=False)


def _change(rule: str, message: int | None, before: str, after: str) -> RuleChange:
    """Report the first place at which two texts differ."""
    n = min(len(before), len(after))
    at = next((i for i in range(n) if before[i] != after[i]), n)
    start = max(0, at - 40)
    shown = (text[start : start + _SHOWN] for text in (before, after))
    return RuleChange(rule, message, *shown)


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _text_of(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, Sequence):
        return "".join(
            str(part.get("text", json.dumps(part, sort_keys=True)))
            if isinstance(part, Mapping)
            else str(part)
            for part in content
        )
    return str(content)


def _canonical(value: Any) -> Any:
    """Read the texts in a value that are JSON themselves, such as arguments of calls."""
    if isinstance(value, str):
        try:
            return read_json(value)
        except ValueError:
            return value
    if isinstance(value, Mapping):
        is_call = "function" in value  # its id is the server's own: some clients do not keep it
        return {k: _canonical(v) for k, v in value.items() if not (is_call and k == "id")}
    if isinstance(value, Sequence):
        return [_canonical(part) for part in value]
    return value

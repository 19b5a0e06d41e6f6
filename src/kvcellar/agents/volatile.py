"""Text that clients put in front and change from request to request, although nothing changed.

Each rule has a name, by which it is reported and can be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvcellar.valid import read_json

__all__ = ["RULES", "canonical_tools", "clean_message", "match_key"]

RULES = {
    "header": "a line such as `x-...-header: ...` at the top of the system message is left out",
    "date": "today's date or time in the system message stays what it was when the agent began",
    "tool-order": "tool definitions are sorted by name, and their keys too",
}
"""Name of each rule -> what it does."""

_HEADER = re.compile(r"\A(?:\s*x-[\w-]*header\s*:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
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


def clean_message(message: Mapping[str, Any], rules: Collection[str]) -> dict[str, Any]:
    """A message without what the rules leave out."""
    cleaned = dict(message)
    content = cleaned.get("content")
    if "header" in rules and cleaned.get("role") == "system" and isinstance(content, str):
        cleaned["content"] = _HEADER.sub("", content)
    return cleaned


def match_key(message: Mapping[str, Any], rules: Collection[str]) -> str:
    """A text that two messages share exactly where they say the same.

    An answer may come back trimmed, without its reasoning, or with the keys of its tool calls in
    another order; a system message may come with another date.
    """
    role = message.get("role")
    content = _text_of(message.get("content"))
    if role == "assistant":
        content = _THOUGHTS.sub("", content)
    if role == "system" and "date" in rules:
        content = _ABOUT_NOW.sub(lambda line: _DATE.sub("<date>", line[0]), content)
    rest = {
        key: _canonical(value)
        for key, value in message.items()
        if key not in ("role", "content", "reasoning", "reasoning_content") and value
    }
    return json.dumps([role, content.strip(), rest], sort_keys=True, ensure_ascii=False)


def canonical_tools(
    tools: Sequence[Mapping[str, Any]] | None, rules: Collection[str]
) -> list[dict[str, Any]] | None:
    """Tool definitions in the order that does not depend on the client's."""
    if not tools:
        return None
    if "tool-order" not in rules:
        return [dict(tool) for tool in tools]
    ordered = [json.loads(json.dumps(tool, sort_keys=True)) for tool in tools]
    return sorted(ordered, key=lambda tool: (_tool_name(tool), json.dumps(tool, sort_keys=True)))


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
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
    """JSON with texts that are JSON themselves (arguments of tool calls) read."""
    if isinstance(value, str):
        try:
            return read_json(value)
        except ValueError:
            return value
    if isinstance(value, Mapping):
        return {key: _canonical(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_canonical(part) for part in value]
    return value

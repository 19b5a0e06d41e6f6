"""Text that clients put in front and change from request to request, although nothing changed.

The model reads what a client sent, unless a rule says otherwise. Each rule has a name, by which it
is switched on, and reports what it changed. One alone is on by default: a header line of a client
that is known, which is known to carry no meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcellar.hosting.messages import REASONING_NAMES, Message, Messages
from kvcellar.pictures.placed_text import PICTURES

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

    messages: Messages
    tools: list[dict[str, Any]] | None
    changes: tuple[RuleChange, ...]


def apply_rules(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    rules: Collection[str],
) -> Ruled:
    """Make what the model reads of a conversation that was sent, whatever it continues.

    Args:
        messages: the conversation.
        tools: definitions of its tools.
        rules: names of the rules that apply.
    """
    changes: list[RuleChange] = []
    read = Messages(messages)
    ruled: dict[int, Message] = {}
    for i, message in enumerate(read):
        content = message.get("content")
        has_pictures = bool(message.get(PICTURES))  # which stand at places of the text
        if message.get("role") != "system" or not isinstance(content, str) or has_pictures:
            continue
        for rule, pattern in _HEADERS.items():
            if rule in rules and pattern.match(content):
                before, content = content, pattern.sub("", content)
                ruled[i] = {**message, "content": content}
                changes.append(_change(rule, i, before, content))
    listed, moved = in_order(tools or (), rules)
    return Ruled(read.but(ruled), listed or None, (*changes, *moved))


def keep_known(ruled: Ruled, known: Messages, n_matched: int, rules: Collection[str]) -> Ruled:
    """Give back to a conversation what rules keep of the history that it continues.

    That is the date in its system message, and the reasoning before its answers.

    Args:
        ruled: what was sent, behind the other rules.
        known: messages of the history.
        n_matched: messages with which both begin.
        rules: names of the rules that apply.
    """
    read, changes = ruled.messages, []
    kept: dict[int, Message] = {}
    if "date" in rules and n_matched and known[0].get("role") == "system":
        content, before = read[0].get("content"), known[0].get("content")
        are_texts = isinstance(content, str) and isinstance(before, str)
        if are_texts and content != before and not read[0].get(PICTURES):
            kept[0] = {**read[0], "content": before}
            changes.append(_change("date", 0, str(content), str(before)))
    if "reasoning" in rules:
        for i in range(n_matched):
            thought = known[i].get("reasoning_content")
            if thought and not any(read[i].get(name) for name in REASONING_NAMES):
                kept[i] = {**kept.get(i, read[i]), "reasoning_content": thought}
                changes.append(_change("reasoning", i, "", thought))
    n = sum(change.message is not None for change in ruled.changes)  # then come those of tools
    changed = (*ruled.changes[:n], *changes, *ruled.changes[n:])
    return Ruled(read.but(kept), ruled.tools, changed)


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

"""Conversations as files, for people and for other programs: Markdown and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.agents.records.views import AgentInfo
from kvcellar.dialects.messages import read_arguments
from kvcellar.pictures.placed_text import PICTURES, pieces

_NAMES = {"user": "You", "assistant": "Model", "system": "System prompt", "tool": "Result"}


def write_transcript(info: AgentInfo, messages: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return a conversation as the text of a file.

    Args:
        info: whose it is.
        messages: of it, with thoughts and calls apart from text.
        kind: ``markdown``, or ``json``: one object with the facts and the messages.
    """
    if kind == "markdown":
        return _markdown(info, messages)
    facts = {
        "id": info.agent_id,
        "title": info.title,
        "model": info.model,
        "created_s": info.created_s,
        "used_s": info.used_s,
        "parent": info.parent,
    }
    value = {**facts, "messages": [dict(message) for message in messages]}
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _markdown(info: AgentInfo, messages: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        f"# {info.title or info.agent_id}",
        f"`{info.agent_id}` with {info.model}: {info.n_turns} turn{'s' * (info.n_turns != 1)}, "
        f"{info.n_tokens} tokens",
    ]
    for message in messages:
        parts.append(f"## {_NAMES.get(str(message['role']), str(message['role']))}")
        thought = message.get("reasoning_content")
        if thought:
            summary = "<details>\n<summary>Thought</summary>"
            parts += [summary, str(thought).strip(), "</details>"]
        text = _text_of(message.get("content")) if not message.get(PICTURES) else _pictured(message)
        if message["role"] == "tool":
            parts.append(_fenced(text))
        elif text:
            parts.append(text)
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            parts += [f"Calls `{name}`:", _fenced(arguments_of(call), "json")]
    return "\n\n".join(parts) + "\n"


def _pictured(message: Mapping[str, Any]) -> str:
    """Return a text with a reference to each picture where it stands."""
    parts = [
        part if isinstance(part, str) else f"![picture {part['name']}]({part.get('url', '')})"
        for part in pieces(message)
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text", f"[{part.get('type')}]") if isinstance(part, dict) else part
        for part in parts
    ]
    return "\n\n".join(text for text in texts if isinstance(text, str)).strip()


def arguments_of(call: Mapping[str, Any]) -> str:
    """Return what a call gives to its tool, to be read: JSON on several lines, or text."""
    given = call["function"].get("arguments", "")
    value = read_arguments(given) if isinstance(given, str) else given
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def _fenced(text: str, language: str = "") -> str:
    """Return a text between fences of more marks than it has in a row itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"

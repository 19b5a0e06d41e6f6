"""Titles of agents for people: the first words of what was said. An agent's id is its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.errors import AgentNameError
from kvcellar.pictures.placed_text import pictures_of

MOST_CHARS = 200
"""Characters of a title that a person gives."""

_SHORT = 48
"""Characters of a title that is made of what was said."""

_READ = 4000
"""Characters of a message that are looked at: a title is made whenever agents are listed."""

_WRAPPED = re.compile(r"\s*<([a-z][\w.-]*)\b[^<>]*>.*?(?:</\1>|\Z)\s*", re.DOTALL)
"""Texts in tags that clients put before a person's words, such as ``<environment_context>``."""


def checked_title(title: str) -> str:
    """Return a title that a person gives, on one line; empty: the agent is to have none of its own.

    Raises:
        AgentNameError: it is longer than ``MOST_CHARS``.
    """
    line = " ".join(title.split())
    if len(line) > MOST_CHARS:
        raise AgentNameError(
            f"a title has at most {MOST_CHARS} characters, this one has {len(line)}; nothing was "
            f"changed"
        )
    return line


def said_title(messages: Sequence[Mapping[str, Any]], n_shared: int = 0) -> str:
    """Return the first words of a conversation, cut at the end of a word; empty: none were said.

    Where there are pictures and no words, they are counted.

    Args:
        messages: of the conversation.
        n_shared: messages that were there when it was forked: its own words go first.
    """
    for some in (messages[n_shared:], messages[:n_shared]):
        for read in (_without_wrapped, str):
            for message in some:
                text = read(_text_of(message)) if message.get("role") == "user" else ""
                words = text[: 4 * _SHORT].split()
                if words:
                    return _shortened(" ".join(words))
    n = sum(len(pictures_of(one)) for one in messages if one.get("role") == "user")
    return "" if not n else "a picture" if n == 1 else f"{n} pictures"


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text[:_READ] for text in texts if isinstance(text, str))[:_READ]


def _without_wrapped(text: str) -> str:
    while (found := _WRAPPED.match(text)) is not None:
        text = text[found.end() :]
    return text


def _shortened(line: str) -> str:
    if len(line) <= _SHORT:
        return line
    cut = line[:_SHORT]
    at = cut.rfind(" ") if not line[_SHORT].isspace() else _SHORT
    return (cut[:at] if at > _SHORT // 2 else cut).rstrip(" ,;:.-") + "…"

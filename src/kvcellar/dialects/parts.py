"""Parts of an answer: text, reasoning, and calls of tools."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(slots=True)
class Call:
    """One call.

    Attributes:
        call_id: what the result will refer to.
        name: of the tool.
        arguments: JSON, as far as it came.
    """

    call_id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text that is in no call and no reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers, without the marks around it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call's arguments; the first piece of a call is empty."""

    index: int
    call: Call
    text: str


Part = TextPart | ReasoningPart | CallPart


def is_whole(call: Call) -> bool:
    """Return whether a call's arguments are JSON to their end; else the answer ended inside it."""
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return True

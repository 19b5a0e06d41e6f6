"""Marks of the last durable state of an agent, where its next entry in the journal begins."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvcellar.agents.records.views import TurnRecord
from kvcellar.history import History
from kvcellar.hosting.messages import Messages


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The state of an agent that is durable.

    Attributes:
        name: of the agent's history.
        serial: of the state.
        n_changes: of the agent, when that was its state.
        tokens: its history.
        messages: its conversation.
        stops: per message the tokens up to its end, for answers that were sampled.
        turns: its turns.
        tools: definitions of its tools.
        token_hash: over all of ``tokens``; None until somebody needs it.
        message_hash: over all of ``messages``; the same.
    """

    name: str
    serial: int
    n_changes: int
    tokens: History
    messages: Messages
    stops: tuple[int | None, ...]
    turns: tuple[TurnRecord, ...]
    tools: list[dict[str, Any]] | None
    token_hash: Any = None
    message_hash: Any = None


def next_serial(serial: int = 0) -> int:
    """Return a number for the state behind one: greater, also than that of a namesake before it."""
    return max(serial + 1, time.time_ns() // 1000)

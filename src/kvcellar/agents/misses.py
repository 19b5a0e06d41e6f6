"""Why a history had to be computed again: where it differs, both texts, the cause, the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcellar.agents.history import AgentTokenizer

__all__ = ["CAUSES", "Miss", "explain"]

CAUSES = {
    "system": "the system message changed; keep it constant, and put what changes behind it",
    "tools": "the tool definitions changed; keep them, and their order, for the whole conversation",
    "template": "the same messages became other tokens; the chat template rewrites old turns",
    "echoed": "an answer came back otherwise than it was given (trimmed, or without its thoughts); "
    "send answers back as they came",
    "retokenised": "the model had written its answer in other tokens than those in which the same "
    "text is read; it is computed again from there, once",
    "truncated": "messages were dropped from the conversation; drop them from its end alone, or "
    "rewind the agent",
    "edited": "an earlier message changed; fork or rewind the agent in place of editing",
    "evicted": "the KV was neither in the cache nor in the store; give either more room, or pin it",
    "window": "a sliding window had moved on; it goes on from the nearest turn's end",
    "recomputed": "computing it again was expected to be faster than loading it",
    "other model": "the history belongs to another model, whose KV means nothing to this one",
}
"""Cause -> what it means and what helps."""

_AROUND = 12


@dataclass(frozen=True, slots=True)
class Miss:
    """Reuse that was lost in a turn.

    Attributes:
        cause: one of ``CAUSES``.
        tokens_lost: tokens that were computed again, or given up.
        position: of the first token that differs; for what was merely gone, the first that was
            computed again.
        was: text around it as the history had it.
        became: text around it as the turn brought it; the same where nothing differs.
    """

    cause: str
    tokens_lost: int
    position: int
    was: str = ""
    became: str = ""

    @property
    def advice(self) -> str:
        """What the cause means and what helps."""
        return CAUSES[self.cause]

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and for the store."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Miss | None:
        """What ``as_json`` gave."""
        return None if value is None else cls(**value)


def explain(
    cause: str,
    tokens_lost: int,
    position: int,
    history: Sequence[int],
    tokens: Sequence[int],
    tokenizer: AgentTokenizer | None,
) -> Miss:
    """A miss with the texts around it."""
    return Miss(
        cause,
        tokens_lost,
        position,
        _text(tokenizer, history, position),
        _text(tokenizer, tokens, position),
    )


def _text(tokenizer: AgentTokenizer | None, tokens: Sequence[int], at: int) -> str:
    part = [int(token) for token in tokens[max(0, at - _AROUND) : at + _AROUND]]
    if tokenizer is None or not part:
        return ""
    return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""Why a history had to be computed again: where it differs, both texts, the cause, the cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcellar.history import History, common_prefix
from kvcellar.hosting.conversation import AgentTokenizer
from kvcellar.pictures.tokens import is_placeholder, pictures_in
from kvcellar.types import IntArray

CAUSES = {
    "system": "the system message changed; keep it constant, and put what changes behind it",
    "tools": "the tool definitions changed; keep them, and their order, for the whole conversation",
    "arguments": "what the chat template is given beside the messages changed (enable_thinking, "
    "reasoning_effort and the like); keep it for the whole conversation",
    "template": "the same messages became other tokens; the chat template rewrites old turns",
    "echoed": "an answer came back otherwise than it was given (trimmed, or without its thoughts); "
    "send answers back as they came",
    "retokenised": "the model had written its answer in other tokens than those in which the same "
    "text is read; it is computed again from there, once",
    "truncated": "messages were dropped from the conversation; drop them from its end alone, or "
    "rewind the agent",
    "edited": "an earlier message changed; fork or rewind the agent in place of editing",
    "picture": "another picture stands in the place of the one before; what is behind it was "
    "computed again, too: put pictures that change behind those that stay",
    "evicted": "the KV had left the cache and was not in the store: given up where that is full "
    "(`kvcellar store stats`; give it more room), not written yet when the process was killed or "
    "the disk was behind (it is computed again once), or damaged (`kvcellar store verify`)",
    "window": "a window or chunk had moved on; it goes on from the nearest turn's end",
    "snapshot": "no snapshot of the recurrent layers' states was left at or after position "
    "{position}, and such states cannot be cut back; the ends of turns have one in memory for as "
    "long as --snapshots has room, and the latest on disk: give it more, or fork and rewind there; "
    "a paged cache goes on at whole blocks alone",
    "rope": "the text grew beyond the length that the model's RoPE was made for, or went back "
    "below it, so that all of its positions are turned by other factors; its K and V by these are "
    "computed once",
    "recomputed": "computing it again was expected to be faster than loading it",
    "other model": "the history was computed by another model, or with K and V in another type; "
    "its KV means nothing to this one, and is kept for when that comes back",
}
"""Cause -> what it means and what helps."""

_OF_WORDS = ("template", "edited", "truncated", "retokenised")
"""Causes that are guessed from messages, of which another picture is the better word."""

_AROUND = 12

_ALIKE = 8
"""Tokens that have to be the same for two texts to be the same again."""

_FAR = 512
"""Tokens behind a difference within which they have to be."""


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
        """The cause in a sentence, and the way out."""
        return CAUSES[self.cause].format(position=self.position)

    def as_json(self) -> dict[str, Any]:
        """Return a dict for ``--json`` and for the store."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Miss | None:
        """Return what ``as_json`` gave, as a miss."""
        return None if value is None else cls(**value)


def miss_beside(
    other: History,
    tokens: History,
    n_cached: int,
    cause: str,
    tokenizer: AgentTokenizer | None,
) -> Miss | None:
    """Find what a first turn computed although a history that it came close to has its text.

    Args:
        other: that history.
        tokens: the turn's prompt.
        n_cached: tokens of it that were not computed.
        cause: why it did not continue the history.
        tokenizer: of the model.

    Returns:
        None where nothing behind the difference is the same, or it was cached all the same.
    """
    at = other.common_prefix(tokens)
    n_lost = min(_same_behind(other, tokens, at), len(tokens) - n_cached)
    if n_lost < _ALIKE or at >= min(len(other), len(tokens)):
        return None
    return explain(cause, n_lost, at, other, tokens, tokenizer)


def _same_behind(a: History, b: History, at: int) -> int:
    """Count the tokens behind a difference from where the two texts are the same again."""
    pieces = {b[j : j + _ALIKE].tobytes(): j for j in range(at + _FAR, at - 1, -1)}
    for i in range(at, min(at + _FAR, len(a) - _ALIKE + 1)):
        j = pieces.get(a[i : i + _ALIKE].tobytes())
        if j is not None:
            return common_prefix(a[i:], b[j:])
    return 0


def explain(
    cause: str,
    tokens_lost: int,
    position: int,
    history: History,
    tokens: History,
    tokenizer: AgentTokenizer | None,
) -> Miss:
    """Make a miss with the texts around its place, which may be another picture's."""
    at = slice(position, position + 1)
    if is_placeholder(history[at]).any() and is_placeholder(tokens[at]).any():
        cause = "picture" if cause in _OF_WORDS else cause
    return Miss(
        cause,
        tokens_lost,
        position,
        _text(tokenizer, history, position),
        _text(tokenizer, tokens, position),
    )


def _text(tokenizer: AgentTokenizer | None, tokens: History, at: int) -> str:
    if tokenizer is None or not len(tokens):
        return ""
    start, stop, said = max(0, at - _AROUND), at + _AROUND, ""
    for placed in pictures_in(tokens.tokens):
        if placed.stop <= start or placed.start >= stop:
            continue
        said += _decoded(tokenizer, tokens[start : placed.start]) + f"[picture {placed.name}]"
        start = placed.stop
    return said + _decoded(tokenizer, tokens[start : max(start, stop)])


def _decoded(tokenizer: AgentTokenizer, tokens: IntArray) -> str:
    if not len(tokens):
        return ""
    return tokenizer.decode(
        tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )

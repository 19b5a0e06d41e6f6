"""From tokens to text while they come: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from kvcellar.errors import ConfigError
from kvcellar.history import History

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

MAX_HELD = 8
"""Most trailing replacement characters that can still become one character.

A byte-fallback decoder writes one for each byte of a run with an unfinished end: up to four of
the character before, and three of the next.
"""

LONGEST_HELD = 64
"""Tokens enough for ``MAX_HELD`` replacement characters, and for what is before them."""


class Tokenizer(Protocol):
    """Protocol of a tokenizer for the engine; those of transformers have it."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str:
        """Return the text of some tokens."""
        ...


class Detokenizer:
    """The text of one growing sequence of tokens, in pieces that end between characters.

    The pieces together are the text of all tokens. A token in the middle of a character adds
    nothing until the character is whole; bytes that never become one come out as replacement
    characters, as they do when everything is decoded at once.

    Only the tokens since the last whole character, and those of the piece before, are decoded:
    some decoders drop the space of a first token, so none is ever decoded as the first.
    """

    def __init__(self, tokenizer: Tokenizer, context: History | None = None) -> None:
        """Begin behind the tokens of ``context``, whose text is not repeated."""
        self._tokenizer = tokenizer
        end = [] if context is None else context[-LONGEST_HELD:].tolist()
        self._window = self._clean_tail(end)
        self._whole = len(self._window)  # tokens of the window that end between characters
        self._shown = len(self._decode(self._window).rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, often that of the token alone."""
        self._window.append(token_id)
        text = self._decode(self._window)
        n_held = len(text) - len(text.rstrip(REPLACEMENT))
        sure = max(self._shown, len(text) - min(n_held, MAX_HELD))
        piece, self._shown = text[self._shown : sure], sure
        if not n_held:
            self._cut_at_piece(piece)
        elif piece and len(self._window) > 2 * LONGEST_HELD:
            self._cut_inside(len(text) - sure)
        return piece

    def flush(self) -> str:
        """Return the rest, where the tokens end inside a character; what follows begins anew."""
        text = self._decode(self._window)
        piece = text[self._shown :]
        self._shown = len(text)
        return piece

    def _cut_at_piece(self, piece: str) -> None:
        """Keep the tokens of the last piece alone, if they have text of their own; all is shown.

        A space has none where a first token's space is dropped; it stays behind what was before.
        """
        alone = self._decode(self._window[self._whole :])
        if alone:
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._shown = len(alone)
        elif not piece and self._shown:  # a special token
            del self._window[self._whole :]

    def _cut_inside(self, n_unshown: int) -> None:
        """Keep what the last few tokens need, where bytes that are no characters go on and on."""
        tail = self._window[-LONGEST_HELD:]
        shown = len(self._decode(tail)) - n_unshown
        if shown >= MAX_HELD:
            self._window, self._shown, self._whole = tail, shown, 0

    def _clean_tail(self, ids: list[int]) -> list[int]:
        """Return the fewest last tokens that have text and do not begin inside a character."""
        for n in range(1, len(ids) + 1):
            text = self._decode(ids[-n:])
            if text and not text.startswith(REPLACEMENT):
                return ids[-n:]
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopMatcher:
    """Finds the stop text that is complete first, and holds back what may become one.

    Of several that are complete at the same character, the longest counts: it begins first. Each
    character is looked at once, however many stop texts there are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Create a matcher that has seen nothing."""
        if not all(stops):
            raise ConfigError(f"a stop text has at least one character, got {list(stops)!r}")
        self._nodes = _automaton(tuple(stops)) if stops else ()
        self._at = 0  # the node whose text is the end of what was seen
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop text that was found; nothing is let through from then on."""
        return self._matched

    def push(self, text: str) -> str:
        """Add text; return what can no longer be a part of a stop text."""
        if not self._nodes:
            return text
        if self._matched is not None:
            return ""
        for i, char in enumerate(text):
            self._at = _follow(self._nodes, self._at, char)
            stop = self._nodes[self._at].stop
            if stop is not None:
                seen, self._held, self._matched = self._held + text[: i + 1], "", stop
                return seen[: len(seen) - len(stop)]
        text = self._held + text
        n_sure = len(text) - self._nodes[self._at].depth
        self._held = text[n_sure:]
        return text[:n_sure]

    def flush(self) -> str:
        """Return what was held back, now that nothing follows it."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class _Node:
    """A beginning of a stop text.

    Attributes:
        depth: its characters.
        nexts: by the next character, the node of the beginning that is one longer.
        shorter: the node of the longest other beginning that this one ends with.
        stop: the longest stop text that this one ends with.
    """

    depth: int
    nexts: dict[str, int] = field(default_factory=dict)
    shorter: int = 0
    stop: str | None = None


def _follow(nodes: Sequence[_Node], at: int, char: str) -> int:
    """Return the node of the longest beginning that a node's text and a character end with."""
    while at and char not in nodes[at].nexts:
        at = nodes[at].shorter
    return nodes[at].nexts.get(char, 0)


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> tuple[_Node, ...]:
    """Return all beginnings of the stop texts, the empty one first (Aho and Corasick)."""
    nodes = [_Node(0)]
    for stop in stops:
        at = 0
        for char in stop:
            if char not in nodes[at].nexts:
                nodes.append(_Node(nodes[at].depth + 1))
                nodes[at].nexts[char] = len(nodes) - 1
            at = nodes[at].nexts[char]
        nodes[at].stop = stop
    queue = deque(nodes[0].nexts.values())
    while queue:  # the shorter ones first
        node = nodes[queue.popleft()]
        for char, child in node.nexts.items():
            nodes[child].shorter = _follow(nodes, node.shorter, char)
            nodes[child].stop = nodes[child].stop or nodes[nodes[child].shorter].stop
            queue.append(child)
    return tuple(nodes)


class StopFinder(Protocol):
    """Protocol of what finds the first stop text, as :class:`StopMatcher` does."""

    @property
    def matched(self) -> str | None:
        """The stop text that was found; nothing is let through from then on."""
        ...

    def push(self, text: str) -> str:
        """Add text; return what can no longer be a part of a stop text."""
        ...

    def flush(self) -> str:
        """Return what was held back, now that nothing follows it."""
        ...


StopsFn = Callable[[Sequence[str]], StopFinder]
"""Makes what finds the first of some stop texts."""


class TextStream:
    """Tokens in, text for the reader out: a :class:`Detokenizer` and a :class:`StopMatcher`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        context: History | None = None,
        marks: Mapping[int, str] | None = None,
        finder: StopsFn = StopMatcher,
    ) -> None:
        """Begin behind the tokens of ``context``; end before the first of ``stops``.

        A token of ``marks`` comes as the text that stands for it. ``finder`` makes what finds stop
        texts where only some of the text counts.
        """
        self._marks = marks or {}
        self._detokenizer = Detokenizer(tokenizer, context)
        self._matcher = finder(stops) if stops else StopMatcher(())
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def matched_stop(self) -> str | None:
        """The stop text that was found."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now."""
        mark = self._marks.get(token_id)
        if mark is None:
            return self._keep(self._matcher.push(self._detokenizer.push(token_id)))
        return self._keep(self._matcher.push(self._detokenizer.flush() + mark))

    def flush(self) -> str:
        """Return the rest. Call it once, after the last token."""
        piece = self._matcher.push(self._detokenizer.flush())
        return self._keep(piece + self._matcher.flush())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

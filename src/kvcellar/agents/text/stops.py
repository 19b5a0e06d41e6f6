"""Stop texts of an answer that has more than text: they count in its text alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.dialects import AnswerParser
from kvcellar.engine.loop.text import StopMatcher


class TextStops:
    """Finds the first stop text in the text of an answer; thoughts and calls pass.

    It takes the answer as the model wrote it, marks and all, and lets through what can no longer be
    a part of a stop text. A stop text that a thought or a call interrupts is none.
    """

    def __init__(self, parser: AnswerParser, stops: Sequence[str]) -> None:
        """Stand where ``parser`` stands, which reads the answer from there on."""
        self._stops = stops
        self._matcher = StopMatcher(stops)
        self._parser = parser
        self._n_before = parser.n_pushed
        parser.watch(self._see)
        self._raw = ""
        self._n_given = 0
        self._next = 0
        """Where the text ends that was seen."""
        self._open: list[int] = []
        """Where each character of it stands that may be a part of a stop text."""
        self._cut: int | None = None

    @property
    def matched(self) -> str | None:
        """The stop text that was found; nothing is let through from then on."""
        return self._matcher.matched

    def push(self, text: str) -> str:
        """Add text; return what can no longer be a part of a stop text."""
        if self._cut is not None:
            return ""
        self._raw += text
        self._parser.push(text)
        sure = max(0, self._parser.n_read - self._n_before)
        if self._next == sure and self._open:  # what was seen last is text, and more may follow it
            sure = max(0, self._open[0])
        return self._give(sure)

    def flush(self) -> str:
        """Return what was held back, now that nothing follows it."""
        if self._cut is not None:
            return ""
        self._parser.flush()
        return self._give(len(self._raw))

    def _see(self, piece: str, at: int) -> None:
        """Look at a piece of the text, which stands at a place in the answer."""
        if self._cut is not None:
            return
        at -= self._n_before
        if at != self._next:
            self._matcher, self._open = StopMatcher(self._stops), []
        shown = [self._shown(char) for char in piece]
        self._open += [at + i for i, said in enumerate(shown) for _ in said]
        self._next = at + len(piece)
        n_sure = len(self._matcher.push("".join(shown)))
        if self._matcher.matched is not None:
            self._cut = max(0, self._open[n_sure])
        self._open = self._open[n_sure:]

    def _shown(self, char: str) -> str:
        """Return a mark as it is spelt; one that no reader sees, only where a stop text has it."""
        dialect = self._parser.dialect
        spelt = dialect.written(char)
        is_seen = spelt == char or any(spelt in stop for stop in self._stops)
        return spelt if is_seen else dialect.written(char, is_shown=True)

    def _give(self, sure: int) -> str:
        sure = sure if self._cut is None else self._cut
        given = self._raw[self._n_given : sure]
        self._n_given = max(self._n_given, sure)
        return given

"""Answers as commands tell them: what a model thinks, and calls, apart from what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcellar.agents.text.reading import Reading
from kvcellar.dialects import AnswerParser, CallPart, Part, ReasoningPart, dialect_for
from kvcellar.models.text.templates import reads_reasoning

Piece = dict[str, str]
"""A piece of an answer: ``text``, ``thought``, or ``call``: of a call as people read it."""


def reading_for(tokenizer: Any, dialect: str | None = None) -> Reading | None:
    """Return how an answer is read in which calls stay text; None: all of it is text.

    Args:
        tokenizer: of the model; None: of a text that is gone on with as it is.
        dialect: name of a dialect, where somebody has chosen one.
    """
    spoken = dialect_for(tokenizer, dialect)
    if tokenizer is None or not spoken.thinks:
        return None
    return Reading(spoken, knows_calls=True, knows_reasoning=reads_reasoning(tokenizer))


def stops_for(reading: Reading | None, stop: Sequence[str]) -> tuple[str, ...]:
    """Return stop texts, and besides how those of them come that have a mark's token."""
    spelt = () if reading is None else map(reading.dialect.spelt, stop)
    return (*stop, *(text for text in spelt if text not in stop))


class ReadAnswer:
    """One answer, told in pieces as it comes. The first piece has the prompt behind it."""

    def __init__(self, reading: Reading | None) -> None:
        """Stand at its beginning; without a reading all of it is text."""
        self._reading = reading
        self._parser: AnswerParser | None = None
        self._text = ""
        self._n_read = 0

    @property
    def text(self) -> str:
        """All that it says, so far."""
        return self._text if self._parser is None else self._parser.text

    @property
    def reasoning(self) -> str:
        """All that it thinks, so far."""
        return "" if self._parser is None else self._parser.reasoning

    @property
    def calls(self) -> list[dict[str, str]]:
        """All calls so far: ``name`` and ``arguments``."""
        calls = () if self._parser is None else self._parser.calls
        return [{"name": call.name, "arguments": call.arguments} for call in calls]

    def push(self, piece: str) -> list[Piece]:
        """Take the next piece; return what is certain with it."""
        self._n_read += len(piece)
        if self._reading is None:
            self._text += piece
            return [{"text": piece}] if piece else []
        if self._parser is None:
            self._parser = self._reading.parser()
        return [_piece(part) for part in self._parser.push(piece)]

    def end(self, text: str) -> list[Piece]:
        """Return the rest, at the end of an answer that has this text in all."""
        rest = self.push(text[self._n_read :])
        return rest if self._parser is None else [*rest, *map(_piece, self._parser.flush())]


def _piece(part: Part) -> Piece:
    if isinstance(part, ReasoningPart):
        return {"thought": part.text}
    if isinstance(part, CallPart):
        return {"call": part.text or f"\n{part.call.name} "}
    return {"text": part.text}

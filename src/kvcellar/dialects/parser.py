"""Reads an answer as it comes: its reasoning, its text, and its calls of tools.

Start with ``AnswerParser``, the face of both ways to read: ``blocks.py`` for calls that stand in
text, ``channels.py`` for answers that are rows of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.dialects.blocks import BlockReader
from kvcellar.dialects.channels import ChannelReader
from kvcellar.dialects.dialect import Dialect
from kvcellar.dialects.parts import Call, Part
from kvcellar.dialects.saying import AnswerSoFar, WatchFn


class AnswerParser:
    """Reads an answer piece by piece: parts of it. However it is cut, it means the same.

    What may be the beginning of a mark is held back; what turns out to be none comes as text, and
    so does what looks like a call and is none. Spaces and line ends with nothing but calls and the
    answer's ends around them are no text; nor is a line end right before a call, since templates
    write one there themselves. Reasoning comes without the marks and spaces around it, and a call
    inside of it is none; line ends behind it are no text.

    Attributes:
        dialect: that the answer is in.
    """

    def __init__(
        self,
        dialect: Dialect,
        call_ids: str,
        is_in_reasoning: bool = False,
        reads_calls: bool = True,
        is_forced: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        has_begun: bool = False,
    ) -> None:
        """Stand at the beginning of an answer.

        Args:
            dialect: that it is in.
            call_ids: how the ids of calls begin, where the model gives them none.
            is_in_reasoning: the prompt ends with the mark of reasoning.
            reads_calls: look for calls; else they are text.
            is_forced: there is nothing but calls: the beginning of one that was cut is no text.
            tools: definitions of what may be called, which say what is a string.
            has_begun: it goes on from text that is not read again.
        """
        self.dialect = dialect
        self._said = AnswerSoFar(dialect, call_ids, is_in_reasoning, is_forced, has_said=has_begun)
        parameters = {
            str(tool["function"]["name"]): tool["function"].get("parameters") or {}
            for tool in tools
        }
        reader = ChannelReader if dialect.has_channels else BlockReader
        self._reader = reader(dialect, self._said, reads_calls, parameters)

    @property
    def text(self) -> str:
        """All text so far that is in no call and no reasoning."""
        return self._said.text

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return self._said.reasoning

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return self._said.calls

    @property
    def is_in_reasoning(self) -> bool:
        """True while what comes next is reasoning."""
        return self._said.is_in_reasoning

    @property
    def trouble(self) -> str:
        """Say what is wrong with the last call, which was begun and is none; else empty.

        Nothing is read behind it.
        """
        return self._said.trouble

    def watch(self, watch: WatchFn) -> None:
        """Have all text told as it was written, once it is certain that it is text."""
        self._said.watch = watch

    @property
    def n_pushed(self) -> int:
        """Characters that were given."""
        return self._reader.n_pushed

    @property
    def n_read(self) -> int:
        """Characters of which it is certain what they are."""
        return self._reader.n_read - self._said.n_unseen

    def push(self, piece: str) -> list[Part]:
        """Take the next piece of the answer, and return what is certain with it."""
        self._reader.push(piece)
        return self._said.taken()

    def flush(self) -> list[Part]:
        """Return the rest, at the end of the answer."""
        self._reader.flush()
        self._said.finish()
        return self._said.taken()

"""Parts of an answer that are certain: spaces around them left out, and marks spelt out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcellar.dialects.dialect import Dialect
from kvcellar.dialects.parts import Call, CallPart, Part, ReasoningPart, TextPart

WatchFn = Callable[[str, int], None]
"""Told each piece of an answer's text as it was written, and where in the answer it stands."""


@dataclass(slots=True)
class AnswerSoFar:
    """An answer so far.

    Attributes:
        dialect: that it is in.
        call_ids: how the ids of calls begin.
        is_in_reasoning: whether what comes next is reasoning.
        is_forced: whether it is nothing but calls.
        text: all text.
        reasoning: all reasoning.
        calls: all calls.
        trouble: what is wrong with the last call; empty for nothing.
        has_said: whether there was text since the last call or reasoning.
        watch: told of all text, once it is certain that it is.
    """

    dialect: Dialect
    call_ids: str
    is_in_reasoning: bool = False
    is_forced: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    trouble: str = ""
    has_said: bool = False
    watch: WatchFn | None = None
    _spaces: str = ""
    """Spaces at a beginning, that are text where text follows; or behind reasoning so far."""
    _is_behind_reasoning: bool = False
    """Whether nothing but spaces came since reasoning, whose line ends are no text."""
    _has_thought: bool = False
    _parts: list[Part] = field(default_factory=list)
    _unseen: str = ""
    """Spaces as they were written, of which it is not certain that they are text."""
    _unseen_at: int = 0

    def taken(self) -> list[Part]:
        """Return the parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    @property
    def is_at_beginning(self) -> bool:
        """True where nothing but reasoning came."""
        return not (self.has_said or self.calls)

    @property
    def n_unseen(self) -> int:
        """Characters at the end of what was taken that may be text, or not."""
        return 0 if self.is_in_reasoning else len(self._unseen)

    def say(self, text: str, at: int | None = None) -> None:
        """Take text, which stands at a place in the answer; None: nobody wrote it."""
        self._see(text, at)
        text = self.dialect.written(text, is_shown=True)
        if not self.has_said:
            text = self._spaces + text
            if not text.strip():
                self._spaces = text
                return
            text = text.lstrip("\n") if self._is_behind_reasoning else text
            self._spaces, self.has_said, self._is_behind_reasoning = "", True, False
        if text:
            self.text += text
            self._parts.append(TextPart(text))

    def _see(self, text: str, at: int | None) -> None:
        """Show text to who watches, and what was before it where that is text, too."""
        if self.watch is None or at is None or not text:
            return
        if not self.has_said:
            at = self._unseen_at if self._unseen else at
            text = self._unseen + text
            if not text.strip():
                self._unseen, self._unseen_at = text, at
                return
            if self._is_behind_reasoning:
                n = len(text) - len(text.lstrip("\n"))
                text, at = text[n:], at + n
        self._unseen = ""
        self.watch(text, at)

    def begin_reasoning(self) -> None:
        """Go on with reasoning."""
        self._unseen = ""
        self.is_in_reasoning, self._has_thought, self._spaces = True, False, ""

    def think(self, text: str) -> None:
        """Take reasoning, without the spaces around it."""
        text = self._spaces + self.dialect.written(text, is_shown=True)
        text = text if self._has_thought else text.lstrip()
        sure = text.rstrip()
        self._spaces = text[len(sure) :]
        if not sure:
            return
        if self.reasoning and not self._has_thought:
            sure = f"\n\n{sure}"  # there was reasoning before
        self._has_thought = True
        self.reasoning += sure
        self._parts.append(ReasoningPart(sure))

    def end_reasoning(self) -> None:
        """Go on behind reasoning."""
        self.is_in_reasoning = self._has_thought = self.has_said = False
        self._spaces, self._is_behind_reasoning = "", True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; the spaces before it are no text."""
        self._unseen = ""
        self._spaces, self.has_said, self._is_behind_reasoning = "", False, False
        self.calls.append(Call(call_id or f"{self.call_ids}{len(self.calls)}", name))
        self._parts.append(CallPart(len(self.calls) - 1, self.calls[-1], ""))

    def argue(self, json: str) -> None:
        """Go on with the arguments of the last call."""
        if json:
            self.calls[-1].arguments += json
            self._parts.append(CallPart(len(self.calls) - 1, self.calls[-1], json))

    def finish(self) -> None:
        """Take the spaces at the end as text, where there is nothing else."""
        if self.is_in_reasoning or self.calls or self._is_behind_reasoning:
            self._spaces = ""
        if self._spaces:
            if self.watch is not None and self._unseen:
                self.watch(self._unseen, self._unseen_at)
            self.text += self._spaces
            self._parts.append(TextPart(self._spaces))
            self._spaces = ""

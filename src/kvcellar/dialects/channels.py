"""Reads answers that are rows of messages in channels, as harmony has them.

A message has a header, which may name a channel and a recipient, and a body. What is for a
recipient ``functions.NAME`` is a call, in whichever channel; ``analysis`` is reasoning, and the
others are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import regex

from kvcellar.dialects.arguments import JsonArgumentsReader
from kvcellar.dialects.dialect import CHANNEL_MARKS, Dialect
from kvcellar.dialects.saying import AnswerSoFar

_FUNCTIONS = "functions."
_NAME = r"[\w.:\-/]+"


class ChannelReader:
    """Reads messages one after the other, from behind the ``assistant`` of the first header."""

    def __init__(
        self,
        dialect: Dialect,
        said: AnswerSoFar,
        reads_calls: bool,
        parameters: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Stand at the beginning of an answer; the arguments are as with ``BlockReader``."""
        self._dialect = dialect
        self._said = said
        self._reads_calls = reads_calls
        marks = [re.escape(dialect.spelt(mark)) for mark in CHANNEL_MARKS]
        start, channel, message, constrain, *_ = marks
        self._mark = regex.compile("|".join(marks))
        self._header = regex.compile(
            rf"\s*(?:{start})?\s*(?:assistant)?(?:\s*to=(?P<to>{_NAME}))?\s*"
            rf"(?:{channel}\s*(?P<channel>\w+)(?:\s*to=(?P<to>{_NAME}))?\s*"
            rf"(?:(?:{constrain})?\s*\w*)?\s*)?{message}"
        )
        self._ends = regex.compile("|".join(marks[:2] + marks[4:]))
        self._held = ""
        self.n_pushed = 0
        self._state = self._in_header
        self._json: JsonArgumentsReader | None = None

    def push(self, piece: str) -> None:
        """Take the next piece of the answer."""
        self._held += piece
        self.n_pushed += len(piece)
        while self._held and not self._said.trouble and self._state():
            pass

    @property
    def n_read(self) -> int:
        """Characters of which it is certain what they are."""
        return self.n_pushed - len(self._held)

    def _say(self, n: int) -> None:
        """Take so many characters as text."""
        if n:
            self._said.say(self._held[:n], self.n_pushed - len(self._held))
        self._held = self._held[n:]

    def flush(self) -> None:
        """Take the rest, at the end of the answer."""
        if self._said.trouble or not self._held:
            return
        if self._state == self._in_header:
            is_begun = self._header.match(self._held, partial=True) is not None
            if self._held.strip() and not is_begun:
                self._say(len(self._held))
        elif self._state != self._in_call:
            self._tell(len(self._held))

    def _in_header(self) -> bool:
        found = self._header.match(self._held, partial=True)
        if found is not None and found.partial:
            return False
        if found is None:
            mark = self._mark.match(self._held)  # in a place where it means nothing
            end = mark.end() if mark is not None else 0
            self._say(end)
            self._state = self._in_plain
            return True
        self._held = self._held[found.end() :]
        self._begin(found["channel"] or "final", found["to"] or "")
        return bool(self._held)

    def _in_plain(self) -> bool:
        """Read what begins with no header as text, up to a mark with which one may begin."""
        found = self._mark.search(self._held, partial=True)
        end = len(self._held) if found is None else found.start()
        is_mark = found is not None and not found.partial
        self._say(end)
        self._state = self._in_header if is_mark else self._in_plain
        return is_mark

    def _begin(self, channel: str, recipient: str) -> None:
        """Go into a message's body."""
        said, is_call = self._said, recipient.startswith(_FUNCTIONS) and self._reads_calls
        if is_call:
            said.begin_call(self._dialect.written(recipient.removeprefix(_FUNCTIONS)))
            self._json, self._state = JsonArgumentsReader(self._dialect), self._in_call
            return
        self._state = self._in_body
        if channel == "analysis":
            said.begin_reasoning()
        elif said.has_said:
            said.say("\n\n")

    def _in_body(self) -> bool:
        found = self._ends.search(self._held, partial=True)
        end = len(self._held) if found is None else found.start()
        self._tell(end)
        if found is None or found.partial:
            return False
        return self._end(found, end)

    def _tell(self, n: int) -> None:
        if self._said.is_in_reasoning:
            self._said.think(self._held[:n])
            self._held = self._held[n:]
        else:
            self._say(n)

    def _in_call(self) -> bool:
        reader = self._json
        assert reader is not None
        if reader.is_done:
            return self._behind_call()
        made, n = reader.push(self._held)
        self._said.argue(made)
        if reader.trouble:
            name = self._said.calls[-1].name
            self._said.trouble = f"the call of {name!r} is malformed: {reader.trouble}"
            return False
        self._held = self._held[n:]
        return bool(self._held)

    def _behind_call(self) -> bool:
        found = self._ends.search(self._held, partial=True)
        if found is None or found.partial:
            return False
        return self._end(found)

    def _end(self, found: regex.Match[str], n_gone: int = 0) -> bool:
        """Go on behind a message, of which ``n_gone`` characters were taken since it was found.

        A header follows, to which its end may belong.
        """
        if self._said.is_in_reasoning:
            self._said.end_reasoning()
        start, channel = (self._dialect.spelt(mark) for mark in CHANNEL_MARKS[:2])
        end = found.start() if found[0] in (start, channel) else found.end()
        self._held, self._state = self._held[end - n_gone :], self._in_header
        return bool(self._held)

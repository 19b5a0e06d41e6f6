"""Reads answers whose calls and reasoning stand in text, between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from regex import Match

from kvcellar.dialects.arguments import ArgumentsReader, JsonArgumentsReader, reader_of
from kvcellar.dialects.dialect import Dialect
from kvcellar.dialects.patterns import patterns_of
from kvcellar.dialects.saying import AnswerSoFar


class BlockReader:
    """Reads text in which reasoning and blocks of calls come."""

    def __init__(
        self,
        dialect: Dialect,
        said: AnswerSoFar,
        reads_calls: bool,
        parameters: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Stand at the beginning of an answer.

        Args:
            dialect: that it is in.
            said: told what is certain.
            reads_calls: look for calls; else they are text.
            parameters: schema of the arguments, by tool.
        """
        self._dialect = dialect
        self._said = said
        self._reads_calls = reads_calls
        self._parameters = parameters
        self._patterns = patterns_of(dialect)
        self._held = ""
        self.n_pushed = 0
        self._state = self._in_text
        self._mark = self._raw = ""
        """The mark of a call that is not certain yet, and what was read behind it."""
        self._name = ""
        self._call_id: str | None = None
        self._reader: ArgumentsReader | None = None
        self._json = ""
        self._is_first = True
        """Whether a call may be here that can only be at the beginning."""

    def push(self, piece: str) -> None:
        """Take the next piece of the answer."""
        self._held += piece
        self.n_pushed += len(piece)
        while self._held and not self._said.trouble and self._state():
            pass

    @property
    def n_read(self) -> int:
        """Characters of which it is certain what they are."""
        return self.n_pushed - len(self._mark) - len(self._raw) - len(self._held)

    def _say(self, n: int) -> None:
        """Take so many characters as text."""
        self._said.say(self._held[:n], self.n_pushed - len(self._held))
        self._held = self._held[n:]

    def flush(self) -> None:
        """Take the rest, at the end of the answer."""
        said, end = self._said, self._patterns.end
        if said.trouble or self._state == self._in_tail:
            return
        if said.is_in_reasoning:
            said.think(self._held)
        elif self._state == self._behind_call:
            if end is None or end.match(self._held, partial=True) is None:
                self._say(len(self._held))
        elif self._state == self._in_arguments and not self._tells_at_end:
            return  # the answer ended inside of a call
        elif not (said.is_forced and self._is_begun()):
            self._held = self._mark + self._raw + self._held
            self._mark = self._raw = ""
            self._say(len(self._held))

    def _is_begun(self) -> bool:
        """Return true where what is held is a call's beginning."""
        if self._state != self._in_text:
            return True
        patterns = (self._patterns.begin, self._patterns.first)
        found = (one.match(self._held, partial=True) for one in patterns if one is not None)
        return bool(self._held) and any(one is not None for one in found)

    @property
    def _tells_at_end(self) -> bool:
        return self._reader is not None and self._reader.tells_at_end

    # Text and reasoning ---------------------------------------------------------------------------

    def _in_text(self) -> bool:
        if self._said.is_in_reasoning:
            return self._in_reasoning()
        if self._said.is_at_beginning and self._is_first:
            found = self._at_first()
            if found is not None:
                return found
        begin = self._patterns.begin if self._reads_calls else None
        found_all = [
            (found, is_call)
            for one, is_call in ((begin, True), (self._patterns.thought, False))
            if one is not None and (found := one.search(self._held, partial=True)) is not None
        ]
        if not found_all:
            self._say(len(self._held))
            return False
        found, is_call = min(found_all, key=lambda one: (one[0].start(), one[0].partial))
        self._say(found.start())
        if found.partial:
            return False
        self._enter(found.end() - found.start(), is_call)
        return True

    def _at_first(self) -> bool | None:
        """Look for what is only at the beginning; None: there is nothing of it."""
        calls = self._patterns.first if self._reads_calls else None
        is_open = False
        for one, is_call in ((calls, True), (self._patterns.first_thought, False)):
            found = one.match(self._held, partial=True) if one is not None else None
            if found is not None and not found.partial:
                self._enter(found.end(), is_call)
                return True
            is_open |= found is not None
        if is_open:
            return False
        self._is_first = False
        return None

    def _enter(self, n: int, is_call: bool) -> None:
        """Go behind a mark that is ``n`` characters long."""
        if is_call:
            self._mark, self._raw, self._state = self._held[:n], "", self._in_head
        else:
            self._said.begin_reasoning()
        self._held = self._held[n:]

    def _in_reasoning(self) -> bool:
        end = self._patterns.thought_end
        assert end is not None, "reasoning that began has an end"
        found = end.search(self._held, partial=True)
        n = len(self._held) if found is None else found.start()
        self._said.think(self._held[:n])
        self._held = self._held[n:]
        if found is None or found.partial:
            return False
        self._held = self._held[found.end() - n :]
        self._said.end_reasoning()
        self._is_first = True
        return True

    # Calls ----------------------------------------------------------------------------------------

    def _in_head(self) -> bool:
        found = self._patterns.head.match(self._held, partial=True)
        if found is not None and found.partial:
            return False
        if found is None or not self._take_head(found):
            if self._patterns.is_object:
                self._reader, self._json = JsonArgumentsReader(self._dialect), ""
                self._state = self._in_object
                return True
            return self._is_no_call()
        self._raw += self._held[: found.end()]
        self._held = self._held[found.end() :]
        self._reader = reader_of(self._dialect, self._parameters.get(self._name, {}))
        if not self._reader.tells_at_end:
            self._announce()
        self._state = self._in_arguments
        return bool(self._held)

    def _take_head(self, found: Match[str]) -> bool:
        """Take the name, and the id if there is one; false: it is no name."""
        groups = found.groupdict()
        name = groups.get("name")
        if name is None:
            name = _json_text(f'"{self._dialect.written(groups["quoted"])}"')
        if not name:
            return False
        self._name, self._call_id = self._dialect.written(name), groups.get("id")
        return True

    def _announce(self) -> None:
        self._said.begin_call(self._name, self._call_id)
        self._mark = self._raw = ""

    def _in_arguments(self) -> bool:
        reader = self._reader
        assert reader is not None
        made, n = reader.push(self._held)
        if reader.trouble and reader.tells_at_end:
            return self._is_no_call()
        self._raw += self._held[:n] if reader.tells_at_end else ""
        self._held = self._held[n:]
        if reader.is_done:
            if reader.tells_at_end:
                self._announce()
            self._state = self._in_tail
        self._said.argue(made)
        if reader.trouble:
            self._said.trouble = f"the call of {self._name!r} is malformed: {reader.trouble}"
        return bool(reader.is_done)

    def _in_tail(self) -> bool:
        """Behind the arguments: what belongs to the call, if it is there."""
        tail = self._patterns.tail
        found = tail.match(self._held, partial=True) if tail is not None else None
        if found is not None and found.partial:
            return False
        self._held = self._held[found.end() if found is not None else 0 :]
        self._state = self._behind_call
        return True

    def _behind_call(self) -> bool:
        """Behind a call: the block's next, or its end; or text, where it does not end."""
        between, end = self._patterns.between, self._patterns.end
        for one in (between, end):
            found = one.match(self._held, partial=True) if one is not None else None
            if found is not None and found.partial:
                return False
            if found is not None:
                self._mark = self._held[: found.end()] if one is between else ""
                self._held = self._held[found.end() :]
                self._state = self._in_head if one is between else self._in_text
                return True
        self._state = self._in_text
        return True

    # Calls whose keys come in another order -------------------------------------------------------

    def _in_object(self) -> bool:
        reader = self._reader
        assert reader is not None
        made, n = reader.push(self._held)
        if reader.trouble:
            return self._is_no_call()
        self._json += made
        self._raw += self._held[:n]
        self._held = self._held[n:]
        if not reader.is_done:
            return False
        call = _whole_call(self._json)
        if call is None:
            return self._is_no_call()
        self._name, self._call_id = call[0], None
        self._announce()
        self._said.argue(call[1])
        self._state = self._behind_call
        return bool(self._held)

    def _is_no_call(self) -> bool:
        """Take the mark as text, and go on behind it."""
        n = len(self._mark)
        self._held = self._mark + self._raw + self._held
        self._mark = self._raw = ""
        self._say(n)
        self._state, self._is_first = self._in_text, False
        return True


def _json_text(text: str) -> str | None:
    """Read a string as JSON writes it; None where it is none that can be sent."""
    try:
        found = json.loads(text)
        found.encode()
    except (ValueError, AttributeError):
        return None
    return str(found)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is one JSON object; None where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name")
    name = _json_text(json.dumps(name)) if isinstance(name, str) else None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments)

"""Readers of one call's arguments, in each way in which dialects write them.

A reader takes text as it comes and returns JSON. Whoever reads a call begins with a reader's
``push``; a reader that ``tells_at_end`` gives nothing before all of it is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from kvcellar.dialects.dialect import (
    MARKS,
    BareArguments,
    CallForm,
    Dialect,
    PythonArguments,
    TaggedArguments,
)
from kvcellar.dialects.json_reader import JsonReader
from kvcellar.dialects.kinds import SchemaKinds
from kvcellar.dialects.patterns import tag_patterns_of
from kvcellar.dialects.values import (
    NoValueError,
    bare_arguments,
    python_arguments,
    tagged_value,
)


class ArgumentsReader(Protocol):
    """Protocol of a reader.

    Attributes:
        tells_at_end: whether nothing is certain before that.
    """

    tells_at_end: bool

    @property
    def trouble(self) -> str:
        """Say what can be no arguments; empty for nothing."""
        ...

    @property
    def is_done(self) -> bool:
        """True where all arguments were read."""
        ...

    def push(self, text: str) -> tuple[str, int]:
        """Take what there is.

        Returns:
            JSON that became certain, and how many characters were read; the rest is given again
            with what follows it. Where there is ``trouble``, what was certain before it.
        """
        ...


def reader_of(dialect: Dialect, parameters: Mapping[str, Any]) -> ArgumentsReader:
    """Return what reads the arguments of a call, for a tool whose parameters have that schema."""
    form = dialect.calls
    if form is None:
        return JsonArgumentsReader(dialect)
    if isinstance(form.arguments, TaggedArguments):
        return TaggedReader(dialect, form.arguments, parameters)
    if isinstance(form.arguments, PythonArguments):
        return PythonReader(dialect, _properties_of(parameters))
    if isinstance(form.arguments, BareArguments):
        return BareReader(dialect, form, form.arguments.quote)
    return JsonArgumentsReader(dialect)


class JsonArgumentsReader:
    """Reads a JSON object. A mark inside a string is spelt out."""

    tells_at_end = False

    def __init__(self, dialect: Dialect) -> None:
        """Stand before the object."""
        self._dialect = dialect
        self._json = JsonReader()

    @property
    def is_done(self) -> bool:
        """True where the object is complete."""
        return self._json.is_done

    @property
    def trouble(self) -> str:
        """Say what is no JSON; empty for nothing."""
        return self._json.trouble

    def push(self, text: str) -> tuple[str, int]:
        """Take what there is; all of it, up to the object's end."""
        made, n = self._json.push(text)
        if made.isascii():
            return made, n
        return _spelt_out(self._dialect, made), n


class TaggedReader:
    """Reads arguments between tags; strings are told as they come."""

    tells_at_end = False

    def __init__(
        self, dialect: Dialect, form: TaggedArguments, parameters: Mapping[str, Any]
    ) -> None:
        """Stand before the first argument."""
        self.is_done, self.trouble = False, ""
        self._dialect = dialect
        self._patterns = tag_patterns_of(dialect)
        self._form = form
        self._properties = _properties_of(parameters)
        self._kinds = SchemaKinds(parameters)
        self._n = 0
        self._is_inside = self._is_text = False
        self._key = ""
        self._is_string: bool | None = None

    def push(self, text: str) -> tuple[str, int]:
        """Take what there is, but what may be the beginning of a tag."""
        made, at = "", 0
        while not self.is_done:
            said, n = (self._value if self._is_inside else self._opening)(text[at:])
            if not n and not said and not self.is_done:
                break
            made, at = made + said, at + n
        return made, at

    def _opening(self, text: str) -> tuple[str, int]:
        found = self._patterns.opening.match(text, partial=True)
        if found is not None and found.partial:
            return "", 0
        if found is None:
            more = self._patterns.more.match(text, partial=True)
            if more is None:
                self.trouble = f"{text.strip()[:1]!r} where an argument has to begin"
                return "", 0
            if more.partial:
                return "", 0
            self.is_done = True
            return ("}" if self._n else "{}"), 0
        groups = found.groupdict()
        self._key = groups["key"].strip()
        said = groups.get("string")
        self._is_string = None if said is None else said == "true"
        schema = self._properties.get(self._key)
        self._is_text = self._kinds.is_text(schema) if self._is_string is None else self._is_string
        head = f"{', ' if self._n else '{'}{json.dumps(self._key, ensure_ascii=False)}: "
        self._n, self._is_inside = self._n + 1, True
        return head + ('"' if self._is_text else ""), found.end()

    def _value(self, text: str) -> tuple[str, int]:
        found = self._patterns.closing.search(text, partial=True)
        end = len(text) if found is None else found.start()
        is_whole = found is not None and not found.partial
        if self._is_text:
            said = _as_json(_spelt_out(self._dialect, text[:end], is_json=False))[1:-1]
        elif not is_whole:
            return "", 0
        else:
            plain = _spelt_out(self._dialect, text[:end], is_json=False)
            schema = self._properties.get(self._key)
            try:
                value = tagged_value(
                    plain, schema, self._is_string, self._kinds, has_words=self._form.has_words
                )
                said = _encodable(_as_json(value))
            except ValueError as error:
                self.trouble = str(error)
                return "", 0
        if found is None or not is_whole:
            return said, end
        self._is_inside = False
        return said + ('"' if self._is_text else ""), found.end()


class _WholeReader:
    """Reads arguments that mean something only when all of them are there, step by step.

    Attributes:
        tells_at_end: whether nothing is told of them before.
        is_done: whether their end was read.
        trouble: why they are none; empty where they may be.
    """

    tells_at_end = True

    def __init__(self, n_ahead: int) -> None:
        """Stand in front of them; a step looks at ``n_ahead`` characters at most."""
        self.is_done, self.trouble = False, ""
        self._n_ahead = n_ahead
        self._text = ""
        self._at = 0

    def push(self, text: str) -> tuple[str, int]:
        """Take what there is, up to what closes them, which stays.

        Returns:
            The arguments as JSON, once they are whole, and how many characters were taken.
        """
        try:
            return self._push(text)
        except ValueError as error:
            self.trouble = str(error)
            return "", 0

    def _push(self, text: str) -> tuple[str, int]:
        self._text += text
        while self._at < len(self._text):
            n = self._step(self._text[self._at : self._at + self._n_ahead])
            if n < 0:
                self.is_done = True
                n_read = len(text) - (len(self._text) - self._at)
                return self._value(self._text[: self._at]), n_read
            if not n:
                break
            self._at += n
        return "", len(text)

    def _step(self, text: str) -> int:
        """Count the characters of the next step; 0: more text is needed; -1: it ends here."""
        raise AssertionError("each kind has its own")

    def _value(self, text: str) -> str:
        """Return all of the arguments as JSON; raise ValueError where they are none."""
        raise AssertionError("each kind has its own")


class PythonReader(_WholeReader):
    """Reads the arguments of a Python call, all at once."""

    def __init__(self, dialect: Dialect, properties: Mapping[str, Any]) -> None:
        """Stand behind the opening parenthesis."""
        super().__init__(n_ahead=4)  # three quotes, and whether more follows
        self._dialect = dialect
        self._names = list(properties)
        self._quote = ""
        self._open: list[str] = []

    def _value(self, text: str) -> str:
        plain = _spelt_out(self._dialect, text, is_json=False)
        return _encodable(_as_json(python_arguments(plain, self._names)))

    def _step(self, text: str) -> int:
        char = text[0]
        if self._quote:
            if char == "\\":
                return 2 if len(text) > 1 else 0
            if not text.startswith(self._quote):
                return 0 if self._quote.startswith(text) else 1
            n, self._quote = len(self._quote), ""
            return n
        if char in "'\"":
            if len(text) < 3 and text == char * len(text):
                return 0
            self._quote = char * 3 if text.startswith(char * 3) else char
            if text[:2] == char * 2 and self._quote == char:
                self._quote = ""
                return 2
            return len(self._quote)
        if char in "([{":
            self._open.append(char)
        elif char in ")]}":
            if not self._open:
                if char == ")":
                    return -1
                raise NoValueError(f"{char!r} where its arguments end")
            if self._open.pop() + char not in ("()", "[]", "{}"):
                raise NoValueError(f"{char!r} closes what was not opened")
        elif MARKS[0] <= char <= MARKS[-1]:
            raise NoValueError("a mark stands in its arguments")
        return 1


class BareReader(_WholeReader):
    """Reads arguments with bare keys, all at once."""

    def __init__(self, dialect: Dialect, form: CallForm, quote: str) -> None:
        """Stand behind the opening brace."""
        self._dialect = dialect
        self._quote = dialect.spelt(quote)
        super().__init__(n_ahead=len(self._quote) + 1)
        self._is_quoted = self._is_in_json = False
        self._depth = 0

    def _value(self, text: str) -> str:
        return _encodable(_spelt_out(self._dialect, _as_json(bare_arguments(text, self._quote))))

    def _step(self, text: str) -> int:
        char = text[0]
        if self._is_in_json:
            if char == "\\":
                return 2 if len(text) > 1 else 0
            self._is_in_json = char != '"'
            return 1
        if text.startswith(self._quote):
            self._is_quoted = not self._is_quoted
            return len(self._quote)
        if self._quote.startswith(text):
            return 0
        if not self._is_quoted:
            self._is_in_json = char == '"'
            if char in "{[":
                self._depth += 1
            elif char in "}]":
                if not self._depth:
                    return -1
                self._depth -= 1
            elif MARKS[0] <= char <= MARKS[-1]:
                raise NoValueError("a mark stands in its arguments")
        return 1


def _properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    known = parameters.get("properties")
    return known if isinstance(known, Mapping) else {}


def _as_json(value: Any) -> str:
    """Write a value as JSON; ``ValueError`` where there is none of it, such as infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _encodable(text: str) -> str:
    """Return JSON of which the bytes can be sent: halves of characters stay escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text))
    return text


def _spelt_out(dialect: Dialect, text: str, *, is_json: bool = True) -> str:
    """Write the marks in a text as they are spelt, in JSON as a string has them."""
    if not any(MARKS[0] <= char <= MARKS[-1] for char in text):
        return text
    if not is_json:
        return dialect.written(text)
    return "".join(
        json.dumps(dialect.written(char), ensure_ascii=False)[1:-1]
        if MARKS[0] <= char <= MARKS[-1]
        else char
        for char in text
    )

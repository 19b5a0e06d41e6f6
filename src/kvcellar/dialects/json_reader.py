"""Reads one JSON object character by character, and lets through what is JSON so far."""

from __future__ import annotations

import json
import re

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = ("true", "false", "null")
_ESCAPES = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"


class NoJsonError(ValueError):
    """A text is no JSON; the message says at what."""


class JsonReader:
    """The state inside one JSON object.

    Line ends and other control characters in a string, which models write as they are, become
    escapes.

    Attributes:
        is_done: whether the object is complete.
        trouble: what is no JSON; empty for nothing.
    """

    def __init__(self) -> None:
        """Stand before the object."""
        self.is_done = False
        self.trouble = ""
        self._open: list[str] = []
        self._wants = "value"
        self._word = ""
        self._n_hex = 0
        self._is_in_string = self._is_escaped = False

    def push(self, text: str) -> tuple[str, int]:
        """Take text up to the object's end.

        Returns:
            JSON, and how many characters of the text it is; where it ends in ``trouble``, what is
            JSON before that.
        """
        made: list[str] = []
        for i, char in enumerate(text):
            try:
                made.append(self._string(char) if self._is_in_string else self._value(char))
            except NoJsonError as error:
                self.trouble = str(error)
                return "".join(made), i
            if self.is_done:
                return "".join(made), i + 1
        return "".join(made), len(text)

    def _string(self, char: str) -> str:
        if self._n_hex:
            if char not in _HEX:
                raise NoJsonError(f"{char!r} in an escape")
            self._n_hex -= 1
        elif self._is_escaped:
            if char not in _ESCAPES:
                raise NoJsonError(f"the escape \\{char}")
            self._is_escaped, self._n_hex = False, 4 if char == "u" else 0
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _value(self, char: str) -> str:
        if self._word:
            if char.isalnum() or char in "+-.":
                self._word += char
                if not any(word.startswith(self._word) for word in _WORDS):
                    self._check_number()
                return char
            self._end_word()
        if char in " \t\n\r":
            return char
        if char == '"' and self._wants in ("value", "value or end", "key", "key or end"):
            self._is_in_string = True
            self._wants = "colon" if self._wants.startswith("key") else "next"
        elif char in "{[" and self._wants.startswith("value") and (self._open or char == "{"):
            self._open.append(char)
            self._wants = "key or end" if char == "{" else "value or end"
        elif char in "}]":
            self._close(char)
        elif char == ":" and self._wants == "colon":
            self._wants = "value"
        elif char == "," and self._wants == "next":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif self._open and self._wants.startswith("value") and (char.isalnum() or char == "-"):
            self._word = char
            if char not in "tfn":
                self._check_number()
        else:
            raise NoJsonError(f"{char!r} where JSON has a {self._wants}")
        return char

    def _close(self, char: str) -> None:
        is_right = self._wants == "next" or self._wants.endswith("or end")
        if not is_right or not self._open or self._open.pop() + char not in ("{}", "[]"):
            raise NoJsonError(f"{char!r} where JSON has a {self._wants}")
        self._wants = "next"
        self.is_done = not self._open

    def _check_number(self) -> None:
        """Refuse what can become no number."""
        if not _NUMBER.fullmatch(self._word) and not _NUMBER.fullmatch(f"{self._word}0"):
            raise NoJsonError(f"{self._word[:20]!r}, which is no value")

    def _end_word(self) -> None:
        if self._word not in _WORDS and not _NUMBER.fullmatch(self._word):
            raise NoJsonError(f"{self._word[:20]!r}, which is no value")
        self._word, self._wants = "", "next"

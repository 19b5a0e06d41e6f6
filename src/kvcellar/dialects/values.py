"""Values of arguments that are not written as JSON: text between tags, Python, bare keys."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from typing import Any

from kvcellar.dialects.kinds import SchemaKinds

_WORDS = {"True": True, "False": False, "None": None}
_NAMES = {"true": True, "false": False, "null": None, "none": None}


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class NoValueError(ValueError):
    """A text has no arguments in it; the message says why."""


def tagged_value(
    text: str, schema: Any, is_string: bool | None, kinds: SchemaKinds, *, has_words: bool = False
) -> Any:
    """Read a value between tags, by the rule of ``kinds.py``.

    Args:
        text: as it stands there.
        schema: of the value; None where it is not known.
        is_string: what the tag says of it; None: nothing.
        kinds: knows what the schema takes.
        has_words: whether the model writes ``None`` and ``True`` as Python does.
    """
    if is_string or (is_string is None and kinds.is_text(schema)):
        return text
    if is_string is None and kinds.takes_text(schema):
        try:
            value = _WORDS[text] if has_words and text in _WORDS else _DECODER.decode(text)
        except (ValueError, RecursionError):
            return text
        return text if isinstance(value, str) or not kinds.takes(schema, value) else value
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _python_value(text)


def _python_value(text: str) -> Any:
    """Read what is no JSON as Python, which models write too; a text where it is none."""
    try:
        return _literal(_parsed(text.strip()))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def python_arguments(inside: str, names: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a Python call.

    Args:
        inside: what stands between its parentheses.
        names: of the tool's parameters, for arguments without one.

    Raises:
        NoValueError: they are none, or not all of them are literals.
    """
    try:
        call = _parsed(f"f({inside}\n)")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoValueError("its arguments are no Python") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise NoValueError("there is more than a call")
    if len(call.args) > len(names):
        raise NoValueError("it has arguments without a name")
    found = {name: _literal(node) for name, node in zip(names, call.args, strict=False)}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise NoValueError("an argument is there twice, or has no name")
        found[keyword.arg] = _literal(keyword.value)
    return found


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none, and stay what they are
        return ast.parse(text, mode="eval").body


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict) and all(
        isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys
    ):
        return {
            key.value: _literal(one)
            for key, one in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise NoValueError("an argument is no literal")


def bare_arguments(inside: str, quote: str) -> dict[str, Any]:
    """Read arguments whose keys have no quotes.

    Args:
        inside: what stands between the outer braces.
        quote: around strings.

    Raises:
        NoValueError: they are none.
    """
    reader = _BareReader(f"{{{inside}}}", quote)
    value = reader.value()
    if reader.rest().strip():
        raise NoValueError("there is more than its arguments")
    assert isinstance(value, dict)
    return value


class _BareReader:
    """A text of bare keys, and how far it is read."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def value(self, depth: int = 0) -> Any:
        """Read the next value."""
        if depth > 100:
            raise NoValueError("it is nested too deeply")
        if self._takes(self._quote):
            return self._until(self._quote)
        if self._takes("{"):
            pairs: dict[str, Any] = {}
            while not self._takes("}"):
                key = self._key()
                pairs[key] = self.value(depth + 1)
                self._separate("}")
            return pairs
        if self._takes("["):
            items: list[Any] = []
            while not self._takes("]"):
                items.append(self.value(depth + 1))
                self._separate("]")
            return items
        return self._scalar()

    def _scalar(self) -> Any:
        try:
            value, self._at = _DECODER.raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            raise NoValueError(f"{self.rest()[:20]!r} is no value") from None
        return value

    def _key(self) -> str:
        if self._takes(self._quote):
            key = self._until(self._quote)
        elif self._text.startswith('"', self._at):
            key = str(self._scalar())
        else:
            key = self._until(":").strip()
            self._at -= 1
        if not self._takes(":") or not key or any(char in key for char in "{}[],"):
            raise NoValueError(f"{key[:20]!r} is no key")
        return key

    def _separate(self, end: str) -> None:
        if not self._takes(",") and not self._text[self._at :].lstrip().startswith(end):
            raise NoValueError(f"a comma is missing before {self.rest()[:20]!r}")

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._at)
        if end < 0:
            raise NoValueError(f"{mark} is missing")
        found, self._at = self._text[self._at : end], end + len(mark)
        return found

    def _takes(self, mark: str) -> bool:
        """Go behind spaces and a mark, if it is next."""
        at = self._at
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        if self._text.startswith(mark, at):
            self._at = at + len(mark)
            return True
        self._at = at
        return False

"""A conversation as a value: messages, each with the key by which it is found again.

Whoever has one has one state of a conversation. A longer one shares the messages, and what is known
of their keys, with the one that it goes on from; so nothing is read again that was read before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvcellar.valid import read_json

Message = dict[str, Any]

_DATE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?\b"
    r"|\b(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,? )?"
    r"(?:\d{1,2} )?(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December) (?:\d{1,2},? )?\d{4}\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2})?(?: ?[AP]M)?\b",
)
_ABOUT_NOW = re.compile(
    r"^.*\b(?:today|date|now|current|time|clock)\b.*$", re.IGNORECASE | re.MULTILINE
)
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names by which messages of several protocols have what a model thought."""


class _Keys:
    """Keys of one message, as far as somebody has asked: with dates, and without."""

    __slots__ = ("dated", "undated")

    def __init__(self) -> None:
        self.dated: str | None = None
        self.undated: str | None = None


class Messages(tuple[Message, ...]):
    """Messages of a conversation, oldest first. Neither they nor what is in them ever changes.

    Each has a key, which is computed when it is asked for the first time, and never again, also in
    the longer and shorter ones that are made of this one.
    """

    _keys: tuple[_Keys, ...]

    def __new__(cls, messages: Iterable[Mapping[str, Any]] = ()) -> Messages:
        """Return copies of the messages as a value; what is one already comes back itself."""
        if type(messages) is cls:
            return messages
        return cls._of(dict(one) for one in messages)

    @classmethod
    def _of(cls, messages: Iterable[Message], keys: Sequence[_Keys] = ()) -> Messages:
        """Return messages of which the first have their keys already."""
        made = super().__new__(cls, messages)
        made._keys = (*keys, *(_Keys() for _ in range(len(made) - len(keys))))
        return made

    def prefix(self, n: int) -> Messages:
        """Return the first ``n`` messages."""
        return self if n >= len(self) else self._of(self[:n], self._keys[:n])

    def behind(self, n: int) -> Messages:
        """Return the messages behind the first ``n``."""
        return self._of(self[n:], self._keys[n:])

    def plus(self, messages: Iterable[Mapping[str, Any]]) -> Messages:
        """Return these messages and others behind them, with the keys that both know."""
        more = Messages(messages)
        return self._of((*self, *more), (*self._keys, *more._keys)) if more else self

    def but(self, changed: Mapping[int, Message]) -> Messages:
        """Return these messages with others in some places.

        Args:
            changed: the others, by place.
        """
        if not changed:
            return self
        said = (changed.get(i, message) for i, message in enumerate(self))
        keys = [_Keys() if i in changed else one for i, one in enumerate(self._keys)]
        return self._of(said, keys)

    def key(self, i: int, rules: Collection[str]) -> str:
        """Return the key of a message, as :func:`match_key` makes it."""
        known = self._keys[i]
        if "date" not in rules or self[i].get("role") != "system":
            if known.dated is None:
                known.dated = match_key(self[i], ())
            return known.dated
        if known.undated is None:
            known.undated = match_key(self[i], rules)
        return known.undated

    def n_matched(self, other: Messages, rules: Collection[str]) -> int:
        """Count the messages with which both begin: of the same key, whoever wrote them.

        Messages that are the same need no key to be known for it.
        """
        for i, (mine, its) in enumerate(zip(self, other, strict=False)):
            if mine.get("role") != its.get("role"):
                return i
            if not _is_same(mine, its) and self.key(i, rules) != other.key(i, rules):
                return i
        return min(len(self), len(other))


def n_alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many values two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def match_key(message: Mapping[str, Any], rules: Collection[str]) -> str:
    """Return a text that is the same for two messages where one stands for the other.

    It finds a place in a history; what the model reads is what was sent. An answer is found also
    where it comes back trimmed, without its reasoning, with the keys of its tool calls in another
    order, or without their ids; with the rule ``date``, a system message also with another date.
    """
    role = message.get("role")
    content = _text_of(message.get("content"))
    if role == "assistant":
        content = _THOUGHTS.sub("", content).strip()
    if role == "system" and "date" in rules:
        content = _ABOUT_NOW.sub(lambda line: _DATE.sub("<date>", line[0]), content)
    rest = {
        key: _canonical(value) if role == "assistant" else value
        for key, value in message.items()
        if key not in ("role", "content", *REASONING_NAMES) and value
    }
    return json.dumps([role, content, rest], sort_keys=True, ensure_ascii=False)


def _is_same(a: Any, b: Any) -> bool:
    """Return true if two values say the same as JSON; where it is false, they may all the same."""
    if a is b:
        return True
    if type(a) is not type(b):  # true is no 1
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


def _text_of(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, Sequence):
        return "".join(
            str(part.get("text", json.dumps(part, sort_keys=True)))
            if isinstance(part, Mapping)
            else str(part)
            for part in content
        )
    return str(content)


def _canonical(value: Any) -> Any:
    """Read the texts in a value that are JSON themselves, such as arguments of calls."""
    if isinstance(value, str):
        try:
            return read_json(value)
        except ValueError:
            return value
    if isinstance(value, Mapping):
        is_call = "function" in value  # its id is the server's own: some clients do not keep it
        return {k: _canonical(v) for k, v in value.items() if not (is_call and k == "id")}
    if isinstance(value, Sequence):
        return [_canonical(part) for part in value]
    return value

r"""Makes values from outside valid: text that is Unicode, values that JSON can hold.

JSON and Python both let half a surrogate pair into a string (``"\ud83d"``, an emoji cut in two).
No tokenizer, file or answer can hold that, so it becomes U+FFFD at the entrance, as browsers do.
A name that there is not is answered with those that come near.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kvcellar.errors import PromptError

__all__ = ["MOST_DEPTH", "nearest", "read_json", "valid_json", "valid_text"]

T = TypeVar("T")

MOST_VALUES = 50_000
"""In a text of JSON inside other JSON, such as the arguments of a call."""

MOST_DEPTH = 128
"""Objects and lists inside each other; schemas of tools that people use have about 20."""


def valid_text(text: str) -> str:
    """Return ``text`` with U+FFFD for every surrogate that stands alone.

    Two surrogates that make a pair become their character. Text that is valid comes back itself.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_json(text: str) -> Any:
    """Return what a text of JSON says, if it has no more than ``MOST_VALUES`` values.

    Reading holds the whole process, so a text may not be as intricate as it likes.

    Raises:
        ValueError: it is no JSON, or has too many values.
    """
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"the text has more than {MOST_VALUES} values")
    return json.loads(text)


def valid_json(value: T) -> T:
    """Return ``value`` with all its texts and keys made valid, or itself where they are.

    Args:
        value: mappings, lists, tuples, texts, numbers, booleans and None.

    Raises:
        PromptError: a number that is not finite, or more than ``MOST_DEPTH`` levels; the message
            says where.
    """
    found: T = _valid(value, ())
    return found


def _valid(value: Any, where: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise PromptError(f"{_named(where)} is {value}, which JSON has no number for")
    if isinstance(value, Mapping | list | tuple) and len(where) > MOST_DEPTH:
        raise PromptError(
            f"{_named(where[:6])}... is nested more than {MOST_DEPTH} levels deep; send it flatter"
        )
    if isinstance(value, Mapping):
        pairs = [
            (_valid(key, where), _valid(item, (*where, key)), key, item)
            for key, item in value.items()
        ]
        is_same = all(key is old_key and item is old for key, item, old_key, old in pairs)
        return value if is_same else {key: item for key, item, _, _ in pairs}
    if isinstance(value, list | tuple):
        changed = {}
        for i, item in enumerate(value):
            if type(item) is not int:  # token ids, by the hundred thousand
                fresh = _valid(item, (*where, i))
                if fresh is not item:
                    changed[i] = fresh
        if not changed:
            return value
        items = [changed.get(i, item) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _named(where: tuple[Any, ...]) -> str:
    return valid_text(".".join(str(part)[:80] for part in where)) or "the value"


def nearest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return the names that one may have meant, the nearest first; none where none comes near.

    Capitals do not matter. A name comes near by its letters, where one in three may be wrong, left
    out, too many or in its neighbour's place; or where one begins with the other.

    Args:
        name: what was said.
        names: what there is.
        most: so many at most.
    """
    said = name.lower()
    found = []
    for one in dict.fromkeys(names):
        there = one.lower()
        distance = _distance(said, there)
        if distance <= max(1, max(len(said), len(there)) // 3):
            found.append((distance, one))
        elif len(said) > 2 and (there.startswith(said) or said.startswith(there)):
            found.append((max(len(said), len(there)), one))
    return [one for _, one in sorted(found)[:most]]


def _distance(first: str, second: str) -> int:
    """Count the letters to add, to leave out, to change or to swap with a neighbour."""
    before, last = [0] * (len(second) + 1), list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        now = [i]
        for j, b in enumerate(second, 1):
            cost = min(last[j] + 1, now[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and b == first[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]

"""How long a text is at least, in tokens, before it is encoded as a whole.

Encoding a text takes some two hundred times its bytes for a moment, and seconds for megabytes. So a
text that cannot fit into a model's context is refused by its bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcellar.errors import ContextError

__all__ = ["Size", "longest_token", "refuse_bytes", "size_of"]

_longest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_VALUE_BYTES = 64
"""An object, number or text takes about the time of so many bytes of text."""


class Size(NamedTuple):
    """How much some values of JSON are.

    Attributes:
        n_bytes: of all texts in them, keys left out.
        cost: the same and something for each value: bytes of text that take as much time.
    """

    n_bytes: int
    cost: int


def longest_token(tokenizer: Any) -> int:
    """Return the most bytes of text that one token may stand for, or a little more."""
    try:
        return _longest[tokenizer]
    except KeyError:
        names = tokenizer.get_vocab()
        _longest[tokenizer] = found = max(len(name.encode("utf-8", "replace")) for name in names)
        return found


def size_of(*values: Any) -> Size:
    """Return how much some values of JSON are."""
    n_bytes, n_values, left = 0, 0, list(values)
    while left:
        one = left.pop()
        n_values += 1
        if isinstance(one, str):
            n_bytes += len(one) if one.isascii() else len(one.encode("utf-8", "replace"))
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return Size(n_bytes, n_bytes + _VALUE_BYTES * n_values)


def refuse_bytes(tokenizer: Any, n_bytes: int, context: int) -> None:
    """Refuse text that has too many bytes for a context, whatever it says.

    Raises:
        ContextError: it has at least so many tokens.
    """
    most = longest_token(tokenizer)
    if n_bytes > context * most:
        raise ContextError(-(-n_bytes // most), context)

"""Lower bounds of a text's length in tokens, before it is encoded as a whole.

Encoding a text takes some two hundred times its bytes for a moment, and seconds for megabytes. So a
text that cannot fit into a model's context is refused by its bytes, and one that hardly can is
counted in pieces, until it is known to be too long. ``Scheduler._check_prompt`` has the last word.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcellar.errors import ContextError
from kvcellar.hosting.thread_lanes import check_wanted

PIECE_CHARACTERS = 32 << 10

USUAL_CHARACTERS = 8
"""A text with fewer to a token of the context is encoded as a whole at once."""

SEAM_TOKENS = 16
"""A text has at most so many tokens less than its two halves: only what is around the seam can be
joined. In fact it is one or two."""

_longest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_VALUE_BYTES = 64
"""An object, number or text takes about the time of so many bytes of text."""


class Size(NamedTuple):
    """The length of some values of JSON, and the work that they are.

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


def refuse_text(tokenizer: Any, text: str, context: int, *, times: int = 1) -> None:
    """Refuse a text that is too long for a context, having encoded no more of it than was needed.

    Says nothing of texts that are not much longer than a context: these are counted exactly.

    Args:
        tokenizer: of the model.
        text: the whole prompt.
        context: tokens that it may have.
        times: how many times as long it may be.

    Raises:
        ContextError: it has at least so many tokens.
        UnwantedError: nobody waits for it any more.
    """
    if len(text) <= max(PIECE_CHARACTERS, USUAL_CHARACTERS * times * context):
        return
    n = 0
    for at in range(0, len(text), PIECE_CHARACTERS):
        check_wanted()
        piece = text[at : at + PIECE_CHARACTERS]
        n += len(tokenizer.encode(piece, add_special_tokens=False)) - SEAM_TOKENS
        if n > times * context:
            raise ContextError(n, context)

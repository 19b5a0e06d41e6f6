"""The tokens of one sequence, as the request, the sequence, the agent and the store hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcellar.checks import seen, whole, wholes
from kvcellar.errors import PromptError

__all__ = ["History", "common_prefix"]

TokenArray = NDArray[np.int64]

_FIRST_COMPARED = 256
"""Tokens that are compared at first: histories that differ mostly differ early."""

_LEAST_ROOM = 16
"""Tokens that a history which grows has room for, at least."""


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Return how many tokens two arrays begin with in common."""
    n = min(len(a), len(b))
    start, size = 0, _FIRST_COMPARED
    while start < n:
        stop = min(start + size, n)
        differ = a[start:stop] != b[start:stop]
        first = int(differ.argmax())
        if differ[first]:
            return start + first
        start, size = stop, 4 * size
    return n


class History:
    """Tokens in the order in which a model reads them: int64, and append-only.

    What was read stays what it was: views that were taken, and prefixes, never change. A prefix
    shares the memory of the whole; the first token that is appended to it moves it to its own.
    One thread may append while others read.

    Invariants:
      - tokens ``[0, n)`` of a buffer are never written again;
      - only the history that made a buffer writes behind its own ``n`` tokens;
      - whoever appends has the buffer in place before it counts the token.
    """

    __slots__ = ("_buffer", "_is_owner", "_n", "_view")
    __hash__ = None  # type: ignore[assignment]  # it grows

    def __init__(self, tokens: Iterable[int] | History | TokenArray = ()) -> None:
        """Copy tokens, or share those of another history.

        Raises:
            PromptError: one of them is no whole number, or none that 64 bits hold.
        """
        if isinstance(tokens, History):
            self._n: int = tokens._n
            self._buffer: TokenArray = tokens._buffer
            self._view: TokenArray = tokens._view
            self._is_owner = False
        else:
            self._take(_as_array(tokens))
            self._n = len(self._buffer)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._n

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> TokenArray: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | TokenArray:
        """Return a token, or a read-only view of some."""
        if isinstance(at, slice):
            return self._view[: self._n][at]
        index = at.__index__()
        if not -self._n <= index < self._n:
            raise IndexError(f"token {index} of a history of {self._n}")
        return int(self._buffer[index if index >= 0 else index + self._n])

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens that are there now."""
        return iter(self.tokens.tolist())

    def __eq__(self, other: object) -> bool:
        """Return true if another history, list, tuple or array has the same tokens."""
        if isinstance(other, History | list | tuple | np.ndarray):
            return bool(np.array_equal(self.tokens, np.asarray(other)))
        return NotImplemented

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the tokens for NumPy: the view itself where nothing has to change."""
        return np.array(self.tokens, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        """Return the number of tokens and the first of them."""
        more = ", ..." if self._n > 8 else ""
        return f"History({self._n} tokens: {', '.join(map(str, self[:8].tolist()))}{more})"

    @property
    def tokens(self) -> TokenArray:
        """Read-only view of all tokens, ``[len(self)]``."""
        return self._view[: self._n]

    def append(self, token: int) -> None:
        """Add one token at the end.

        Raises:
            PromptError: it is no whole number of 64 bits; nothing was added.
        """
        n = self._n
        if not self._is_owner or n == len(self._buffer):
            self._reserve(n + 1)
        try:
            self._buffer[n] = token if type(token) is int else whole(token, "a token", PromptError)
        except OverflowError:
            raise PromptError(f"a token must fit 64 bits, got {seen(token)}") from None
        self._n = n + 1

    def extend(self, tokens: Iterable[int] | History | TokenArray) -> None:
        """Add tokens at the end, all or none.

        Raises:
            PromptError: one of them is no whole number of 64 bits; nothing was added.
        """
        more = tokens.tokens if isinstance(tokens, History) else _as_array(tokens)
        stop = self._n + len(more)
        self._reserve(stop)
        self._buffer[self._n : stop] = more
        self._n = stop

    def prefix(self, n: int) -> History:
        """Return the first ``n`` tokens as a history of their own, at once and without a copy."""
        if not 0 <= n <= self._n:
            raise IndexError(f"a prefix of {n} tokens of a history of {self._n}")
        found = History(self)
        found._n = n
        return found

    def common_prefix(self, other: History | TokenArray, start: int = 0) -> int:
        """Return how many tokens of ``other`` stand here from ``start`` on, up to a difference."""
        return common_prefix(self[start:], other.tokens if isinstance(other, History) else other)

    def digest(self) -> str:
        """Return 32 hexadecimal digits that only a history of the same tokens has."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.tokens, dtype="<i8").tobytes())

    def spans(self, size: int) -> Iterator[tuple[int, int, TokenArray]]:
        """Yield each whole stretch of ``size`` tokens as (start, stop, view)."""
        tokens = self.tokens
        for stop in range(size, len(tokens) + 1, size):
            yield stop - size, stop, tokens[stop - size : stop]

    def _reserve(self, n: int) -> None:
        """Make room for ``n`` tokens in a buffer that this history may write to."""
        if self._is_owner and n <= len(self._buffer):
            return
        fresh = np.empty(max(_LEAST_ROOM, n + n // 2), dtype=np.int64)
        fresh[: self._n] = self._buffer[: self._n]
        self._take(fresh)

    def _take(self, buffer: TokenArray) -> None:
        """Keep tokens in an array that nobody else writes to."""
        view = buffer.view()
        view.flags.writeable = False
        self._buffer, self._view, self._is_owner = buffer, view, True


def _as_array(tokens: Iterable[int] | TokenArray) -> TokenArray:
    """Return a new array of tokens that nobody else writes to."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int64 and tokens.ndim == 1:
        return tokens.copy()
    try:
        return np.array(wholes(tokens, "tokens", PromptError), dtype=np.int64)
    except OverflowError:
        raise PromptError("each of tokens must fit 64 bits; one is larger") from None

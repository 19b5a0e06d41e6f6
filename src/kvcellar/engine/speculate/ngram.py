"""Guesses without a model: what followed when the last few tokens stood there before.

All sequences share one memory, so a sequence finds repetitions in its own prompt and answer, in the
history that its agent brought along, and in those of its siblings. The method is known as prompt
lookup decoding (Saxena, 2023); LLMA (Yang et al., 2023, arXiv:2304.04487) copies from references
likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.engine.speculate.drafter import NO_DRAFT, Ask, Draft
from kvcellar.errors import ConfigError
from kvcellar.types import IntArray

__all__ = ["NgramDrafter"]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OFFSET_BITS = 40


@dataclass(slots=True, eq=False)
class _History:
    """The tokens of one sequence, as far as they are in the memory."""

    number: int
    tokens: list[int]
    n_known: int = 0
    is_over: bool = False


class NgramDrafter:
    """Remembers what followed every run of ``sizes`` tokens; the latest occurrence counts.

    Invariant: histories of sequences that have ended take at most ``max_tokens`` tokens together;
    the oldest is forgotten first.
    """

    is_free = True

    def __init__(self, sizes: Sequence[int] = (8, 4, 2), *, max_tokens: int = 1 << 20) -> None:
        """Nothing remembered.

        Args:
            sizes: tokens that have to be equal, longest first; a longer match is trusted more.
            max_tokens: of sequences that have ended, to be remembered.

        Raises:
            ConfigError: no sizes, or one below 1, or not in descending order.
        """
        ordered = sorted(set(sizes), reverse=True)
        if not sizes or min(sizes) < 1 or list(sizes) != ordered:
            raise ConfigError(
                f"sizes {tuple(sizes)} cannot be: give run lengths from 1 on, the longest first"
            )
        self.sizes = tuple(sizes)
        self.max_tokens = max_tokens
        self._seen: dict[int, dict[int, int]] = {size: {} for size in self.sizes}
        self._histories: dict[int, _History] = {}
        self._of_request: dict[int, _History] = {}
        self._n_over = 0
        self._next = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For each sequence what followed its last tokens the last time."""
        for ask in asks:
            self._take(ask)
        return [self._guess(ask) for ask in asks]

    def ended(self, request_id: int) -> None:
        """Keep what it said, for others; forget the oldest of what is too much."""
        history = self._of_request.pop(request_id, None)
        if history is None:
            return
        history.tokens = list(history.tokens)  # nobody adds to it any more
        history.is_over = True
        self._n_over += len(history.tokens)
        for number, old in list(self._histories.items()):
            if self._n_over <= self.max_tokens:
                break
            if old.is_over:
                self._n_over -= len(old.tokens)
                del self._histories[number]
                self._forget(number)

    def _take(self, ask: Ask) -> None:
        """Remember the tokens that came since the last time.

        A run is remembered when the token behind it is known: the last run has no follower yet.
        """
        history = self._of_request.get(ask.request_id)
        if history is None:
            history = _History(self._next, ask.tokens)
            self._next += 1
            self._histories[history.number] = self._of_request[ask.request_id] = history
        n = len(ask.tokens)
        for size in self.sizes:
            first = max(size, history.n_known)  # positions of followers
            if n - first == 1:
                self._seen[size][_key(ask.tokens[first - size : first])] = (
                    history.number << _OFFSET_BITS
                ) + first
            elif n > first:
                keys = _keys(np.asarray(ask.tokens[first - size : n - 1], dtype=np.int64), size)
                base = history.number << _OFFSET_BITS
                self._seen[size].update(
                    zip(keys.tolist(), range(base + first, base + n), strict=True)
                )
        history.n_known = n

    def _guess(self, ask: Ask) -> Draft:
        tokens = ask.tokens
        for size in self.sizes:
            if len(tokens) < size:
                continue
            suffix = tokens[-size:]
            at = self._seen[size].get(_key(suffix))
            if at is None:
                continue
            history = self._histories.get(at >> _OFFSET_BITS)
            first = at & ((1 << _OFFSET_BITS) - 1)
            if history is None or history.tokens[first - size : first] != suffix:
                continue  # forgotten, or two runs with one key
            found = history.tokens[first : first + ask.limit]
            while len(found) < ask.limit and history.tokens is tokens:
                # It runs into its own end: what repeats with this period goes on repeating.
                found = (found + found)[: ask.limit]
            return Draft(tuple(found), f"{size}-gram")
        return NO_DRAFT

    def _forget(self, number: int) -> None:
        """Drop what points to a history, once much does: to search all of it takes time."""
        n_alive = sum(len(history.tokens) for history in self._histories.values())
        for size, seen in self._seen.items():
            if len(seen) > 2 * n_alive + 1024:
                alive = self._histories
                self._seen[size] = {k: at for k, at in seen.items() if at >> _OFFSET_BITS in alive}


def _keys(tokens: IntArray, size: int) -> IntArray:
    """``[len(tokens) - size + 1]``: one number per run of ``size`` tokens."""
    n = len(tokens) - size + 1
    keys = np.zeros(n, dtype=np.uint64)
    for i in range(size):
        keys = (keys ^ tokens[i : i + n].astype(np.uint64)) * _MULTIPLIER
        keys ^= keys >> np.uint64(29)
    return keys.astype(np.int64, copy=False)


def _key(run: Sequence[int]) -> int:
    """``_keys`` of one run."""
    key, mask, multiplier = 0, (1 << 64) - 1, int(_MULTIPLIER)
    for token in run:
        key = ((key ^ token) * multiplier) & mask
        key ^= key >> 29
    return key - (1 << 64) if key >> 63 else key

"""Guesses without a model: what followed when the last few tokens stood there before.

All sequences share one memory, so a sequence finds repetitions in its own prompt and answer, in the
history that its agent brought along, and in those of its siblings. The method is known as prompt
lookup decoding (Saxena, 2023); LLMA (Yang et al., 2023, arXiv:2304.04487) copies from references
likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvcellar.engine.requests.draft import NO_DRAFT, Draft
from kvcellar.engine.speculate.drafter import DraftRequest
from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.pictures.tokens import is_in_vocabulary
from kvcellar.space import SHARED, Space
from kvcellar.types import IntArray

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_OFFSET_BITS = 40


@dataclass(slots=True, eq=False)
class _Said:
    """The tokens of one sequence, as far as they are in the memory.

    Attributes:
        number: its own.
        tokens: all, those that are not yet in the memory too.
        n_known: how many are.
        keys: of the last run of each size, where it has so many tokens; longest first.
        is_over: nothing is added any more.
    """

    number: int
    tokens: History
    seed: int = 0
    n_known: int = 0
    keys: list[int] = field(default_factory=list)
    is_over: bool = False


class NgramDrafter:
    """Remembers what followed every run of ``sizes`` tokens; the latest occurrence counts.

    Invariant: histories of sequences that have ended take at most ``max_tokens`` tokens together;
    the oldest is forgotten first.
    """

    is_free = True

    def __init__(self, sizes: Sequence[int] = (8, 4, 2), *, max_tokens: int = 1 << 20) -> None:
        """Create a memory without tokens.

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
        self._by_size: list[tuple[int, dict[int, int], int]] = [
            (size, {}, pow(_MULTIPLIER, size - 1, 1 << 64)) for size in self.sizes
        ]
        """Per size where each run was followed the last time, by its key; and what a token counts
        in a key that it is the first of."""
        self._histories: dict[int, _Said] = {}
        self._of_request: dict[int, _Said] = {}
        self._n_over = 0
        self._next = 0

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """Return for each sequence what followed its last tokens the last time."""
        histories = [self._take(ask) for ask in asks]
        return [self._guess(ask, history) for ask, history in zip(asks, histories, strict=True)]

    def ended(self, request_id: int) -> None:
        """Keep what it said, for others; forget the oldest of what is too much."""
        history = self._of_request.pop(request_id, None)
        if history is None:
            return
        history.tokens = History(history.tokens)  # nobody adds to it any more
        history.is_over = True
        self._n_over += len(history.tokens)
        for number, old in list(self._histories.items()):
            if self._n_over <= self.max_tokens:
                break
            if old.is_over:
                self._n_over -= len(old.tokens)
                del self._histories[number]
                self._forget(number)

    def _take(self, ask: DraftRequest) -> _Said:
        """Remember the tokens that came since the last time.

        A run is remembered when the token behind it is known: the last run has no follower yet.
        """
        history = self._of_request.get(ask.request_id)
        if history is None:
            history = _Said(self._next, ask.tokens, _seed(ask.space))
            self._next += 1
            self._histories[history.number] = self._of_request[ask.request_id] = history
        n = len(ask.tokens)
        if n == history.n_known + 1 and history.keys:
            self._take_one(history)
        elif n > history.n_known:
            self._take_many(history)
        history.n_known = n
        return history

    def _take_one(self, history: _Said) -> None:
        """Remember one more token: the keys of the last runs roll on."""
        tokens, keys = history.tokens, history.keys
        first = len(tokens) - 1
        token, place = tokens[first], (history.number << _OFFSET_BITS) + first
        for i, (size, seen, power) in enumerate(self._by_size):
            if size <= first:
                seen[keys[i] ^ history.seed] = place
                keys[i] = ((keys[i] - tokens[first - size] * power) * _MULTIPLIER + token) & _MASK
            elif size == len(tokens):
                keys[i] = _key(tokens)

    def _take_many(self, history: _Said) -> None:
        tokens, n = history.tokens, len(history.tokens)
        base = history.number << _OFFSET_BITS
        for size, seen, _ in self._by_size:
            first = max(size, history.n_known)  # positions of followers
            if n > first:
                keys = _keys(tokens[first - size : n - 1], size) ^ np.uint64(history.seed)
                seen.update(zip(keys.tolist(), range(base + first, base + n), strict=True))
        end = tokens[-self.sizes[0] :].tolist()
        history.keys = [_key(end[-size:]) for size in self.sizes]

    def _guess(self, ask: DraftRequest, history: _Said) -> Draft:
        tokens = ask.tokens
        end = tokens[-self.sizes[0] :].tolist()
        for (size, seen, _), key in zip(self._by_size, history.keys, strict=True):
            at = seen.get(key ^ history.seed)
            if at is None or len(tokens) < size:
                continue
            found_in = self._histories.get(at >> _OFFSET_BITS)
            first = at & ((1 << _OFFSET_BITS) - 1)
            if found_in is None or found_in.seed != history.seed:
                continue  # forgotten, or a stranger's
            if found_in.tokens[first - size : first].tolist() != end[-size:]:
                continue  # two runs with one key
            found = found_in.tokens[first : first + ask.limit].tolist()
            while len(found) < ask.limit and found_in.tokens is tokens:
                # It runs into its own end: what repeats with this period goes on repeating.
                found = (found + found)[: ask.limit]
            said = tuple(takewhile(is_in_vocabulary, found))  # no model says a picture
            return Draft(said, f"{size}-gram")
        return NO_DRAFT

    def _forget(self, number: int) -> None:
        """Drop what points to a history, once much does: searching all of it takes time."""
        n_alive = sum(len(history.tokens) for history in self._histories.values())
        for _, seen, _ in self._by_size:
            if len(seen) > 2 * n_alive + 1024:
                gone = [k for k, at in seen.items() if at >> _OFFSET_BITS not in self._histories]
                for key in gone:
                    del seen[key]


def _seed(space: Space) -> int:
    """Return a number of 64 bits for a space; 0 for everybody's."""
    if space == SHARED:
        return 0
    return int.from_bytes(blake2b(repr(tuple(space)).encode(), digest_size=8).digest())


def _keys(tokens: IntArray, size: int) -> NDArray[np.uint64]:
    """Return ``[len(tokens) - size + 1]`` numbers, one per run of ``size`` tokens.

    A polynomial in the multiplier modulo 2^64, so that the key of the next run follows from that of
    the one before (Karp and Rabin, 1987).
    """
    n = len(tokens) - size + 1
    keys = np.zeros(n, dtype=np.uint64)
    for i in range(size):
        keys = keys * np.uint64(_MULTIPLIER) + tokens[i : i + n].astype(np.uint64)
    return keys


def _key(run: Iterable[int]) -> int:
    """Return what ``_keys`` gives for one run."""
    key = 0
    for token in run:
        key = (key * _MULTIPLIER + token) & _MASK
    return key

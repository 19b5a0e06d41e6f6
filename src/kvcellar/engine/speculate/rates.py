"""Hit rates of guesses, by how they were made."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field

from kvcellar.engine.requests.draft import Draft

_DECAY = 0.97
_PRIOR = 4.0
_UNKNOWN = (0.6, 0.15)
"""A first guess for a token, and a further one, of a drafter that does not say."""

_EDGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Beliefs between two of these are counted as one."""

Key = tuple[str, int]
"""The kind of a guess, and which of several for one token it is, or what its drafter believes."""


@dataclass(slots=True)
class HitRate:
    """Share of guesses of one kind that are right; the latest count most."""

    hits: float = 0.0
    tries: float = 0.0

    def learn(self, is_right: bool) -> None:
        """Count one more guess that was compared."""
        self.hits = _DECAY * self.hits + is_right
        self.tries = _DECAY * self.tries + 1

    def value(self, prior: float) -> float:
        """Return a rate between what was seen and a prior that few guesses do not outweigh."""
        return (self.hits + _PRIOR * prior) / (self.tries + _PRIOR)


@dataclass(slots=True)
class Rates:
    """Rates per kind, and per request and kind; a request's own outweighs the general as it grows.

    A drafter's beliefs are taken for what guesses of such a belief were worth here.
    """

    _general: dict[Key, HitRate] = field(default_factory=dict)
    _of_request: dict[int, dict[Key, HitRate]] = field(default_factory=dict)

    def paths(self, request_id: int, draft: Draft) -> list[float]:
        """Return per guess how likely it is right together with all that it follows."""
        found: list[float] = []
        known: dict[Key, float] = {}
        for (key, prior), parent in zip(_keys(draft), draft.parents, strict=True):
            rate = known.get(key)
            if rate is None:
                rate = known[key] = self._value(request_id, key, prior)
            found.append(rate * found[parent] if parent >= 0 else rate)
        return found

    def learn(self, request_id: int, draft: Draft, chosen: list[int]) -> list[bool]:
        """Compare guesses with what was sampled; return per level if one was right."""
        path = draft.follow(chosen)
        keys = _keys(draft)
        mine = self._of_request.setdefault(request_id, {})
        above, levels = -1, []
        for level in range(min(len(path) + 1, len(chosen))):
            children = list(draft.children(above))
            if not children:
                break
            right = path[level] if level < len(path) else -1
            for node in children:
                key = keys[node][0]
                mine.setdefault(key, HitRate()).learn(node == right)
                self._general.setdefault(key, HitRate()).learn(node == right)
            levels.append(right >= 0)
            above = right
        return levels

    def ended(self, request_id: int) -> None:
        """Forget what was one request's."""
        self._of_request.pop(request_id, None)

    def _value(self, request_id: int, key: Key, prior: float) -> float:
        general = self._general.get(key)
        value = prior if general is None else general.value(prior)
        mine = self._of_request.get(request_id)
        own = None if mine is None else mine.get(key)
        return value if own is None else own.value(value)


def _keys(draft: Draft) -> list[tuple[Key, float]]:
    """Return per guess under what it is counted, and what is believed of it at first."""
    if draft.beliefs:
        return [((draft.kind, -1 - bisect(_EDGES, b)), b) for b in draft.beliefs]
    if draft.is_chain:
        return [((draft.kind, 0), _UNKNOWN[0])] * len(draft)
    n_siblings: dict[int, int] = {}
    keys = []
    for parent in draft.parents:
        rank = n_siblings[parent] = n_siblings.get(parent, -1) + 1
        keys.append(((draft.kind, rank), _UNKNOWN[min(rank, 1)]))
    return keys

"""What a step takes by the number of its tokens, learnt from the steps that ran."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["StepCosts"]

_WEIGHT = 0.2
_HOPE = 0.5
"""Of what a size between two known ones would take, were it in proportion: so much is believed."""

_EXACT = 32
"""Sizes up to which every one is counted by itself; above, some share a figure."""


class StepCosts:
    """Seconds of a step of ``n`` tokens. What was never tried is believed to cost little more.

    A size above all known ones is believed to cost what the largest of them does, and one between
    two of them half of what it would in proportion. So a size is tried when it may well pay, and
    after that its own cost is known.
    """

    def __init__(self) -> None:
        """Nothing measured."""
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []

    def learn(self, n_tokens: int, seconds: float) -> None:
        """One more step has run."""
        size = _rounded(n_tokens)
        old = self._seconds.get(size)
        if old is None:
            insort(self._sizes, size)
            self._seconds[size] = seconds
        else:
            # A step that was held up says nothing of steps: it counts as twice the usual at most.
            self._seconds[size] = old + _WEIGHT * (min(seconds, 2 * old) - old)

    def seconds(self, n_tokens: int) -> float | None:
        """What such a step is believed to take; None before the first step."""
        if not self._sizes:
            return None
        size = _rounded(n_tokens)
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return self._seconds[self._sizes[-1]]
        high = self._sizes[at]
        if high == size or at == 0:
            return self._seconds[high]
        low = self._sizes[at - 1]
        less, more = self._seconds[low], self._seconds[high]
        return less + _HOPE * max(0.0, more - less) * (size - low) / (high - low)


def _rounded(n_tokens: int) -> int:
    """The size under which a step is counted: to an eighth, above ``_EXACT``."""
    if n_tokens <= _EXACT:
        return n_tokens
    step = 1 << (n_tokens.bit_length() - 4)
    return n_tokens // step * step

"""Seconds that a step takes by the number of its tokens, learnt from the steps that ran."""

from __future__ import annotations

from bisect import bisect_left

_WEIGHTS = (0.2, 0.4)
"""Of one more step that took longer than believed, and of one that took less: what holds a step up
is no part of what it costs."""

_HOPE = 0.5
"""Of what a size between two known ones would take, were it in proportion: so much is believed."""

_EXACT = 32
"""Sizes up to which every one is counted by itself; above, some share a figure."""


class StepCosts:
    """Seconds of a step of ``n`` tokens. What was never tried is believed to cost little more.

    A size above all known ones is believed to cost what the largest of them does, and one between
    two of them half of what it would in proportion. So a size is tried when it may well pay, and
    after that its own cost is known. No size costs more than a larger one: where it seems so, its
    steps were held up.
    """

    def __init__(self) -> None:
        """Create costs without a measurement."""
        self._sizes: list[int] = []
        self._measured: list[float] = []
        """Per size what was measured."""
        self._believed: list[float] = []
        """Per size the least of what was measured of it and of all larger ones."""

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Count one more step that has run."""
        size = _rounded(n_tokens)
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes) or self._sizes[at] != size:
            self._sizes.insert(at, size)
            self._measured.insert(at, seconds)
            self._believed.insert(at, seconds)
        else:
            self._measured[at] = blend(self._measured[at], seconds, *_WEIGHTS)
        least = self._believed[at + 1] if at + 1 < len(self._sizes) else self._measured[at]
        for i in range(at, -1, -1):
            least = self._believed[i] = min(least, self._measured[i])

    def seconds(self, n_tokens: int) -> float | None:
        """Return what such a step is believed to take; None before the first step."""
        if not self._sizes:
            return None
        size = _rounded(n_tokens)
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return self._believed[-1]
        high = self._sizes[at]
        if high == size or at == 0:
            return self._believed[at]
        low = self._sizes[at - 1]
        less, more = self._believed[at - 1], self._believed[at]
        return less + _HOPE * (more - less) * (size - low) / (high - low)


def blend(old: float, new: float, if_more: float, if_less: float) -> float:
    """Move a mean towards a new value, with one weight if it is more and one if it is less.

    What was held up says little: more than twice the mean counts as twice, and a mean of more than
    twice what comes is given up.
    """
    if new > old:
        return old + if_more * (min(new, 2 * old) - old)
    old = min(old, 2 * new)
    return old + if_less * (new - old)


def _rounded(n_tokens: int) -> int:
    """Return the size under which a step is counted: to an eighth, above ``_EXACT``."""
    if n_tokens <= _EXACT:
        return n_tokens
    step = 1 << (n_tokens.bit_length() - 4)
    return n_tokens // step * step

"""The part of its history that a query sees: all of it, a sliding window, or its chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcellar.checks import whole
from kvcellar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sight:
    """The positions that a query sees, of those up to its own.

    Attributes:
        window: w, where a query at position p sees positions ``(p - w, p]``.
        chunk: c, where a query at position p sees positions ``[p - p % c, p]``.

    With neither, a query sees all of the history. What it sees never begins before what an earlier
    query sees, so rows that one query has passed are passed for all that follow.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(getattr(self, name), name))
                if getattr(self, name) < 1:
                    raise ConfigError(
                        f"a {name} sees at least its own token, got {name}={getattr(self, name)}"
                    )
        if self.window is not None and self.chunk is not None:
            raise ConfigError(
                f"a query sees a window or a chunk, got window={self.window} and chunk={self.chunk}"
            )

    def __str__(self) -> str:
        """Return what is seen in words, for messages."""
        if self.window is not None:
            return f"a sliding window of {self.window}"
        return "all of the history" if self.chunk is None else f"a chunk of {self.chunk}"

    @property
    def is_full(self) -> bool:
        """True if a query sees all of the history."""
        return self.window is None and self.chunk is None

    @property
    def most_before(self) -> int:
        """The most positions before its own that a query sees; 0 where it may be any number."""
        return (self.window or self.chunk or 1) - 1

    def first_seen(self, pos: int) -> int:
        """Return the first position that a query at ``pos`` sees."""
        if self.window is not None:
            return max(0, pos - self.window + 1)
        return 0 if self.chunk is None else pos - pos % self.chunk

    def first_clear_of(self, stop: int) -> int:
        """Return the first position from which on no query sees anything before ``stop``.

        Raises:
            ValueError: ``stop`` is above 0 and every query sees all of the history.
        """
        if not stop:
            return 0
        if self.window is not None:
            return stop + self.window - 1
        if self.chunk is None:
            raise ValueError(f"every query sees what lies before {stop}")
        return -(-stop // self.chunk) * self.chunk

    def resume_at(self, length: int, lacks: int) -> int:
        """Return the greatest length up to ``length`` that a history can be resumed from.

        Args:
            length: tokens of the history.
            lacks: one past the highest position whose rows are gone.
        """
        first = self.first_seen(length)
        if first >= min(lacks, length):
            return length
        return 0 if self.chunk is None else first

    def see(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which keys each query sees, by their positions: ``[queries, keys]``."""
        behind = queries[:, None] - keys[None, :]
        mask: NDArray[np.bool_] = behind >= 0
        if self.window is not None:
            return mask & (behind < self.window)
        return mask if self.chunk is None else mask & (behind <= (queries % self.chunk)[:, None])

    def n_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many positions before its own a query at each position sees."""
        if self.window is not None:
            return np.minimum(positions, self.window - 1)
        return positions if self.chunk is None else positions % self.chunk


FULL = Sight()
"""The sight of a query that sees all of the history."""
